"""Errors of peers and rungs as sentences, except those that stop the whole run: interrupts, and a lost GPU."""

from __future__ import annotations

import torch

from escalade.errors import EscaladeError, ToolError

_SHARE_OF_OTHERS = 0.05
"""Share of the memory that contexts, modules and graphs of this process may occupy outside of PyTorch's allocator."""


class LostDevice(EscaladeError):
    """The GPU fails every call of this process; the message names the preceding work."""


def require_device(device: torch.device, sentence: str) -> None:
    """Raise `LostDevice` with this sentence if the GPU is lost, as it is after an illegal access."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise LostDevice(f"{sentence}: {failure_reason(error)}") from error


def failure_reason(error: Exception) -> str:
    """Return the error in one line.

    A compiler or a pool of workers may turn an interrupt into an error of its own: the interrupt is raised again. So is
    an error that keeps every kernel from being compiled, and one of memory that other processes hold.
    """
    seen: set[int] = set()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        if not isinstance(behind, Exception) or isinstance(behind, ToolError):
            raise behind
        if isinstance(behind, torch.OutOfMemoryError) and _others_hold_memory():
            raise behind
        seen.add(id(behind))
        behind = behind.__cause__ or behind.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _others_hold_memory() -> bool:
    """Return True if other processes occupy a noticeable part of the GPU's memory."""
    if not torch.cuda.is_initialized():
        return False
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved() > _SHARE_OF_OTHERS * total
