"""Operand conversion before a product: other element types, zero-padded channels, rounding to TF32."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from escalade.device.program import Program, Type
from escalade.device.recipe import Buffer, Int64, KernelCall, Workspace
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.mma_config import Operands

COPY_BYTES = 16
"""TMA granularity: pixels are a multiple of this size."""
CUT_OFF = math.log(2) * 2.0**-11
"""Mean relative loss when all but TF32's bits are truncated: half of the last bit, for mantissas distributed uniformly
over magnitudes."""


@dataclass(frozen=True)
class Prepared:
    """Converted operands: the launches that write them, and their buffers."""

    steps: tuple[KernelCall, ...]
    workspaces: tuple[Workspace, ...]
    x: Buffer
    weight: Buffer
    shortcut_weight: Buffer
    shape: Conv2dProblem
    """The problem with the operands' padded channels."""


@dataclass(frozen=True)
class Conversion:
    """Conversion of rows of channels into a workspace."""

    source: str
    rows: int
    channels: int
    target_channels: int
    element: Type
    target: Type
    target_bytes: int
    rounded: bool = False
    raised: bool = False
    """True to compensate for the truncation of the other operand, as described in `prepare_for_copies`."""
    prefix: str = "converted"

    @property
    def name(self) -> str:
        return f"{self.prefix}_{self.source}"

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.name, self.rows * self.target_channels * self.target_bytes)

    @property
    def factor(self) -> float:
        return 1 + CUT_OFF if self.raised else 1.0

    @property
    def step(self) -> KernelCall:
        return KernelCall(
            Program.of("conv2d/convert.cu", conversion=self),
            (ceil_div(self.rows * self.target_channels // 4, 256), 1, 1),
            (256, 1, 1),
            (Buffer(self.source), Buffer(self.name), Int64(self.rows), self.channels, self.target_channels),
            weights_only=self.source not in ("x", "shortcut"),
            overlap=True,
        )


def rounded(source: str, rows: int, channels: int) -> Conversion:
    """Return the conversion of fp32 weights to TF32 for an x that is truncated, as in `prepare_for_copies`."""
    return Conversion(
        source, rows, channels, channels, element("fp32"), element("fp32"), 4, True, raised=True
    )


def prepare(operands: Operands) -> Prepared:
    """Convert x and the weights to the form of `operands`."""
    p = operands.problem
    if not operands.padded and operands.element == element(p.dtype):
        return _prepared(p, {})
    size = (p.group_channels, operands.channels, element(p.dtype), operands.element, operands.element_bytes)
    return _prepared(
        p,
        {
            "weight": Conversion("weight", p.filters * p.taps, *size),
            "x": Conversion("x", p.batch * p.height * p.width * p.groups, *size),
        },
    )


def copied_channels(problem: Conv2dProblem) -> int:
    """Return the channels of x and the weights, padded to the TMA granularity."""
    return (
        ceil_div(problem.channels * problem.element_bytes, COPY_BYTES) * COPY_BYTES // problem.element_bytes
    )


def prepare_for_copies(problem: Conv2dProblem) -> Prepared:
    """Prepare x and the weights for TMA and wgmma.

    wgmma ignores the low 13 bits of a TF32 operand. Truncation makes every product smaller, which adds up over a deep
    network. So weights are rounded beforehand and scaled up by the mean loss of x (`CUT_OFF`). The remaining error is
    as large as a rounding error, of either sign. Where x is copied anyway, it is rounded instead and the weights are
    not scaled.
    """
    p, channels = problem, copied_channels(problem)
    padded, tf32 = channels != p.channels, p.dtype == "tf32"
    kind = (element(p.dtype), element(p.dtype), p.element_bytes, tf32)
    conversions = {}
    if padded or tf32:
        conversions["weight"] = Conversion(
            "weight", p.filters * p.taps, p.channels, channels, *kind, raised=tf32 and not padded
        )
    if tf32 and p.shortcut_channels:
        conversions["shortcut_weight"] = Conversion(
            "shortcut_weight", p.filters, p.shortcut_channels, p.shortcut_channels, *kind, raised=True
        )
    if padded:
        conversions["x"] = Conversion("x", p.images * p.height * p.width, p.channels, channels, *kind)
    return _prepared(p, conversions)


def _prepared(problem: Conv2dProblem, conversions: dict[str, Conversion]) -> Prepared:
    def buffer(source: str) -> Buffer:
        return Buffer(conversions[source].name if source in conversions else source)

    channels = conversions["x"].target_channels * problem.groups if "x" in conversions else problem.channels
    return Prepared(
        tuple(conversion.step for conversion in conversions.values()),
        tuple(conversion.workspace for conversion in conversions.values()),
        buffer("x"),
        buffer("weight"),
        buffer("shortcut_weight"),
        replace(problem, channels=channels),
    )
