"""The gradient as one convolution with filters for all classes of pixels, whose results are blocks of pixels of dx.

Filters are zero where only the windows of other classes reach. What is infinite, or no number, is NaN there: it reaches
whole blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import MULTIPLIED, element, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d import Conv2d, Conv2dProblem
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.classes import Axis, PixelClass, axes

THREADS = 256
ALWAYS = "direct"
"""The rung of conv2d that takes whatever any takes."""
WEIGHT, BIAS, RESULTS = "spread_weight", "spread_bias", "results"


@dataclass(frozen=True)
class SubpixelConfig(Config):
    convolution: str
    """The rung of conv2d that does it, by the config that should be its fastest."""


@dataclass(frozen=True)
class Spread:
    """The one convolution: windows that hold those of every class, and filters for each of them."""

    forward: Conv2dProblem
    rows: Axis
    columns: Axis
    classes: tuple[int, int]
    """Classes along rows and columns: the pixels of a block."""

    @staticmethod
    def of(forward: Conv2dProblem) -> Spread | None:
        """None if no tap meets a pixel."""
        f = forward
        rows = axes(f.height, f.output_height, f.filter_height, f.stride[0], f.padding[0], f.dilation[0])
        columns = axes(f.width, f.output_width, f.filter_width, f.stride[1], f.padding[1], f.dilation[1])
        union = _union(rows), _union(columns)
        if union[0] is None or union[1] is None:
            return None
        return Spread(f, union[0], union[1], (len(rows), len(columns)))

    @cached_property
    def convolution(self) -> Conv2dProblem:
        """It raises `UnsupportedError` where it is too large for any."""
        one = PixelClass(self.forward, self.rows, self.columns).convolution
        return replace(one, filters=math.prod(self.classes) * self.forward.channels)

    @property
    def whole(self) -> bool:
        """Whether the results are dx as it lies in memory: a single block, or blocks of a single pixel."""
        c = self.convolution
        return (c.output_height, c.output_width) == (self.rows.count, self.columns.count) and (
            self.classes == (1, 1) or (self.rows.count, self.columns.count) == (1, 1)
        )

    def filters(self) -> KernelCall:
        """The launch that spreads weights and bias."""
        f, c = self.forward, self.convolution
        constants: dict[str, Constant] = {"Element": element(f.dtype), "HAS_BIAS": f.bias}
        struct = (
            f.filters, f.channels, f.filter_height, f.filter_width, *f.stride, *f.padding, *f.dilation, *self.classes,
            c.filter_height, c.filter_width, self.rows.corner, self.columns.corner,
        )  # fmt: skip
        return KernelCall(
            Program.of(
                "conv2d_input_gradient/subpixel_filters.cu", "conv2d_input_gradient_subpixel_filters", constants
            ),
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
        """The launch that brings results to their places."""
        f, c = self.forward, self.convolution
        row = f.width * f.channels
        vector = widest_vector(f.dtype, math.gcd(row, self.classes[1] * f.channels))
        along = min(THREADS, 1 << (ceil_div(row, vector) - 1).bit_length())
        struct = (
            f.batch, f.channels, f.height, f.width, *self.classes, self.rows.shift, self.columns.shift,
            c.output_height, c.output_width,
        )  # fmt: skip
        return KernelCall(
            Program.of(
                "conv2d_input_gradient/subpixel_shuffle.cu",
                "conv2d_input_gradient_subpixel_shuffle",
                {"Element": element(f.dtype), "VECTOR": vector},
            ),
            (ceil_div(f.batch * f.height, THREADS // along), 1, 1),
            (along, THREADS // along, 1),
            (Buffer(RESULTS), Buffer("y"), Ints(struct)),
            overlap=True,
        )


def _union(classes: tuple[Axis, ...]) -> Axis | None:
    """Windows along one dimension that hold those of every class; None if no class meets a tap."""
    met = [one for one in classes if one.taps]
    if not met:
        return None
    corner = min(one.corner for one in met)
    end = max(one.corner + one.dilation * (one.taps - 1) for one in met)
    return Axis(0, max(one.count for one in classes), met[0].size, 0, 1, end - corner + 1, 1, corner)


@dataclass(frozen=True)
class _Way:
    rung: Rung[Conv2dProblem]
    config: Config
    us: float


@lru_cache(maxsize=256)
def _ways(convolution: Conv2dProblem, card: Card) -> tuple[_Way, ...]:
    """The rungs of conv2d that may be fastest, each by its own best guess, the fastest first; for any caller, and
    whatever else is in the batch."""
    conv2d = Conv2d()
    found: list[_Way] = []
    for name in dict.fromkeys(conv2d.preferred(convolution)):
        rung = conv2d.ladder.rung(name).on(card)
        if rung.scales_together or rung.refusal(convolution) is not None:
            continue
        if found and rung.least(convolution) >= min(way.us for way in found):
            continue
        config = rung.configs(convolution)[0]
        us = rung.estimate(convolution, config)
        if us is not None and not rung.recipe(convolution, config).shared_state:
            found.append(_Way(rung, config, us))
    return tuple(sorted(found, key=lambda way: way.us))


@dataclass(frozen=True)
class Subpixel(Rung[Conv2dInputGradientProblem, SubpixelConfig]):
    def supports(self, problem: Conv2dInputGradientProblem) -> str | None:
        f = problem.forward
        if f.dtype not in MULTIPLIED:
            return f"{self.name} takes {', '.join(MULTIPLIED)}, not {f.dtype}"
        if f.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {f.layout}"
        if f.groups != 1:
            return f"{self.name} takes groups=1, not {f.groups}; direct takes any"
        if problem.aux:
            return f"{self.name} takes a bias and an activation, no {problem.aux}"
        if f.stride == (1, 1):
            return f"{self.name} is for several classes of pixels; with a stride of 1 there is one"
        spread = Spread.of(f)
        if spread is None:
            return f"{self.name} convolves, but no tap of the filter meets a pixel of the image here"
        if f.batch * f.height >= 2**31 - THREADS:
            return f"{self.name} counts rows of pixels in 32 bits; {f.batch * f.height} are too many"
        try:
            refusal = Conv2d.ladder.rung(ALWAYS).on(self.card).refusal(spread.convolution)
        except UnsupportedError as error:
            refusal = str(error)
        return refusal and f"as one convolution, {refusal}"

    def configs(self, problem: Conv2dInputGradientProblem) -> tuple[SubpixelConfig, ...]:
        return tuple(SubpixelConfig(way.rung.name) for way in _ways(_spread(problem).convolution, self.card))

    def _way(self, problem: Conv2dInputGradientProblem, config: SubpixelConfig) -> _Way:
        ways = _ways(_spread(problem).convolution, self.card)
        return next(way for way in ways if way.rung.name == config.convolution)

    def estimate(self, problem: Conv2dInputGradientProblem, config: SubpixelConfig) -> float:
        return self._way(problem, config).us + self._besides(problem)

    def least(self, problem: Conv2dInputGradientProblem) -> float:
        return self.card.microseconds(0, _spread(problem).convolution.traffic) + self._besides(problem)

    def _besides(self, problem: Conv2dInputGradientProblem) -> float:
        """Microseconds to spread the filters, and to bring results to their places."""
        spread, size = _spread(problem), problem.forward.element_bytes
        filters = self.card.microseconds(0, size * spread.convolution.weight_elements)
        return filters + (0.0 if spread.whole else self.card.microseconds(0, 2 * size * problem.elements))

    def recipe(self, problem: Conv2dInputGradientProblem, config: SubpixelConfig) -> Recipe:
        spread, way = _spread(problem), self._way(problem, config)
        convolution, size = spread.convolution, problem.forward.element_bytes
        result = "y" if spread.whole else RESULTS
        tensors = {"x": "gradient", "weight": WEIGHT, "bias": BIAS, "y": result}
        inner = way.rung.recipe(convolution, way.config).remap(
            {name: Buffer(to) for name, to in tensors.items()}
        )
        rooms = [Workspace(WEIGHT, size * convolution.weight_elements)]
        if convolution.bias:
            rooms.append(Workspace(BIAS, size * convolution.filters))
        if spread.whole:
            return Recipe((spread.filters(), *inner.steps), (*rooms, *inner.workspaces))
        rooms.append(Workspace(RESULTS, size * convolution.output_elements))
        return Recipe((spread.filters(), *inner.steps, spread.shuffle()), (*rooms, *inner.workspaces))

    def tolerance(self, problem: Conv2dInputGradientProblem, peer_error: float) -> float:
        """What the convolution's rungs round beyond a plain sum is allowed here too."""
        convolution = _spread(problem).convolution
        allowed = (way.rung.tolerance(convolution, peer_error) for way in _ways(convolution, self.card))
        return max(super().tolerance(problem, peer_error), *allowed)


def _spread(problem: Conv2dInputGradientProblem) -> Spread:
    spread = Spread.of(problem.forward)
    assert spread is not None
    return spread


# For 1to56_766_k9s3_b1, the last layer of an FSRCNN, in fp16: 8.5 MB, nine classes of nine taps each.
SUBPIXEL = Subpixel(
    "subpixel",
    "one convolution with filters for every class of pixels, zeros where only the windows of others reach, and a "
    "launch that brings its results, blocks of stride x stride pixels, to their places; an infinity becomes NaN",
    below="tensor_core",
    # Nine convolutions with one filter, for whose 16 columns tensor cores work, and as many launches that place 0.1 MB:
    # 147 us by estimate. One with nine filters of 4x4 taps reads the image once: 12 us by `narrow`, and 2 to place.
    predicted_gain=9.0,
)
