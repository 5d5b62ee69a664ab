"""An engine's arithmetic is its own, whatever modes PyTorch is in when it is made and called."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from escalade.ops.base.switches import precision

one_at_a_time = threading.RLock()
"""PyTorch's switches are the process's: two threads would put back what the other has set."""
_DEVICES = ("cpu", "cuda")
_HOST_SWITCHES: tuple[Any, ...] = tuple(
    one for name in ("conv", "matmul") if (one := getattr(torch.backends.mkldnn, name, None)) is not None
)


@contextmanager
def own_arithmetic(dtype: str, device: torch.device) -> Iterator[None]:
    """What PyTorch computes for a plan, it computes without gradients and in the types that the plan has.

    Neither autocast nor the default type counts, and TF32 is for `tf32` on a GPU alone. What is as it should be is
    left alone: on the CPU that is nearly always everything.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_autocast())
        other_type = torch.get_default_dtype() is not torch.float32
        if other_type or device.type == "cuda" or not _host_is_exact():
            stack.enter_context(one_at_a_time)
            stack.enter_context(precision(dtype if device.type == "cuda" else "fp32"))
        if other_type:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _host_is_exact() -> bool:
    """Whether products of fp32 on the CPU are fp32's."""
    return all(one.fp32_precision in ("none", "ieee") for one in _HOST_SWITCHES)
