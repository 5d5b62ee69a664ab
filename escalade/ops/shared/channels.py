"""Operations that work per channel: names, checks, per-channel vectors, and thread tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from escalade.device.program import Constant, Program, Type
from escalade.ops.base.dtypes import VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.calling.call import Packer
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


def vectors_of_x(*names: str) -> str:
    """Return what an operator on images with vectors of one number per channel takes."""
    return ", ".join(("x: N C H W", *(f"{name}: C of float32|x" for name in names)))


def empty_vector(x: torch.Tensor, exists: bool = True) -> torch.Tensor:
    """Return an empty fp32 vector of one number per channel; without elements unless it exists."""
    return x.new_empty(x.shape[1] if exists else 0, dtype=torch.float32)


def channel_packers(x: torch.Tensor, *names: str, **defaults: float) -> dict[str, Packer]:
    """Return packers of per-channel vectors to dense fp32; None becomes a vector of the default, which is 0 for
    `names`."""
    return {
        name: partial(_pack_vector, x.shape[1], x.device, default)
        for name, default in {**dict.fromkeys(names, 0.0), **defaults}.items()
    }


def _pack_vector(
    channels: int, device: torch.device, default: float, given: torch.Tensor | None
) -> torch.Tensor:
    if given is None:
        return torch.full((channels,), default, dtype=torch.float32, device=device)
    return given.float().contiguous()
