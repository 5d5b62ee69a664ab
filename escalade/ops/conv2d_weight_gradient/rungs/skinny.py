"""Weight gradients with few channels or few filters, on tensor cores of any card, in NHWC."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING
from escalade.ops.base.card import MIN_SHARED, Card
from escalade.ops.base.dtypes import full_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.arguments import SPLIT_PRODUCTS
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.rung import WeightGradientRung

LINE_BYTES = 128
"""Bytes of a pixel's channels per warp."""
STEP = 8
"""Adjacent pixels per MMA."""
WARPS = 8
BLOCKS_PER_SM = 2
MANY_COLUMNS = 40
"""Beyond this many columns registers allow one CTA per SM, except in TF32, which has the fewest accumulators."""
MOST_COLUMNS = 48
"""Largest number of taps times few channels, plus a column for the bias: registers hold them besides the loads."""
BANDS = (8, 4, 2, 1)
STEP_CYCLES = 60.0
"""Cycles per step of a warp besides its products: addresses, loads, and packing of pairs."""
BAND_CYCLES = 1500.0
"""Cycles to load a band to shared memory, hidden by another CTA."""
LOADED = {"fp32": 0.5}
"""Share of copy bandwidth reached by loads into registers, in fp32 including the split: an H200 took 50 to 57 us for
136 MB in fp16, 101 to 104 for 270 in TF32, 130 to 135 in fp32."""
HALVES, STRIDED = ("fp16", "bf16"), 2.7
"""Dtypes and their factor on the time with a stride, whose windows begin anywhere in a row: 3to32_224_k3s2 at batch 64,
78 us."""
MOSTLY_LOADED = 0.66
"""`LOADED` of other dtypes."""


class WindowAxis(NamedTuple):
    """One dimension: pixel q of the wide tensor meets q * stride - pad + tap * dilation of the narrow one."""

    wide: int
    narrow: int
    taps: int
    stride: int
    pad: int
    dilation: int

    @property
    def covering_tap(self) -> int | None:
        """A tap that meets every pixel of the narrow tensor once, with stride 1; None if there is none."""
        after = self.wide - self.narrow
        taps = (tap for tap in range(self.taps) if 0 <= self.pad - tap * self.dilation <= after)
        return next(taps, None)


@dataclass(frozen=True)
class Roles:
    """Assignment of x and gradient to the wide tensor (many channels) and the narrow one."""

    swapped: bool
    """True if the gradient is narrow; taps are then reversed."""
    channels: int
    narrow: int
    rows: WindowAxis
    columns: WindowAxis

    @staticmethod
    def of(f: Conv2dProblem) -> Roles:
        swapped = f.filters < f.channels
        sizes = ((f.height, f.output_height, f.filter_height), (f.width, f.output_width, f.filter_width))

        def axis(d: int) -> WindowAxis:
            image, output, taps = sizes[d]
            if swapped:
                pad = f.dilation[d] * (taps - 1) - f.padding[d]
                return WindowAxis(image, output, taps, f.stride[d], pad, f.dilation[d])
            return WindowAxis(output, image, taps, f.stride[d], f.padding[d], f.dilation[d])

        channels, narrow = (f.channels, f.filters) if swapped else (f.filters, f.channels)
        return Roles(swapped, channels, narrow, axis(0), axis(1))

    def columns_of(self, bias: bool) -> int:
        """Return the columns of the product."""
        return self.rows.taps * self.columns.taps * self.narrow + (bias and not self.swapped)

    @property
    def bias_tap(self) -> int | None:
        row, column = self.rows.covering_tap, self.columns.covering_tap
        return None if row is None or column is None else row * self.columns.taps + column


@dataclass(frozen=True)
class SkinnyConfig(Config):
    warps_m: int
    """Warps along the channels; the other warps of the CTA split the pixels."""
    band: int
    """Units per band: rows of 32 bits, or pairs of rows of 16."""
    part_bands: int = 1
    """Bands per CTA."""

    @property
    def warps_k(self) -> int:
        return WARPS // self.warps_m


def _warp_channels(problem: Conv2dWeightGradientProblem) -> int:
    return LINE_BYTES // problem.forward.element_bytes


