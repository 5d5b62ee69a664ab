"""Base classes of the rungs of conv2d and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from escalade.ops.base.accuracy import tf32_tolerance
from escalade.ops.base.card import MIN_SHARED, RESERVED_SHARED, Card
from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.problem import P
from escalade.ops.base.rung import C, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared import activation
from escalade.ops.shared.images import LAYOUTS

FEW_PRODUCTS = 16384
"""Up to this many products in all, some inputs lose clearly more to truncation than the mean."""


@dataclass(frozen=True)
class ConvolutionRung(Rung[P, C]):
    """Rung of conv2d or of one of its gradients, with the dtypes, layouts and groups that it supports."""

    dtypes: tuple[str, ...] = field(default=MULTIPLIED, kw_only=True)
    layouts: tuple[str, ...] = field(default=LAYOUTS, kw_only=True)
    takes_groups: ClassVar[bool] = False
    """True if the kernel supports several groups."""
    takes_frames: ClassVar[bool] = False
    """True if the kernel supports volumes."""
    split_rounding: ClassVar[float | None] = None
    """Least tolerance in fp32, whose operands tensor cores multiply in two parts; None for kernels on CUDA cores."""

    def unsupported_form(self, p: Conv2dProblem) -> str | None:
        """Return why the rung does not support the dtype, groups or layout of a convolution."""
        if p.dtype not in self.dtypes:
            other = "; persistent does" if p.is_quantized else ""
            return f"{self.name} takes {', '.join(self.dtypes)}, not {p.dtype}{other}"
        if p.groups != 1 and not self.takes_groups:
            return f"{self.name} takes groups=1, not {p.groups}; direct takes any"
        if p.has_frames and not self.takes_frames:
            return f"{self.name} takes images, not volumes"
        if p.layout not in self.layouts:
            return f"{self.name} takes layout {' or '.join(self.layouts)}, not {p.layout}"
        return None

    def limits(self, problem: P) -> str | None:
        """Like `supports`, for what the rung does not declare."""
        return None

    def tolerance(self, problem: P, peer_error: float) -> float:
        """Return the tolerance for products of tensor cores: in TF32 at least its own error."""
        tolerance, p = super().tolerance(problem, peer_error), cast(Any, problem)
        if self.split_rounding is None:
            return tolerance
        split = self.split_rounding if p.dtype == "fp32" else 0
        return max(tf32_tolerance(p.dtype, p.products, tolerance), split)


@dataclass(frozen=True)
class Conv2dRung(ConvolutionRung[Conv2dProblem, C]):
    supports_shortcut: ClassVar[bool] = False
    """True if the kernel continues with the shortcut image."""
    supports_prologue: ClassVar[bool] = False
    """True if the kernel applies an expression to x first."""
    supports_pool: ClassVar[bool] = False
    """True if the kernel max-pools its results and finds the argmax indices."""
    supports_mean: ClassVar[bool] = False
    """True if the kernel also averages its results."""
    supports_vectors: ClassVar[bool] = False
    """True if the activation may use vectors."""
    supports_statistics: ClassVar[bool] = False
    """True if the kernel finds the mean and variance of its results."""
    supports_residual: ClassVar[bool] = True
    pitched_buffers: ClassVar[tuple[str, ...]] = ()
    """Buffers that may have a pitch."""
    supports_pitched_residual: ClassVar[bool] = False
    """True if y may have a pitch where a residual is added."""
    truncates: ClassVar[bool] = False
    """True if wgmma reads TF32 operands as stored, without their last bits: see `prepare_for_copies`."""

    def supports(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if reason := unsupported_pitch(self.name, p, self.pitched_buffers):
            return reason
        if p.shortcut_channels and not self.supports_shortcut:
            return f"{self.name} supports no shortcut; this one has {p.shortcut_channels} channels"
        if p.prologue and not self.supports_prologue:
            return f"{self.name} supports no prologue, not {p.prologue!r}"
        if p.pools and not self.supports_pool:
            return f"{self.name} supports no pool, not {p.pool}"
        if p.mean and not self.supports_mean:
            return f"{self.name} supports maxima in pools, not means"
        if activation.vectors_of(p.activation) and not self.supports_vectors:
            return f"{self.name} supports activations of x and residual, not {p.activation!r}"
        if p.statistics and p.is_quantized:
            return f"{self.name} computes mean and variance of results in 16 and 32 bits, not in {p.dtype}"
        if p.statistics and not self.supports_statistics:
            return f"{self.name} does not compute mean and variance of its results; batch_statistics does"
        if p.output and not p.is_quantized:
            return f"{self.name} stores y as {p.dtype}; output {p.output} is for dtypes fp8 and int8"
        if reason := self.unsupported_form(p):
            return reason
        if p.residual and not self.supports_residual:
            return f"{self.name} does not support a residual"
        if p.residual and p.y_pitch and not self.supports_pitched_residual:
            return f"{self.name} does not support a residual with a pitched y"
        return self.limits(p)

    def clocks(self, problem: Conv2dProblem, config: C) -> float | None:
        """Estimate the clocks of the busiest SM; DRAM time need not be included."""
        return None

    def estimate(self, problem: Conv2dProblem, config: C) -> float | None:
        clocks = self.clocks(problem, config)
        return None if clocks is None else self.card.microseconds(clocks, problem.traffic)

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        tolerance = super().tolerance(problem, peer_error)
        return truncated_tolerance(problem, tolerance) if self.truncates else tolerance


def portable_first(ordered: Sequence[C], shared_bytes: Callable[[C], int], most: int) -> tuple[C, ...]:
    """Return up to `most` configs in this order, but first the first one that fits every card, if one does."""
    if not ordered:
        return ()
    default = next((config for config in ordered if shared_bytes(config) <= MIN_SHARED), ordered[0])
    return (default, *[config for config in ordered if config is not default][: most - 1])


def fitting_blocks(card: Card, threads: int, registers: int, shared_bytes: int) -> int:
    """Return the CTAs that fit on an SM, by `registers` per thread and `shared_bytes` per CTA."""
    by_memory = card.multiprocessor_shared_bytes // (shared_bytes + RESERVED_SHARED)
    return min(by_memory, card.registers // (threads * ceil_div(registers, 8) * 8))


def truncated_tolerance(problem: Conv2dProblem, tolerance: float) -> float:
    """Return the tolerance for a truncated x (2^-10) and rounded weights (2^-11): see `prepare_for_copies`."""
    tolerance = tf32_tolerance(problem.dtype, problem.products, tolerance)
    few = problem.dtype == "tf32" and problem.output_elements * problem.depth <= FEW_PRODUCTS
    return max(tolerance, 1.5 * 2.0**-10) if few else tolerance


def unsupported_reach(problem: Conv2dProblem, tile_m: int, unit: int) -> str | None:
    """Return why offsets within the images of a tile overflow 32 bits, counted in units of `unit` elements."""
    image = max(problem.channels, problem.x_pitch) * problem.height * problem.width
    images = tile_m // (problem.output_height * problem.output_width) + 2
    if images * image // unit >= 2**31 or problem.output_pixels >= 2**31 - tile_m:
        return f"{tile_m} output pixels span {images} images of {image} elements, too many for 32-bit offsets"
    return None
