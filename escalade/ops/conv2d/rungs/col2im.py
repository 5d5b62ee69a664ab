"""Many channels and few filters on tensor cores of every card, in NHWC: reading x once is what it costs."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Ints, KernelCall, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import MULTIPLIED, VECTOR_BYTES, element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.geometry import Geometry
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.tensor_core import product_tolerance

MOST_COLUMNS = 48
"""Taps times filters at most: columns of a product, whose sums a warp has in registers."""
BLOCK_BYTES = 64
"""Bytes of a pixel's channels that four lanes load at once."""
DEPTH = 4
"""Loads of a lane's pixels that are under way."""
TILE = 16
"""Pixels of a warp's product."""
WARPS = 8
BANDS = (32, 16, 8, 4, 2, 1)
MOST_BLOCKS = 3
"""Blocks of a multiprocessor that registers leave room for."""
START_CLOCKS = 3500.0
"""Clocks to bring weights to shared memory, and to the first loads."""
BAND_CLOCKS = 2500.0
"""Clocks of a band besides its products: to its first loads, and to gather its results."""
BLOCK_CLOCKS = 30.0
"""Issued instructions of a warp for a block of channels besides its products."""
SCHEDULERS = 4
ALONE = 1.3
"""How much longer a block takes that is alone on its multiprocessor: nothing is read while it gathers."""
LOADED = {2: 0.65, 4: 0.55}
"""The share of a copy's rate that loads straight into registers reach, by the bytes of an element: an H200 took 53 us
for 136 MB in fp16, 114 for 270 in TF32."""


@dataclass(frozen=True)
class Spread(Geometry):
    """The sizes of a launch in which each pixel of an image meets results by taps, as a convolution has it or a
    transposed one."""

    transposed: bool = False

    @property
    def columns(self) -> int:
        return self.taps[0] * self.taps[1] * self.filters

    @property
    def tiles_n(self) -> int:
        return ceil_div(self.columns, 8)

    @property
    def blocks(self) -> int:
        """Blocks of channels, those that fill up the last round among them."""
        return ceil_div(self.channels * self.element_bytes, BLOCK_BYTES * DEPTH) * DEPTH

    @property
    def weight_bytes(self) -> int:
        return self.parts * self.blocks * self.tiles_n * 32 * VECTOR_BYTES

    def unsupported(self, name: str, card: Card) -> str | None:
        if self.dtype not in MULTIPLIED:
            return f"{name} takes {', '.join(MULTIPLIED)}, not {self.dtype}"
        if self.columns > MOST_COLUMNS:
            return (
                f"{name} takes taps times filters up to {MOST_COLUMNS}; {self.taps[0]}x{self.taps[1]} taps of "
                f"{self.filters} filters are {self.columns}"
            )
        if self.channels * self.element_bytes % VECTOR_BYTES:
            return f"{name} loads {VECTOR_BYTES} bytes at once, which do not divide {self.channels} channels"
        if self.batch < 1:
            return f"{name} takes a batch of 1 or more"
        if not configs(self, card):
            return (
                f"{name} keeps the weights of {self.channels} channels and the products of rows of {self.image[1]} "
                f"pixels in the {card.shared_bytes} bytes of a block's shared memory, and these do not fit"
            )
        return None


