"""Few channels and many filters on tensor cores of any card, in NHWC; bound by writing y once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, Ints, KernelCall, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING
from escalade.ops.base.card import MIN_SHARED, Card
from escalade.ops.base.dtypes import full_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.naming import spell_pair
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.arguments import Geometry
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d.rungs.rung import Conv2dRung

FILTERS = 64
"""Filters per warp."""
STEP = 8
"""Adjacent pixels per MMA."""
WARPS = 8
TILES_N = {"fp32": 2}
"""Steps accumulated at once per warp, where not 4: split operands need registers."""
LANE_PIXELS = 2
"""Adjacent pixels of a step per lane."""
BLOCKS_PER_SM = 2
MOST_WORDS = 48
"""Largest depth in 32-bit words over all taps: weights stay in shared memory."""
MOST_CHANNELS = 16
"""Largest number of channels; rungs with whole cache lines per pixel are faster from there."""
BANDS = (16, 8, 4, 2, 1)
START_CLOCKS = 3500.0
"""Clocks to load weights and the first band to shared memory, and to finish."""
BAND_CLOCKS = 1500.0
"""Clocks to load a band to shared memory, hidden by another CTA."""
STEP_CLOCKS = 150.0
"""Scheduler clocks per step of a warp besides its products: some 90 instructions, most at half rate."""
PLACE_CLOCKS = 80.0
"""Extra clocks per step for argmax indices: two or three instructions for each of a lane's 16 results."""
SCHEDULERS = 4
STORED = {2: 0.72, 4: 0.83}
"""Share of copy bandwidth reached by stores from registers, by element size: an H200 took 47 us for 136 MB in fp16, 78
for 270 in TF32."""


@dataclass(frozen=True)
class Bands(Geometry):
    """Sizes of a convolution by a kernel with bands of the image in shared memory."""

    pool: tuple[int, int] = (1, 1)
    """Height and width of the max-pool windows."""
    places: bool = False
    """True to write the argmax indices."""

    @classmethod
    def of(cls, p: Conv2dProblem) -> Self:
        return replace(super().of(p), pool=p.pool, places=p.places)

    @property
    def tiles_n(self) -> int:
        """Steps accumulated at once per warp."""
        return TILES_N.get(self.dtype, 4)

    @property
    def pixel_words(self) -> int:
        return ceil_div(self.channels * self.element_bytes, 4)

    @property
    def words(self) -> int:
        return self.taps[0] * self.taps[1] * self.pixel_words

    @property
    def steps(self) -> int:
        return ceil_div(self.output[1], STEP)

    @property
    def pitch(self) -> int:
        """Words per row of a band."""
        across = (self.steps * STEP - 1) * self.stride[1] + (self.taps[1] - 1) * self.dilation[1] + 1
        return across * self.pixel_words

    def unsupported(self, name: str) -> str | None:
        if self.words > MOST_WORDS:
            return (
                f"{name} takes taps times channels of up to {MOST_WORDS} words of 4 bytes; "
                f"{self.taps[0]}x{self.taps[1]} taps of {self.channels} channels have {self.words}"
            )
        if self.channels > MOST_CHANNELS:
            return f"{name} takes up to {MOST_CHANNELS} channels, not {self.channels}"
        vector = full_vector(self.dtype)
        if self.filters % vector:
            return f"{name} takes multiples of {vector} filters, not {self.filters}"
        if self.batch < 1:
            return f"{name} needs a batch of at least 1"
        if self.tiles_n % self.pool[0] or LANE_PIXELS % self.pool[1]:
            return (
                f"{name} takes pools whose rows divide {self.tiles_n} and whose columns divide {LANE_PIXELS}, not "
                f"{spell_pair(self.pool)}"
            )
        if not configs(self):
            return f"{name} keeps rows of the image in shared memory; {self.image[1]} columns do not fit"
        return None


