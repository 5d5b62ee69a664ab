"""Many channels and few filters on tensor cores of any card, in NHWC; bound by reading x once."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Argument, Ints, KernelCall, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.arguments import Geometry
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d.rungs.rung import Conv2dRung

MOST_COLUMNS = 48
"""Largest number of taps times filters: the columns of a product, accumulated in registers."""
BLOCK_BYTES = 64
"""Bytes of a pixel's channels that four lanes load at once."""
DEPTH = 4
"""Loads in flight per lane."""
TILE = 16
"""Pixels per warp."""
WARPS = 8
BANDS = (32, 16, 8, 4, 2, 1)
MOST_BLOCKS = 3
"""CTAs per SM that registers allow."""
START_CLOCKS = 3500.0
"""Clocks to load weights to shared memory, and to the first loads."""
BAND_CLOCKS = 2500.0
"""Clocks per band besides its products: to its first loads, and to gather its results."""
BLOCK_CLOCKS = 30.0
"""Instructions of a warp per block of channels besides its products."""
SCHEDULERS = 4
ALONE = 1.3
"""Factor for a single CTA per SM: nothing is read while it gathers."""
LOADED = {2: 0.65, 4: 0.55}
"""Share of copy bandwidth reached by loads into registers, by element size: an H200 took 53 us for 136 MB in fp16, 114
for 270 in TF32."""


@dataclass(frozen=True)
class Scatter(Geometry):
    """Sizes of a launch that multiplies each pixel by all taps, for a convolution or a transposed one."""

    transposed: bool = False

    @property
    def columns(self) -> int:
        return self.taps[0] * self.taps[1] * self.filters

    @property
    def tiles_n(self) -> int:
        return ceil_div(self.columns, 8)

    @property
    def blocks(self) -> int:
        """Blocks of channels, including those that fill up the last round."""
        return ceil_div(self.channels * self.element_bytes, BLOCK_BYTES * DEPTH) * DEPTH

    @property
    def weight_bytes(self) -> int:
        return self.parts * self.blocks * self.tiles_n * 32 * VECTOR_BYTES

    def unsupported(self, name: str, card: Card) -> str | None:
        if self.columns > MOST_COLUMNS:
            return (
                f"{name} takes taps times filters up to {MOST_COLUMNS}; {self.taps[0]}x{self.taps[1]} taps of "
                f"{self.filters} filters are {self.columns}"
            )
        if self.channels * self.element_bytes % VECTOR_BYTES:
            return f"{name} takes channels in multiples of {VECTOR_BYTES} bytes, not {self.channels}"
        if self.batch < 1:
            return f"{name} needs a batch of at least 1"
        if not configs(self, card):
            return (
                f"{name} keeps the weights of {self.channels} channels and the products of rows of {self.image[1]} "
                f"pixels in shared memory; they do not fit into {card.shared_bytes} bytes"
            )
        return None