@dataclass(frozen=True)
class Col2imConfig(Config):
    band: int
    """Rows of y whose products lie in shared memory at once."""

    def source_rows(self, s: Spread) -> int:
        """Rows of x that a band meets at most."""
        reach = (s.taps[0] - 1) * s.dilation[0]
        if s.transposed:
            return min(s.image[0], (self.band - 1 + reach) // s.stride[0] + 1)
        return min(s.image[0], (self.band - 1) * s.stride[0] + reach + 1)

    def shared_bytes(self, s: Spread) -> int:
        return s.weight_bytes + 4 * self.source_rows(s) * s.image[1] * (8 * s.tiles_n + 2)

    def bands(self, s: Spread) -> int:
        """Bands of an image."""
        return ceil_div(s.output[0], self.band)

    def together(self, s: Spread, card: Card) -> int:
        """Blocks of a multiprocessor."""
        return min(MOST_BLOCKS, card.blocks_with(self.shared_bytes(s)))

    def grid(self, s: Spread, card: Card) -> int:
        """Blocks, so that all run at once and have as many bands each."""
        every = s.batch * self.bands(s)
        return ceil_div(every, ceil_div(every, card.multiprocessors * self.together(s, card)))

    def clocks(self, s: Spread, card: Card) -> float:
        """Clocks of the busiest multiprocessor."""
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


def configs(s: Spread, card: Card) -> tuple[Col2imConfig, ...]:
    offered = (Col2imConfig(band) for band in BANDS if band == 1 or band <= s.output[0])
    fitting = (config for config in offered if config.shared_bytes(s) <= card.shared_bytes)
    return tuple(sorted(fitting, key=lambda config: config.clocks(s, card)))


def launch(
    s: Spread,
    config: Config,
    card: Card,
    epilogue: dict[str, Constant],
    buffers: tuple[Argument, ...],
) -> KernelCall:
    """The launch over these buffers: x, weights, bias and y."""
    assert isinstance(config, Col2imConfig)
    constants: dict[str, Constant] = {
        "Element": element(s.dtype),
        "PRODUCTS": s.products,
        "TRANSPOSED": s.transposed,
        "CHANNELS": s.channels,
        "FILTERS": s.filters,
        "FILTER_HEIGHT": s.taps[0],
        "FILTER_WIDTH": s.taps[1],
        "STRIDE_H": s.stride[0],
        "STRIDE_W": s.stride[1],
        "DILATION_H": s.dilation[0],
        "DILATION_W": s.dilation[1],
        "BAND": config.band,
        "DEPTH": DEPTH,
        "WARPS": WARPS,
        "BLOCKS_PER_SM": config.together(s, card),
        **epilogue,
    }
    return KernelCall(
        Program.of("conv2d/col2im.cu", "conv2d_col2im", constants),
        (config.grid(s, card), 1, 1),
        (32 * WARPS, 1, 1),
        (*buffers, Ints((s.batch, *s.image, *s.output, *s.padding, config.bands(s)))),
        shared_bytes=config.shared_bytes(s),
        overlap=True,
    )


def microseconds(s: Spread, config: Config, card: Card, moved: float) -> float:
    assert isinstance(config, Col2imConfig)
    moving = card.passing(moved) * card.rates.clock / LOADED[s.element_bytes]
    return card.microseconds(max(config.clocks(s, card), moving), 0)


@dataclass(frozen=True)
class Col2im(Conv2dRung):
    def limits(self, problem: Conv2dProblem) -> str | None:
        if sentence := self.only_nhwc(problem):
            return sentence
        if problem.residual:
            return f"{self.name} takes a bias and an activation, no residual"
        return Spread.of(problem).unsupported(self.name, self.card)

    def configs(self, problem: Conv2dProblem) -> tuple[Config, ...]:
        return configs(Spread.of(problem), self.card)

    def estimate(self, problem: Conv2dProblem, config: Config) -> float:
        return microseconds(Spread.of(problem), config, self.card, problem.traffic)

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        x, weight, bias, _, y = arguments.tensors()
        epilogue = arguments.epilogue_constants(problem)
        return Recipe((launch(Spread.of(problem), config, self.card, epilogue, (x, weight, bias, y)),))

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        tolerance = product_tolerance(problem, super().tolerance(problem, peer_error))
        return max(tolerance, SPLIT_ROUNDING) if problem.dtype == "fp32" else tolerance


# The prediction for 256to3_32_k3s1 at batch 256 in fp16, 3.6 GFLOP and 136 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Col2im(
        "col2im",
        "many channels and few filters: a pixel's products with all taps are columns of one product, x goes once from "
        "memory into registers, and results gather their taps from shared memory; fp32 in two TF32 parts",
        below="ragged",
        # An H200 took 138 us by ragged (60 by narrow, for Hopper alone). Here 134 MB at 85% of a copy's rate are 38 us,
        # an eighth more for rows that two bands read, 4 before and after.
        predicted_gain=3.0,
    ),
)
