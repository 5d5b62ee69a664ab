"""Operands made fit for a product: other element types, channels padded with zeros, values rounded to TF32."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from escalade.device.program import Constant, Program, Type
from escalade.device.recipe import Buffer, Int64, KernelCall, Workspace
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.mma_config import Operands

COPY_BYTES = 16
"""What Hopper's TMA moves at least: channels are a multiple."""
CUT_OFF = math.log(2) * 2.0**-11
"""What numbers lose on average, relative to their sum, when all but TF32's bits are cut off: half of the last bit, of
numbers whose mantissas are as likely at every magnitude."""


@dataclass(frozen=True)
class Prepared:
    """Operands that a product can copy: the launches that make them, and their names."""

    steps: tuple[KernelCall, ...]
    workspaces: tuple[Workspace, ...]
    x: Buffer
    weight: Buffer
    shortcut_weight: Buffer
    shape: Conv2dProblem
    """The problem with the channels that the operands now have."""


@dataclass(frozen=True)
class Conversion:
    """Rows of channels, copied to a workspace."""

    source: str
    rows: int
    channels: int
    target_channels: int
    element: Type
    target: Type
    target_bytes: int
    rounded: bool = False
    raised: bool = False
    """Whether what the other operand loses to truncation is made up for, as `prepare_for_copies` says."""

    @property
    def name(self) -> str:
        return f"converted_{self.source}"

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.name, self.rows * self.target_channels * self.target_bytes)

    @property
    def step(self) -> KernelCall:
        constants: dict[str, Constant] = {
            "Source": self.element,
            "Target": self.target,
            "CHANNELS_ALIGNED": self.channels % 4 == 0 and self.channels == self.target_channels,
            "ROUNDED": self.rounded,
            "FACTOR": 1 + CUT_OFF if self.raised else 1.0,
        }
        return KernelCall(
            Program.of("conv2d/convert.cu", "conv2d_convert", constants),
            (ceil_div(self.rows * self.target_channels // 4, 256), 1, 1),
            (256, 1, 1),
            (Buffer(self.source), Buffer(self.name), Int64(self.rows), self.channels, self.target_channels),
            weights_only=self.source != "x",
            overlap=True,
        )


def rounded(source: str, rows: int, channels: int) -> Conversion:
    """A conversion of weights in fp32 to values of TF32 for an x that is truncated, as `prepare_for_copies` has it."""
    return Conversion(
        source, rows, channels, channels, element("fp32"), element("fp32"), 4, True, raised=True
    )


def prepare(operands: Operands) -> Prepared:
    """Puts x and the weights into the form that `operands` has."""
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
    """The channels that x and the weights have for Hopper's TMA."""
    return (
        ceil_div(problem.channels * problem.element_bytes, COPY_BYTES) * COPY_BYTES // problem.element_bytes
    )


def prepare_for_copies(problem: Conv2dProblem) -> Prepared:
    """Prepares x and the weights for TMA and wgmma.

    wgmma ignores the low 13 bits of a TF32 operand. Truncation makes every product smaller, and a deep network adds
    that up. So weights are rounded beforehand, once, and made larger by what x will lose on average (`CUT_OFF`): what
    is left of its truncation is as large as an error of rounding, and points either way. x is rounded where it is
    copied anyway, and then the weights are left as they are.
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
        conversions["x"] = Conversion("x", p.batch * p.height * p.width, p.channels, channels, *kind)
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