@dataclass(frozen=True)
class Col2imConfig(Config):
    band: int
    """Rows of y per band, whose products are in shared memory."""

    def source_rows(self, s: Scatter) -> int:
        """Return the largest number of rows of x that a band reads."""
        reach = (s.taps[0] - 1) * s.dilation[0]
        if s.transposed:
            return min(s.image[0], (self.band - 1 + reach) // s.stride[0] + 1)
        return min(s.image[0], (self.band - 1) * s.stride[0] + reach + 1)

    def shared_bytes(self, s: Scatter) -> int:
        return s.weight_bytes + 4 * self.source_rows(s) * s.image[1] * (8 * s.tiles_n + 2)

    def bands(self, s: Scatter) -> int:
        """Return the bands per image."""
        return ceil_div(s.output[0], self.band)

    def together(self, s: Scatter, card: Card) -> int:
        """Return the CTAs per SM."""
        return min(MOST_BLOCKS, card.resident_blocks(self.shared_bytes(s)))

    def grid(self, s: Scatter, card: Card) -> int:
        """Return the CTAs: one wave, evenly loaded."""
        every = s.batch * self.bands(s)
        return ceil_div(every, ceil_div(every, card.multiprocessors * self.together(s, card)))

    def clocks(self, s: Scatter, card: Card) -> float:
        """Estimate the clocks of the busiest SM."""
        together = self.together(s, card)
        turns = ceil_div(s.batch * self.bands(s), self.grid(s, card))
        pixels = self.source_rows(s) * s.image[1]
        rate = card.rates.mma_products * 2 / s.element_bytes
        multiplied = s.products * pixels * s.tiles_n * 8 * s.blocks * BLOCK_BYTES / s.element_bytes / rate
        issued = (
            ceil_div(pixels, TILE) * s.blocks * (BLOCK_CLOCKS + s.tiles_n * (1 + 2 * s.products)) / SCHEDULERS
        )
        loaded = pixels * s.channels * s.element_bytes / card.rates.copies.loads
        alone = ALONE if together == 1 else 1.0
        return START_CLOCKS + turns * (alone * together * max(multiplied, issued, loaded) + BAND_CLOCKS)


def configs(s: Scatter, card: Card) -> tuple[Col2imConfig, ...]:
    offered = (Col2imConfig(band) for band in BANDS if band == 1 or band <= s.output[0])
    fitting = (config for config in offered if config.shared_bytes(s) <= card.shared_bytes)
    return tuple(sorted(fitting, key=lambda config: config.clocks(s, card)))


def launch(
    s: Scatter,
    config: Config,
    card: Card,
    epilogue: Epilogue,
    buffers: tuple[Argument, ...],
) -> KernelCall:
    """Return the launch over x, weights, bias and y."""
    assert isinstance(config, Col2imConfig)
    return KernelCall(
        Program.of(
            "conv2d/col2im.cu",
            constants=epilogue.activation_constants,
            epilogue=epilogue,
            scatter=s,
            config=config,
            depth=DEPTH,
            warps=WARPS,
            card=card,
        ),
        (config.grid(s, card), 1, 1),
        (32 * WARPS, 1, 1),
        (*buffers, Ints.of("conv2d/col2im.cu", "Col2imShape", scatter=s, config=config)),
        shared_bytes=config.shared_bytes(s),
        overlap=True,
    )


def microseconds(s: Scatter, config: Config, card: Card, moved: float) -> float:
    assert isinstance(config, Col2imConfig)
    moving = card.transfer_us(moved) * card.rates.clock / LOADED[s.element_bytes]
    return card.microseconds(max(config.clocks(s, card), moving), 0)


@dataclass(frozen=True)
class Col2im(Conv2dRung):
    layouts: tuple[str, ...] = ("nhwc",)
    split_rounding = SPLIT_ROUNDING
    supports_residual = False

    def limits(self, problem: Conv2dProblem) -> str | None:
        return Scatter.of(problem).unsupported(self.name, self.card)

    def configs(self, problem: Conv2dProblem) -> tuple[Config, ...]:
        return configs(Scatter.of(problem), self.card)

    def estimate(self, problem: Conv2dProblem, config: Config) -> float:
        return microseconds(Scatter.of(problem), config, self.card, problem.traffic)

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        x, weight, bias, _, y = arguments.tensors()
        epilogue = Epilogue.of(problem)
        return Recipe((launch(Scatter.of(problem), config, self.card, epilogue, (x, weight, bias, y)),))


# Prediction for 256to3_32_k3s1 at batch 256 in fp16, 3.6 GFLOP and 136 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Col2im(
        "col2im",
        "many channels and few filters: all taps are columns of one product, x is read once into registers, and "
        "results gather their taps from shared memory; fp32 as two TF32 parts",
        below="ragged",
        # An H200 took 138 us with ragged (60 with narrow, which needs Hopper). Here 134 MB at 85% of copy bandwidth are
        # 38 us, an eighth more for rows that two bands read, plus 4 before and after.
        predicted_gain=3.0,
    ),
)