@dataclass(frozen=True)
class SkinnyConfig(Config):
    warps_m: int
    """Warps along the filters; the other warps of the CTA split the pixels."""
    band: int
    """Output rows per band."""

    @property
    def warps_n(self) -> int:
        return WARPS // self.warps_m

    def weight_bytes(self, w: Bands) -> int:
        return w.parts * self.warps_m * ceil_div(w.words, STEP) * (FILTERS // 16) * 32 * 16

    def shared_bytes(self, w: Bands) -> int:
        rows = (self.band - 1) * w.stride[0] + (w.taps[0] - 1) * w.dilation[0] + 1
        return self.weight_bytes(w) + 4 * (self.warps_m * FILTERS + rows * w.pitch)

    def bands(self, w: Bands) -> int:
        """Return the bands per image."""
        return ceil_div(w.output[0], self.band)

    def tiles(self, w: Bands) -> int:
        """Return the CTAs along the filters."""
        return ceil_div(w.filters, FILTERS * self.warps_m)

    def grid(self, w: Bands, card: Card) -> int:
        """Return the CTAs along the bands: one wave, evenly loaded."""
        blocks = min(BLOCKS_PER_SM, card.resident_blocks(self.shared_bytes(w)))
        slots = max(1, card.multiprocessors * blocks // self.tiles(w))
        every = w.batch * self.bands(w)
        return ceil_div(every, ceil_div(every, slots))

    def clocks(self, w: Bands, card: Card) -> float:
        """Estimate the clocks of the busiest SM: products or instructions of its bands."""
        blocks = min(BLOCKS_PER_SM, card.resident_blocks(self.shared_bytes(w)))
        turns = ceil_div(w.batch * self.bands(w), self.grid(w, card))
        steps = self.band * w.steps * self.warps_m
        k_steps = ceil_div(w.words, STEP)
        rate = card.rates.mma_products * 2 / w.element_bytes
        products = w.products * k_steps * STEP * 4 / w.element_bytes * STEP * FILTERS / rate
        placing = PLACE_CLOCKS if w.places else 0.0
        issued = (STEP_CLOCKS + placing + w.products * k_steps * FILTERS / 16) / SCHEDULERS
        return START_CLOCKS + turns * (blocks * steps * max(products, issued) + BAND_CLOCKS)


def configs(w: Bands) -> tuple[SkinnyConfig, ...]:
    wanted = ceil_div(w.filters, FILTERS)
    offered = (
        SkinnyConfig(warps_m, band)
        for warps_m in (4, 2, 1)
        if warps_m == 1 or warps_m <= wanted
        for band in BANDS
        if band == w.pool[0] or (band <= w.output[0] and band % w.pool[0] == 0)
    )
    return tuple(config for config in offered if config.shared_bytes(w) <= MIN_SHARED)


def best_first(w: Bands, card: Card) -> tuple[Config, ...]:
    return tuple(sorted(configs(w), key=lambda config: config.clocks(w, card)))


def launch(
    w: Bands,
    config: Config,
    card: Card,
    epilogue: Epilogue,
    flipped: bool,
    buffers: tuple[Argument, ...],
) -> KernelCall:
    """Return the launch over x, weights, bias, residual or mask, y, and argmax indices."""
    assert isinstance(config, SkinnyConfig)
    shape = Ints.of("conv2d/skinny.cu", "SkinnyShape", bands=w, config=config)
    return KernelCall(
        Program.of(
            "conv2d/skinny.cu",
            constants=epilogue.activation_constants,
            epilogue=epilogue,
            bands=w,
            flipped=flipped,
            config=config,
            blocks_per_sm=BLOCKS_PER_SM,
        ),
        (config.grid(w, card), config.tiles(w), 1),
        (32 * WARPS, 1, 1),
        (*buffers, shape),
        shared_bytes=config.shared_bytes(w),
        overlap=True,
    )


def microseconds(w: Bands, config: Config, card: Card, moved: float) -> float:
    assert isinstance(config, SkinnyConfig)
    moving = card.transfer_us(moved) * card.rates.clock / STORED[w.element_bytes]
    return card.microseconds(max(config.clocks(w, card), moving), 0)


@dataclass(frozen=True)
class Skinny(Conv2dRung):
    layouts: tuple[str, ...] = ("nhwc",)
    split_rounding = SPLIT_ROUNDING
    supports_pool = True

    def limits(self, problem: Conv2dProblem) -> str | None:
        return Bands.of(problem).unsupported(self.name)

    def configs(self, problem: Conv2dProblem) -> tuple[Config, ...]:
        return best_first(Bands.of(problem), self.card)

    def estimate(self, problem: Conv2dProblem, config: Config) -> float:
        return microseconds(Bands.of(problem), config, self.card, problem.bytes)

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        epilogue = Epilogue.of(problem)
        buffers = (*arguments.tensors(), Buffer("places", optional=True))
        return Recipe((launch(Bands.of(problem), config, self.card, epilogue, False, buffers),))


# Prediction for 3to256_32_k3s1 at batch 256 in fp16, 3.6 GFLOP and 136 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Skinny(
        "skinny",
        "few channels and many filters: bands of x in shared memory, weights in register order, results stored from "
        "registers, 16 bytes per lane and whole lines per warp; fp32 as two TF32 parts",
        below="fused_epilogue",
        # An H200 took 103 us with tiles in shared memory. Here 134 MB at 85% of copy bandwidth are 38 us, plus 2
        # before.
        predicted_gain=2.5,
    ),
)
