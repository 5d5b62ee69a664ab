"""Grouped convolution on tensor cores: windows in shared memory, several groups per CTA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import lcm

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe, WeightsReady
from escalade.ops.base.card import Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.rung import Conv2dRung, fitting_blocks, portable_first
from escalade.ops.shared import activation

UNIT_BYTES = 16
"""Bytes of channels copied and multiplied together."""
MOST_CHANNEL_BYTES = 128
"""Largest bytes of channels per CTA: whole cache lines."""
MOST_FILTER_BYTES = 256
TILE_N = 8
"""N of an mma.sync."""
MOST_BUNDLE = 64
"""Largest number of channels, or filters, per bundle."""
SUMS = 64
"""Accumulator registers per thread."""
KEPT = 40
"""Up to this many weight registers, weights stay in registers."""
SPLIT_OPERANDS = 48
"""Extra registers per thread to split operands: both parts of those in flight."""
WARPS = 8
MOST_CONFIGS = 16
LEAST_COLUMNS = 7
"""Smallest number of columns per tile, unless the image has fewer."""
MOST_STEPS = 128
"""Largest number of MMA steps; all are unrolled."""

PRODUCT_CLOCKS = 2.0
"""Clocks per SM for an mma.sync of 16x8x16, or 16x8x8 in TF32; its ldmatrix of 512 bytes takes twice as many."""
BANKS = 8
"""16-byte banks of shared memory."""
SECTOR = 32
"""Extra bytes per short row."""
START = 2500.0
"""Clocks until a CTA has its weights and first window."""
BUNDLED = 1.7
"""Factor where groups are multiplied side by side and NaNs of zero products are detected."""
BARRIERS = 1500.0
"""Clocks per tile that a CTA waits, hidden by others."""


@dataclass(frozen=True)
class _Bundle:
    """Adjacent groups that together have whole units of channels and filters."""

    groups: int
    channels: int
    filters: int
    unit: int
    """Channels per `UNIT_BYTES`."""

    @staticmethod
    def of(p: Conv2dProblem) -> _Bundle:
        unit = UNIT_BYTES // p.element_bytes
        groups = lcm(
            lcm(p.group_channels, unit) // p.group_channels, lcm(p.group_filters, TILE_N) // p.group_filters
        )
        return _Bundle(groups, groups * p.group_channels, groups * p.group_filters, unit)

    @property
    def units(self) -> int:
        return self.channels // self.unit

    @property
    def tiles_n(self) -> int:
        return self.filters // TILE_N

    def steps(self, p: Conv2dProblem) -> int:
        return ceil_div(p.taps * self.units, 2)


@dataclass(frozen=True)
class GroupedConfig(Config):
    images: int
    """Images per tile: several if they are small."""
    rows: int
    columns: int
    pitch: int
    """Row pitch of the window in pixels."""
    bundles: int
    """Bundles per CTA."""
    warps_m: int
    """Warps that share the pixels of a bundle."""
    tiles_m: int
    """16-pixel blocks per warp."""
    blocks_per_sm: int = 1

    @property
    def warps(self) -> int:
        return self.bundles * self.warps_m

    @property
    def pixels(self) -> int:
        return self.images * self.rows * self.columns


@lru_cache(4096)
def _conflicts(columns: int, row_step: int) -> float:
    """Return the mean bank conflicts for rows of `columns` pixels, each offset by `row_step` banks; the pattern repeats
    after eight rows."""
    banks = [(row * row_step + column) % BANKS for row in range(BANKS) for column in range(columns)]
    eights = [banks[first : first + BANKS] for first in range(0, len(banks), BANKS)]
    return sum(max(eight.count(bank) for bank in eight) for eight in eights) / len(eights)


@dataclass(frozen=True)
class _Tiling:
    """Sizes derived from a problem and a config; the kernel computes the same."""

    problem: Conv2dProblem
    config: GroupedConfig
    card: Card

    @cached_property
    def bundle(self) -> _Bundle:
        return _Bundle.of(self.problem)

    @property
    def channel_blocks(self) -> int:
        """CTAs along the groups; the last one may have fewer."""
        return ceil_div(self.problem.channels, self.config.bundles * self.bundle.channels)

    @property
    def tiles(self) -> int:
        p, c = self.problem, self.config
        across, down = ceil_div(p.output_width, c.columns), ceil_div(p.output_height, c.rows)
        return ceil_div(p.batch, c.images) * down * across

    @property
    def workers(self) -> int:
        """CTAs per range of channels."""
        return max(
            1, min(self.tiles, self.card.multiprocessors * self.config.blocks_per_sm // self.channel_blocks)
        )

    @cached_property
    def window(self) -> tuple[int, int]:
        """Rows and columns of inputs, of all images."""
        rows, columns = self.problem.window(self.config.rows, self.config.columns)
        return rows * self.config.images, columns

    @cached_property
    def shared_bytes(self) -> int:
        p, c = self.problem, self.config
        plane = ceil_div(self.window[0] * c.pitch * 16, 128) * 128 + 16
        chunks = c.bundles * self.bundle.filters * (4 if p.residual else p.element_bytes) // 16
        results = c.pixels * (chunks | 1) * 16
        stage = ceil_div(max(c.bundles * self.bundle.units * plane, results), 128) * 128
        parts = 2 if _products(p) > 1 else 1
        return parts * c.bundles * self.bundle.steps(p) * self.bundle.tiles_n * 256 + 128 + 2 * stage

    @property
    def register_weights(self) -> bool:
        return self.bundle.steps(self.problem) * self.bundle.tiles_n * 2 <= KEPT

    @property
    def registers(self) -> int:
        """Estimated registers per thread: accumulators, addresses, weights, the operands of a step, and the rest."""
        c, b = self.config, self.bundle
        weights = b.steps(self.problem) * b.tiles_n * 2 if self.register_weights else 4 * b.tiles_n
        addresses = c.tiles_m + (b.steps(self.problem) if b.units % 2 else 1)
        if _products(self.problem) > 1:
            weights += 4 * c.tiles_m * b.tiles_n + 4 * b.tiles_n + SPLIT_OPERANDS
        return 4 * c.tiles_m * b.tiles_n + addresses + weights + 50

    @property
    def fitting_blocks(self) -> int:
        """CTAs per SM."""
        threads = self.config.warps * 32
        return max(1, min(fitting_blocks(self.card, threads, self.registers, self.shared_bytes), 4))

    @property
    def conflicts(self) -> float:
        """Mean passes of shared memory per eight adjacent pixels of 16 bytes."""
        c = self.config
        return _conflicts(c.columns, self.problem.stride[0] * c.pitch % BANKS)

    @property
    def clocks(self) -> float:
        """Estimated clocks of the busiest SM; products, shared-memory reads and copies overlap."""
        p, c, b = self.problem, self.config, self.bundle
        steps, tiles_m = b.steps(p) * c.bundles, ceil_div(c.pixels, 16)
        products = steps * tiles_m * b.tiles_n * PRODUCT_CLOCKS * _products(p)
        reads_of = (0 if self.register_weights else 1) + (1 if _products(p) > 1 else 0)
        weight_reads = reads_of * c.warps_m * b.tiles_n * 2
        reads = steps * (tiles_m * 4 * self.conflicts + weight_reads)
        inputs = self.window[0] * self.window[1] * c.bundles * b.channels
        outputs = c.pixels * c.bundles * b.filters
        segment = c.bundles * b.channels * p.element_bytes
        rate = self.card.rates.copies.loads
        copies = (
            (inputs + outputs * (2 if p.residual else 1)) * p.element_bytes / rate * (1 + SECTOR / segment)
        )
        tile = max(products, reads, copies) + BARRIERS / c.blocks_per_sm
        if b.groups > 1:
            tile *= BUNDLED
        weights = START + c.bundles * b.filters * b.steps(p) * 32 / rate * c.blocks_per_sm
        return weights + ceil_div(self.tiles * self.channel_blocks, self.card.multiprocessors) * tile


def _products(p: Conv2dProblem) -> int:
    """Return the tensor-core products per product."""
    return 3 if p.dtype == "fp32" else 1


def _candidates(p: Conv2dProblem, card: Card) -> list[GroupedConfig]:
    bundle = _Bundle.of(p)
    count = p.groups // bundle.groups
    found = []
    for bundles in range(1, count + 1):
        wide = bundles * bundle.channels * p.element_bytes > MOST_CHANNEL_BYTES
        wide |= bundles * bundle.filters * p.element_bytes > MOST_FILTER_BYTES
        even = bundles == ceil_div(count, ceil_div(count, bundles))
        if not even or bundles > WARPS or (wide and bundles > 1):
            continue
        for warps_m in {WARPS // bundles, max(1, WARPS // 2 // bundles)}:
            sums = SUMS if _products(p) == 1 else SUMS // 2
            for tiles_m in {max(1, sums // 4 // bundle.tiles_n // share) for share in (1, 2, 4)}:
                found += _cuts(p, bundles, warps_m, tiles_m, card)
    return list(dict.fromkeys(found))


def _pitches(p: Conv2dProblem, columns: int) -> list[int]:
    """Return the smallest pitch, and the next one with which an output row continues in the banks after the row
    above."""
    across, down = p.stride[1], p.stride[0]
    window = p.window(1, columns)[1]
    pitches = range(ceil_div(window, across) * across, window + (BANKS + 1) * across, across)
    seamless = [pitch for pitch in pitches if (pitch * down - columns) % BANKS == 0]
    return list(dict.fromkeys((pitches[0], *seamless[:1])))


def _cuts(p: Conv2dProblem, bundles: int, warps_m: int, tiles_m: int, card: Card) -> list[GroupedConfig]:
    """Return tiles with up to `warps_m * tiles_m * 16` pixels, wide and narrow ones."""
    found = []
    pixels = warps_m * tiles_m * 16
    for columns in sorted({ceil_div(p.output_width, parts) for parts in range(1, p.output_width + 1)}):
        if columns > pixels or columns < min(LEAST_COLUMNS, p.output_width):
            continue
        rows = ceil_div(p.output_height, ceil_div(p.output_height, min(p.output_height, pixels // columns)))
        whole = rows == p.output_height and columns == p.output_width
        images = max(1, min(p.batch, pixels // (rows * columns))) if whole else 1
        used = ceil_div(ceil_div(images * rows * columns, 16), warps_m)  # fewer pixel blocks may suffice
        for pitch in _pitches(p, columns):
            config = GroupedConfig(images, rows, columns, pitch, bundles, warps_m, used)
            tiling = _Tiling(p, config, card)
            if tiling.shared_bytes <= card.shared_bytes:
                found.append(config.changed(blocks_per_sm=tiling.fitting_blocks))
    return found


@lru_cache(4096)
def _best_first(p: Conv2dProblem, card: Card) -> tuple[GroupedConfig, ...]:
    found = sorted(_candidates(p, card), key=lambda config: _Tiling(p, config, card).clocks)
    return portable_first(found, lambda config: _Tiling(p, config, card).shared_bytes, MOST_CONFIGS)


@dataclass(frozen=True)
class Grouped(Conv2dRung[GroupedConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    split_rounding = 2.0**-21  # split operands have 22 bits each
    takes_groups = True

    def limits(self, problem: Conv2dProblem) -> str | None:
        p, name = problem, self.name
        if p.groups == 1:
            return f"{name} needs more than one group; fused_epilogue takes groups=1"
        bundle = _Bundle.of(p)
        if p.groups % bundle.groups:
            return (
                f"{name} bundles {bundle.groups} groups of {p.group_channels} channels and {p.group_filters} filters; "
                f"{p.groups} groups are no multiple"
            )
        if max(bundle.channels, bundle.filters) > MOST_BUNDLE:
            return (
                f"{name} bundles up to {MOST_BUNDLE} channels and filters; groups of {p.group_channels} and "
                f"{p.group_filters} need {bundle.channels} and {bundle.filters}"
            )
        if bundle.steps(p) * _products(p) > MOST_STEPS or not _best_first(p, self.card):
            return (
                f"{name} keeps weights and windows in shared memory; those of {p.filter_height}x{p.filter_width} "
                f"filters over {bundle.channels} channels do not fit into {self.card.shared_bytes} bytes; direct takes "
                "any"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[GroupedConfig, ...]:
        """Return the configs; the first fits every card, if one does."""
        return _best_first(problem, self.card)

    def clocks(self, problem: Conv2dProblem, config: GroupedConfig) -> float:
        return _Tiling(problem, config, self.card).clocks

    def recipe(self, problem: Conv2dProblem, config: GroupedConfig) -> Recipe:
        p, tiling = problem, _Tiling(problem, config, self.card)
        call = KernelCall(
            Program.of(
                "conv2d/grouped.cu",
                constants=activation.constants_of(p),
                problem=p,
                tiling=tiling,
                config=config,
                products=_products(p),
            ),
            (tiling.channel_blocks * tiling.workers, 1, 1),
            (config.warps * 32, 1, 1),
            (*arguments.tensors(), arguments.shape(p), WeightsReady()),
            shared_bytes=tiling.shared_bytes,
            overlap=True,
        )
        return Recipe((call,))


# Prediction for 128to128_56_k3s1g32 at batch 256 in fp16 (ResNeXt-50 32x4d), 7.4 GFLOP and 411 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Grouped(
        "grouped",
        "groups on tensor cores: persistent CTAs keep the window of a few groups in shared memory, from which every "
        "tap loads its rows by ldmatrix; small groups are multiplied side by side",
        below="direct",
        # 97 us at 4.24 TB/s; ldmatrix takes 0.16 clocks of an SM per output (70 us), and windows overlap by 1.3 (L2):
        # 130 us. `direct` takes 72 loads and about 700 instructions per output: 103M at 3e13 per second, 2.4 ms.
        predicted_gain=18.0,
    ),
)
