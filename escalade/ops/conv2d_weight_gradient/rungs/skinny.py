"""The weights' gradient where channels or filters are few, on tensor cores of every card, in NHWC."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe
from escalade.ops.base.accuracy import SPLIT_ROUNDING, tf32_tolerance
from escalade.ops.base.card import MIN_SHARED, Card
from escalade.ops.base.dtypes import full_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.geometry import SPLIT_PRODUCTS
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts

LINE_BYTES = 128
"""Bytes of a pixel's channels that a warp has."""
STEP = 8
"""Neighbouring pixels of a product."""
WARPS = 8
BLOCKS_PER_SM = 2
MANY_COLUMNS = 40
"""Columns beyond which registers leave room for one block, but in TF32, whose sums are fewest."""
MOST_COLUMNS = 48
"""Taps times few channels at most, and a column for the bias: what registers have room for beside the loads."""
BANDS = (8, 4, 2, 1)
STEP_CYCLES = 60.0
"""Cycles of a warp's step besides its products: addresses, loads, and putting pairs together."""
BAND_CYCLES = 1500.0
"""Cycles to bring a band to shared memory, in which another block goes on."""
LOADED = {"fp32": 0.5}
"""The share of a copy's rate that loads straight into registers reach, in fp32 beside splitting them: an H200 took 50
to 57 us for 136 MB in fp16, 101 to 104 for 270 in TF32, 130 to 135 in fp32."""
MOSTLY_LOADED = 0.66
"""The share in other dtypes."""


class Axis(NamedTuple):
    """One dimension of the windows: pixel q of the wide tensor sees q * stride - pad + tap * dilation of the narrow."""

    wide: int
    narrow: int
    taps: int
    stride: int
    pad: int
    dilation: int

    @property
    def seeing_all(self) -> int | None:
        """A tap that sees every pixel of the narrow tensor once, with a stride of 1; None if there is none."""
        after = self.wide - self.narrow
        taps = (tap for tap in range(self.taps) if 0 <= self.pad - tap * self.dilation <= after)
        return next(taps, None)


@dataclass(frozen=True)
class Roles:
    """Which tensor is wide, many channels, and which is narrow."""

    swapped: bool
    """Whether the narrow one is the gradient: taps then run backwards."""
    channels: int
    narrow: int
    rows: Axis
    columns: Axis

    @staticmethod
    def of(f: Conv2dProblem) -> Roles:
        swapped = f.filters < f.channels
        sizes = ((f.height, f.output_height, f.filter_height), (f.width, f.output_width, f.filter_width))

        def axis(d: int) -> Axis:
            image, output, taps = sizes[d]
            if swapped:
                pad = f.dilation[d] * (taps - 1) - f.padding[d]
                return Axis(image, output, taps, f.stride[d], pad, f.dilation[d])
            return Axis(output, image, taps, f.stride[d], f.padding[d], f.dilation[d])

        channels, narrow = (f.channels, f.filters) if swapped else (f.filters, f.channels)
        return Roles(swapped, channels, narrow, axis(0), axis(1))

    def columns_of(self, bias: bool) -> int:
        """Columns of the product."""
        return self.rows.taps * self.columns.taps * self.narrow + (bias and not self.swapped)

    @property
    def bias_tap(self) -> int | None:
        row, column = self.rows.seeing_all, self.columns.seeing_all
        return None if row is None or column is None else row * self.columns.taps + column


@dataclass(frozen=True)
class SkinnyConfig(Config):
    warps_m: int
    """Warps with channels of their own; the others of a block share theirs."""
    band: int
    """Units of a band: rows of 32 bits, or pairs of rows of 16."""
    part_bands: int = 1
    """Bands that a block adds up."""

    @property
    def warps_k(self) -> int:
        return WARPS // self.warps_m


def _warp_channels(problem: Conv2dWeightGradientProblem) -> int:
    return LINE_BYTES // problem.forward.element_bytes


@dataclass(frozen=True)
class _Bands:
    """How the images are cut."""

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
        """Whether bands and steps reach beyond the image."""
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

    def work(self, card: Card) -> parts.Work:
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
        return parts.Work(self.tiles, self.all, cycles * blocks, slots, self.problem.part_elements, card)