@dataclass(frozen=True)
class _Bands:
    """Tiling of the images into bands."""

    problem: Conv2dWeightGradientProblem
    roles: Roles
    config: SkinnyConfig

    @property
    def unit(self) -> int:
        return 4 // self.problem.forward.element_bytes

    @property
    def down(self) -> int:
        return ceil_div(self.roles.rows.wide, self.unit * self.config.band)

    @property
    def steps(self) -> int:
        return ceil_div(self.roles.columns.wide, STEP)

    @property
    def ragged(self) -> bool:
        """True if bands and steps extend beyond the image."""
        rows, columns = self.roles.rows.wide, self.roles.columns.wide
        return self.down * self.unit * self.config.band > rows or self.steps * STEP > columns

    @property
    def all(self) -> int:
        return self.problem.batch * self.down

    @property
    def pitch(self) -> int:
        axis = self.roles.columns
        across = (self.steps * STEP - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1
        return across * self.roles.narrow

    @property
    def shared_bytes(self) -> int:
        axis = self.roles.rows
        rows = (self.config.band - 1) * self.unit * axis.stride + (axis.taps - 1) * axis.dilation + 1
        return 4 * max(
            rows * self.pitch, self.block_channels * self.roles.columns_of(True) + self.roles.narrow
        )

    @property
    def blocks_per_sm(self) -> int:
        many = self.roles.columns_of(self.problem.bias) > MANY_COLUMNS
        return 1 if many and self.problem.dtype != "tf32" else BLOCKS_PER_SM

    @property
    def block_channels(self) -> int:
        return self.config.warps_m * _warp_channels(self.problem)

    @property
    def tiles(self) -> int:
        return ceil_div(self.roles.channels, self.block_channels)

    def work(self, card: Card) -> parts.SplitWork:
        blocks = min(self.blocks_per_sm, card.resident_blocks(self.shared_bytes))
        f = self.problem.forward
        columns = 8 * ceil_div(self.roles.columns_of(self.problem.bias), 8)
        products = (
            STEP
            * self.unit
            * _warp_channels(self.problem)
            * columns
            * (SPLIT_PRODUCTS if f.dtype == "fp32" else 1)
        )
        rate = card.rates.mma_products * 2 / f.element_bytes
        steps = self.config.band * self.steps * self.config.warps_m
        loaded = STEP * self.unit * LINE_BYTES / card.rates.copies.loads
        cycles = steps * max(products / rate, STEP_CYCLES / 4, loaded) + BAND_CYCLES / blocks
        slots = card.multiprocessors * blocks
        return parts.SplitWork(self.tiles, self.all, cycles * blocks, slots, self.problem.part_elements, card)


@dataclass(frozen=True)
class Skinny(WeightGradientRung[SkinnyConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    split_rounding = SPLIT_ROUNDING

    def limits(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f, roles = problem.forward, Roles.of(problem.forward)
        if roles.swapped and f.stride != (1, 1):
            return f"{self.name} takes few filters with stride 1, not {f.stride}; direct takes any"
        columns = roles.columns_of(problem.bias)
        if columns > MOST_COLUMNS:
            return (
                f"{self.name} takes taps times channels (or filters) up to {MOST_COLUMNS}, including the bias; "
                f"{f.name} has {columns}"
            )
        vector = full_vector(f.dtype)
        if roles.channels % vector:
            return f"{self.name} takes multiples of {vector} channels, not {roles.channels}"
        if roles.swapped and problem.bias and roles.bias_tap is None:
            return f"{self.name} needs a tap that meets every gradient for the bias; padding {f.padding} leaves none"
        if not self.configs(problem):
            return f"{self.name} keeps rows of the image in shared memory; {f.width} columns do not fit"
        return None

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[SkinnyConfig, ...]:
        roles = Roles.of(problem.forward)
        wanted = ceil_div(roles.channels, _warp_channels(problem))
        found = []
        for warps_m in (warps for warps in (8, 4, 2, 1) if warps == 1 or warps <= wanted):
            for band in BANDS:
                bands = _Bands(problem, roles, SkinnyConfig(warps_m, band))
                if bands.shared_bytes <= MIN_SHARED:
                    found.append(replace(bands.config, part_bands=bands.work(self.card).best()))
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: Conv2dWeightGradientProblem, config: SkinnyConfig) -> float:
        work = _Bands(problem, Roles.of(problem.forward), config).work(self.card)
        loaded = LOADED.get(problem.dtype, MOSTLY_LOADED)
        reading = self.card.transfer_us(problem.traffic) * self.card.rates.clock / loaded
        clocks = max(work.cost(config.part_bands), reading)
        strided = max(problem.forward.stride) > 1 and problem.dtype in HALVES
        return self.card.microseconds(clocks * (STRIDED if strided else 1.0), 0, launches=2)

    def recipe(self, problem: Conv2dWeightGradientProblem, config: SkinnyConfig) -> Recipe:
        f, roles = problem.forward, Roles.of(problem.forward)
        bands = _Bands(problem, roles, config)
        rows, columns = roles.rows, roles.columns
        count = ceil_div(bands.all, config.part_bands)
        shape = Ints(
            (
                f.batch, rows.wide, columns.wide, roles.channels, rows.narrow, columns.narrow, rows.pad, columns.pad,
                bands.down, bands.steps, bands.pitch,
            )
        )  # fmt: skip
        wide, narrow = ("x", "gradient") if roles.swapped else ("gradient", "x")
        product = KernelCall(
            Program.of(
                "conv2d_weight_gradient/skinny.cu",
                problem=problem,
                products=SPLIT_PRODUCTS if f.dtype == "fp32" else 1,
                roles=roles,
                rows=rows,
                columns=columns,
                config=config,
                bands=bands,
            ),
            (bands.tiles, count, 1),
            (32 * WARPS, 1, 1),
            (Buffer(wide), Buffer(narrow), Buffer(parts.PARTS), shape, config.part_bands),
            shared_bytes=bands.shared_bytes,
            overlap=True,
        )
        return parts.recipe(problem, product, count)


# Prediction for 256to3_32_k3s1 at batch 256 in fp16, 3.6 GFLOP.
SKINNY = Skinny(
    "skinny",
    "few channels or few filters: the wide tensor is read once into registers, the windows of the narrow one are in "
    "shared memory; fp32 as two TF32 parts, where an infinity becomes NaN",
    below="direct",
    # direct: 1.8 G products of 88 instructions, 4 warps per cycle and SM, are 5.4 ms. Here 134 MB at 85% of copy
    # bandwidth are 38 us (the products, 32 columns for 27, take 10), plus 5 for parts and launches.
    predicted_gain=125.0,
)
