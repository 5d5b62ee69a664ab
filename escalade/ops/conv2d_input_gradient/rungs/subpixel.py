"""The gradient as one convolution with filters for all sub-pixel phases, whose results are blocks of pixels of dx.

Filters are zero where only the windows of other phases reach, so an infinity or NaN spoils whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.phases import Axis, PixelPhase, axes
from escalade.ops.conv2d_input_gradient.rungs.rung import InputGradientRung

THREADS = 256
ALWAYS = "direct"
"""Rung of conv2d that supports everything."""
WEIGHT, BIAS, RESULTS = "spread_weight", "spread_bias", "results"


@dataclass(frozen=True)
class SubpixelConfig(Config):
    convolution: str
    """Name of the rung of conv2d, which uses its first config."""


@dataclass(frozen=True)
class SubpixelConv:
    """The single convolution: windows that contain those of all phases, and filters for each phase."""

    forward: Conv2dProblem
    rows: Axis
    columns: Axis
    phases: tuple[int, int]
    """Phases along rows and columns: the pixels of a block."""

    @staticmethod
    def of(forward: Conv2dProblem) -> SubpixelConv | None:
        """Return None if no pixel has a tap."""
        f = forward
        rows = axes(f.height, f.output_height, f.filter_height, f.stride[0], f.padding[0], f.dilation[0])
        columns = axes(f.width, f.output_width, f.filter_width, f.stride[1], f.padding[1], f.dilation[1])
        union = _union(rows), _union(columns)
        if union[0] is None or union[1] is None:
            return None
        return SubpixelConv(f, union[0], union[1], (len(rows), len(columns)))

    @cached_property
    def convolution(self) -> Conv2dProblem:
        """The convolution; raises `UnsupportedError` if it is too large."""
        phase = PixelPhase(self.forward, self.rows, self.columns).convolution
        return replace(phase, filters=math.prod(self.phases) * self.forward.channels)

    @property
    def whole(self) -> bool:
        """True if the results are dx itself: a single block, or blocks of a single pixel."""
        c = self.convolution
        return (c.output_height, c.output_width) == (self.rows.count, self.columns.count) and (
            self.phases == (1, 1) or (self.rows.count, self.columns.count) == (1, 1)
        )

    def filters(self) -> KernelCall:
        """Return the launch that expands weights and bias."""
        f, c = self.forward, self.convolution
        struct = (
            f.filters, f.channels, f.filter_height, f.filter_width, *f.stride, *f.padding, *f.dilation, *self.phases,
            c.filter_height, c.filter_width, self.rows.corner, self.columns.corner,
        )  # fmt: skip
        return KernelCall(
            Program.of("conv2d_input_gradient/subpixel_filters.cu", forward=f),
            (blocks(c.weight_elements, THREADS), 1, 1),
            (THREADS, 1, 1),
            (
                Buffer("weight"), Buffer("bias", optional=True), Buffer(WEIGHT), Buffer(BIAS, optional=True),
                Ints(struct),
            ),
            weights_only=True,
            overlap=True,
        )  # fmt: skip

    def shuffle(self) -> KernelCall:
        """Return the launch that scatters the results."""
        f, c = self.forward, self.convolution
        row = f.width * f.channels
        vector = widest_vector(f.dtype, math.gcd(row, self.phases[1] * f.channels))
        along = min(THREADS, 1 << (ceil_div(row, vector) - 1).bit_length())
        struct = (
            f.batch, f.channels, f.height, f.width, *self.phases, self.rows.shift, self.columns.shift,
            c.output_height, c.output_width,
        )  # fmt: skip
        return KernelCall(
            Program.of("conv2d_input_gradient/subpixel_shuffle.cu", forward=f, vector=vector),
            (ceil_div(f.batch * f.height, THREADS // along), 1, 1),
            (along, THREADS // along, 1),
            (Buffer(RESULTS), Buffer("y"), Ints(struct)),
            overlap=True,
        )


def _union(phases: tuple[Axis, ...]) -> Axis | None:
    """Return the window along one dimension that contains those of all phases; None if no phase has a tap."""
    met = [phase for phase in phases if phase.taps]
    if not met:
        return None
    corner = min(phase.corner for phase in met)
    end = max(phase.corner + phase.dilation * (phase.taps - 1) for phase in met)
    return Axis(0, max(phase.count for phase in phases), met[0].size, 0, 1, end - corner + 1, 1, corner)


@dataclass(frozen=True)
class _Candidate:
    rung: Rung[Conv2dProblem]
    config: Config
    us: float


@lru_cache(maxsize=256)
def _candidates(convolution: Conv2dProblem, card: Card) -> tuple[_Candidate, ...]:
    """Return the rungs of conv2d that may be fastest, each with its first config, fastest first. Rungs with shared
    state or with a scale shared across the batch are omitted."""
    conv2d = Conv2dOperation()
    found: list[_Candidate] = []
    for name in dict.fromkeys(conv2d.preferred(convolution)):
        rung = conv2d.ladder.rung(name).on(card)
        if rung.scales_across_batch or rung.refusal(convolution) is not None:
            continue
        if found and rung.least(convolution) >= min(candidate.us for candidate in found):
            continue
        config = rung.configs(convolution)[0]
        us = rung.estimate(convolution, config)
        if us is not None and not rung.recipe(convolution, config).shared_state:
            found.append(_Candidate(rung, config, us))
    return tuple(sorted(found, key=lambda candidate: candidate.us))


@dataclass(frozen=True)
class Subpixel(InputGradientRung[SubpixelConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    supports_aux = False

    def limits(self, problem: Conv2dInputGradientProblem) -> str | None:
        f = problem.forward
        if f.stride == (1, 1):
            return f"{self.name} needs a stride; with stride 1 there is a single phase"
        conv = SubpixelConv.of(f)
        if conv is None:
            return f"{self.name} needs a tap; no pixel of this image has one"
        if f.batch * f.height >= 2**31 - THREADS:
            return f"{self.name} counts rows of pixels in 32 bits, not {f.batch * f.height}"
        try:
            refusal = Conv2dOperation.ladder.rung(ALWAYS).on(self.card).refusal(conv.convolution)
        except UnsupportedError as error:
            refusal = str(error)
        return refusal and f"as one convolution, {refusal}"

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[SubpixelConfig, ...]:
        return tuple(
            SubpixelConfig(candidate.rung.name)
            for candidate in _candidates(_subpixel(problem).convolution, self.card)
        )

    def _candidate(self, problem: Conv2dInputGradientProblem, config: SubpixelConfig) -> _Candidate:
        candidates = _candidates(_subpixel(problem).convolution, self.card)
        return next(candidate for candidate in candidates if candidate.rung.name == config.convolution)

    def estimate(self, problem: Conv2dInputGradientProblem, config: SubpixelConfig) -> float:
        return self._candidate(problem, config).us + self._overhead(problem)

    def least(self, problem: Conv2dInputGradientProblem) -> float:
        return self.card.microseconds(0, _subpixel(problem).convolution.traffic) + self._overhead(problem)

    def _overhead(self, problem: Conv2dInputGradientProblem) -> float:
        """Microseconds to expand the filters, and to scatter the results."""
        conv, size = _subpixel(problem), problem.forward.element_bytes
        filters = self.card.microseconds(0, size * conv.convolution.weight_elements)
        return filters + (0.0 if conv.whole else self.card.microseconds(0, 2 * size * problem.elements))

    def recipe(self, problem: Conv2dInputGradientProblem, config: SubpixelConfig) -> Recipe:
        conv, candidate = _subpixel(problem), self._candidate(problem, config)
        convolution, size = conv.convolution, problem.forward.element_bytes
        result = "y" if conv.whole else RESULTS
        tensors = {"x": "gradient", "weight": WEIGHT, "bias": BIAS, "y": result}
        inner = candidate.rung.recipe(convolution, candidate.config).remap(
            {name: Buffer(to) for name, to in tensors.items()}
        )
        workspaces = [Workspace(WEIGHT, size * convolution.weight_elements)]
        if convolution.bias:
            workspaces.append(Workspace(BIAS, size * convolution.filters))
        if conv.whole:
            return Recipe((conv.filters(), *inner.steps), (*workspaces, *inner.workspaces))
        workspaces.append(Workspace(RESULTS, size * convolution.output_elements))
        return Recipe((conv.filters(), *inner.steps, conv.shuffle()), (*workspaces, *inner.workspaces))

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        """At least that of the convolution's rungs."""
        convolution = _subpixel(problem).convolution
        allowed = (
            candidate.rung.tolerance(convolution, peer_error)
            for candidate in _candidates(convolution, self.card)
        )
        return max(super().tolerance(problem, peer_error), *allowed)


def _subpixel(problem: Conv2dInputGradientProblem) -> SubpixelConv:
    conv = SubpixelConv.of(problem.forward)
    assert conv is not None
    return conv


# 1to56_766_k9s3_b1, the last layer of an FSRCNN, in fp16: 8.5 MB, nine phases of nine taps each.
SUBPIXEL = Subpixel(
    "subpixel",
    "one convolution with filters for every sub-pixel phase, zero where only the windows of others reach, and a "
    "launch that scatters its blocks of stride x stride pixels; an infinity becomes NaN",
    below="tensor_core",
    # Nine convolutions with one filter, padded to 16 columns for tensor cores, and nine launches that scatter 0.1 MB:
    # 147 us by estimate. One with nine filters of 4x4 taps reads the image once: 12 us by `narrow`, plus 2 to scatter.
    predicted_gain=9.0,
)
