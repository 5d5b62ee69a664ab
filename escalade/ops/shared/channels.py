"""Operations that work per channel: names, checks, per-channel vectors, and thread tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from escalade.device.program import Constant, Program, Type
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.calling.call import Packer
from escalade.ops.calling.library import require_same_device
from escalade.ops.shared.images import ImageProblem, check_problem, require_32_bits

SIZES = "{channels}_{height,width}_b{batch}"
"""Sizes in a problem's name pattern."""


class Channelwise(ImageProblem, Protocol):
    """Images processed per channel."""

    @property
    def pixels(self) -> int: ...
    @property
    def elements(self) -> int: ...


def check_channelwise(operation: str, problem: Channelwise) -> None:
    """Raise for sizes that no such problem supports."""
    check_problem(operation, problem)
    require_32_bits(operation, problem.channels * problem.pixels)


def channels_innermost(problem: Channelwise) -> bool:
    """Images of one pixel have the same memory order in both layouts."""
    return problem.layout == "nhwc" or problem.pixels == 1


def program(
    source: str, problem: Channelwise, constants: Mapping[str, Constant] | None = None, **scope: Any
) -> Program:
    """Return a program over `problem` and `scope`, with the type that counts the problem's elements as `index`."""
    index = Type("unsigned" if problem.elements < 2**31 else "unsigned long long")
    return Program.of(source, constants=constants, problem=problem, index=index, **scope)


@dataclass(frozen=True)
class ChannelTile:
    """Tile of a CTA over rows of channels: `width` packs of `vector` channels across, `height` rows."""

    vector: int
    width: int
    height: int
    across: int
    """CTAs that cover all channels."""

    @staticmethod
    def of(problem: Channelwise, threads: int, most: int = VECTOR_BYTES) -> ChannelTile:
        """Choose packs as wide as the channels allow, up to `most` elements."""
        vector = min(most, widest_vector(problem.dtype, problem.channels))
        packs = problem.channels // vector
        width = min(packs, threads)
        return ChannelTile(vector, width, threads // width, blocks(packs, width))


# --- tensors


def check_channel_vectors(
    operation: str, x: torch.Tensor, vectors: Mapping[str, torch.Tensor | None]
) -> None:
    """Raise unless every tensor holds one number per channel of x."""
    channels = x.shape[1]
    for name, tensor in vectors.items():
        if tensor is None:
            continue
        require_same_device(x, name, tensor)
        if tensor.dtype not in (torch.float32, x.dtype):
            raise UnsupportedError(f"{name} is {tensor.dtype}; {operation} supports float32, or x's dtype")
        if tensor.dim() != 1 or tensor.shape[0] != channels:
            raise UnsupportedError(
                f"{name} has shape {tuple(tensor.shape)}; for {channels} channels it must be ({channels},)"
            )


def channel_packer(x: torch.Tensor, default: float = 0.0) -> Packer:
    """Return a packer of per-channel vectors to dense fp32; None becomes a vector of the default."""
    channels, device = x.shape[1], x.device

    def pack(given: torch.Tensor | None) -> torch.Tensor:
        if given is None:
            return torch.full((channels,), default, dtype=torch.float32, device=device)
        return given.float().contiguous()

    return pack
