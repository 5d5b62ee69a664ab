"""What operations that treat images channel by channel share: names, checks, numbers of channels, and how an array lies
over threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from escalade.device.program import Constant, Type
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import VECTOR_BYTES, element, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.calling.call import Lay
from escalade.ops.calling.library import require_same_device
from escalade.ops.shared.images import ImageProblem, check_problem, require_32_bits

SIZES = "{channels}_{height,width}_b{batch}"
"""The sizes in the name pattern of a problem."""


class Channelwise(ImageProblem, Protocol):
    """Images whose channels are treated one by one."""

    @property
    def pixels(self) -> int: ...
    @property
    def elements(self) -> int: ...


def check_channelwise(operation: str, problem: Channelwise) -> None:
    """Refuses what no such problem may be."""
    check_problem(operation, problem)
    require_32_bits(operation, problem.channels * problem.pixels)


def channels_innermost(problem: Channelwise) -> bool:
    """Images of one pixel are laid out alike in both layouts."""
    return problem.layout == "nhwc" or problem.pixels == 1


def constants(problem: Channelwise) -> dict[str, Constant]:
    """`Index` counts elements; 64-bit divisions take several times as long as 32-bit ones."""
    return {
        "Element": element(problem.dtype),
        "Index": Type("unsigned" if problem.elements < 2**31 else "unsigned long long"),
        "NHWC": channels_innermost(problem),
    }


@dataclass(frozen=True)
class Rows:
    """Rows of channels under a block: `width` packs of `vector` channels next to each other, `height` rows."""

    vector: int
    width: int
    height: int
    across: int
    """Blocks that it takes for all channels."""

    @staticmethod
    def of(problem: Channelwise, threads: int, most: int = VECTOR_BYTES) -> Rows:
        """Packs are as wide as the channels allow, up to `most` elements."""
        vector = min(most, widest_vector(problem.dtype, problem.channels))
        packs = problem.channels // vector
        width = min(packs, threads)
        return Rows(vector, width, threads // width, blocks(packs, width))


# --- tensors


def check_numbers(operation: str, x: torch.Tensor, numbers: Mapping[str, torch.Tensor | None]) -> None:
    """Refuses what is not one number for each channel of x."""
    channels = x.shape[1]
    for name, tensor in numbers.items():
        if tensor is None:
            continue
        require_same_device(x, name, tensor)
        if tensor.dtype not in (torch.float32, x.dtype):
            raise UnsupportedError(f"{name} is {tensor.dtype}; {operation} takes float32, or x's dtype")
        if tensor.dim() != 1 or tensor.shape[0] != channels:
            raise UnsupportedError(
                f"{name} has shape {tuple(tensor.shape)}; for {channels} channels it must be ({channels},)"
            )


def laying_numbers(x: torch.Tensor, default: float = 0.0) -> Lay:
    """How a number for each channel of x lies for kernels; the default for each where none are given."""
    channels, device = x.shape[1], x.device

    def lay(given: torch.Tensor | None) -> torch.Tensor:
        if given is None:
            return torch.full((channels,), default, dtype=torch.float32, device=device)
        return given.float().contiguous()

    return lay