@dataclass(frozen=True)
class Skinny(Rung[Conv2dWeightGradientProblem, SkinnyConfig]):
    def supports(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f, roles = problem.forward, Roles.of(problem.forward)
        if f.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {f.layout}"
        if f.groups != 1:
            return f"{self.name} takes groups=1, not {f.groups}; direct takes any"
        if roles.swapped and f.stride != (1, 1):
            return f"{self.name} takes few filters with a stride of 1, not {f.stride}; direct takes any"
        columns = roles.columns_of(problem.bias)
        if columns > MOST_COLUMNS:
            return (
                f"{self.name} takes taps times channels, or filters, up to {MOST_COLUMNS}, the bias's among them; "
                f"{f.name} has {columns}"
            )
        vector = full_vector(f.dtype)
        if roles.channels % vector:
            return f"{self.name} loads {vector} channels at once, and {roles.channels} are no multiple"
        if roles.swapped and problem.bias and roles.bias_tap is None:
            return f"{self.name} needs a tap that sees every gradient for the bias; padding {f.padding} leaves none"
        if not self.configs(problem):
            return f"{self.name} keeps rows of the image in shared memory, and {f.width} columns are too many"
        return None

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[SkinnyConfig, ...]:
        roles = Roles.of(problem.forward)
        wanted = ceil_div(roles.channels, _warp_channels(problem))
        found = []
        for warps_m in (warps for warps in (8, 4, 2, 1) if warps == 1 or warps <= wanted):
            for band in BANDS:
                cut = _Bands(problem, roles, SkinnyConfig(warps_m, band))
                if cut.shared_bytes <= MIN_SHARED:
                    found.append(replace(cut.config, part_bands=cut.work(self.card).best()))
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config)))

    def estimate(self, problem: Conv2dWeightGradientProblem, config: SkinnyConfig) -> float:
        work = _Bands(problem, Roles.of(problem.forward), config).work(self.card)
        loaded = LOADED.get(problem.dtype, MOSTLY_LOADED)
        reading = self.card.transfer_us(problem.traffic) * self.card.rates.clock / loaded
        clocks = max(work.cost(config.part_bands), reading)
        return self.card.microseconds(clocks, 0, launches=2)

    def recipe(self, problem: Conv2dWeightGradientProblem, config: SkinnyConfig) -> Recipe:
        f, roles = problem.forward, Roles.of(problem.forward)
        cut = _Bands(problem, roles, config)
        rows, columns = roles.rows, roles.columns
        count = ceil_div(cut.all, config.part_bands)
        constants: dict[str, Constant] = {
            **parts.constants(problem),
            "PRODUCTS": SPLIT_PRODUCTS if f.dtype == "fp32" else 1,
            "SWAPPED": roles.swapped,
            "NARROW": roles.narrow,
            "FILTER_HEIGHT": rows.taps,
            "FILTER_WIDTH": columns.taps,
            "STRIDE_H": rows.stride,
            "STRIDE_W": columns.stride,
            "DILATION_H": rows.dilation,
            "DILATION_W": columns.dilation,
            "BIAS_TAP": roles.bias_tap or 0,
            "BAND": config.band,
            "RAGGED": cut.ragged,
            "WARPS_M": config.warps_m,
            "WARPS_K": config.warps_k,
            "BLOCKS_PER_SM": cut.blocks_per_sm,
        }
        shape = Ints(
            (
                f.batch, rows.wide, columns.wide, roles.channels, rows.narrow, columns.narrow, rows.pad, columns.pad,
                cut.down, cut.steps, cut.pitch,
            )
        )  # fmt: skip
        wide, narrow = ("x", "gradient") if roles.swapped else ("gradient", "x")
        product = KernelCall(
            Program.of("conv2d_weight_gradient/skinny.cu", "conv2d_weight_gradient_skinny", constants),
            (cut.tiles, count, 1),
            (32 * WARPS, 1, 1),
            (Buffer(wide), Buffer(narrow), Buffer(parts.PARTS), shape, config.part_bands),
            shared_bytes=cut.shared_bytes,
            overlap=True,
        )
        return parts.recipe(problem, product, count)

    def tolerance(self, problem: Conv2dWeightGradientProblem, peer_error: float) -> float:
        pixels, tolerance = problem.forward.output_pixels, super().tolerance(problem, peer_error)
        if problem.dtype == "fp32":
            return max(tolerance, SPLIT_ROUNDING)
        return tf32_tolerance(problem.dtype, pixels, tolerance)


# The prediction for 256to3_32_k3s1 at batch 256 in fp16, 3.6 GFLOP.
SKINNY = Skinny(
    "skinny",
    "few channels or few filters: the tensor with many goes once from memory into the registers of tensor cores, the "
    "windows of the other lie in shared memory; of fp32, two TF32 parts of each number, and an infinity becomes NaN",
    below="direct",
    # direct: 1.8 G products of 88 instructions, 4 warps a cycle of each multiprocessor, are 5.4 ms. Here 134 MB at 85%
    # of a copy's rate are 38 us (the products, 32 columns for 27, take 10), and 5 for parts and launches.
    predicted_gain=125.0,
)
