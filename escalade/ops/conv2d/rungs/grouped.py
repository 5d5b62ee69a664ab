"""Grouped convolution on tensor cores: windows in shared memory, and the products of a few groups in a block."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import lcm

from escalade.device.program import Constant, Program
from escalade.device.recipe import KernelCall, Recipe, WeightsReady
from escalade.ops.base.card import BLOCK_SHARED, LEAST_SHARED, Card
from escalade.ops.base.dtypes import MULTIPLIED, element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.tensor_core import product_tolerance

UNIT_BYTES = 16
"""Channels that are copied and multiplied together."""
MOST_CHANNEL_BYTES = 128
"""Channels of a block at most: whole lines of memory."""
MOST_FILTER_BYTES = 256
TILE_N = 8
"""Filters of an mma.sync."""
MOST_BUNDLE = 64
"""Channels, or filters, that are multiplied together."""
SUMS = 64
"""Registers of a thread that hold sums."""
KEPT = 40
"""Registers up to which a thread keeps weights in them too."""
SPLIT_OPERANDS = 48
"""Registers besides of a thread that splits operands: both parts of those that are under way."""
WARPS = 8
MOST_CONFIGS = 16
LEAST_COLUMNS = 7
"""Columns of a tile at least, in images that have so many."""
MOST_STEPS = 128
"""Steps of a product at most; all are unrolled."""

PRODUCT_CLOCKS = 2.0
"""Clocks of a multiprocessor for an mma.sync of 16x8x16, or 16x8x8 in TF32, and twice as many for the 512 bytes of its
ldmatrix."""
BANKS = 8
"""Banks of 16 bytes in shared memory."""
SECTOR = 32
"""Bytes that short rows cost besides."""
START = 2500.0
"""Clocks until a block has its weights, and its first window."""
BUNDLED = 1.7
"""What a tile takes more where groups are multiplied side by side, and NaNs of zero products are looked for."""
BARRIERS = 1500.0
"""Clocks of a tile in which its block waits, for others to fill."""


@dataclass(frozen=True)
class _Bundle:
    """Groups side by side, as many as make whole units of channels and of filters."""

    groups: int
    channels: int
    filters: int
    unit: int
    """Channels of `UNIT_BYTES`."""

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
    """Images of a tile; more than one where they are small."""
    rows: int
    """Output pixels of a tile."""
    columns: int
    pitch: int
    """Pixels from row to row of the window."""
    bundles: int
    """Bundles of a block."""
    warps_m: int
    """Warps that share the pixels of a bundle."""
    tiles_m: int
    """Blocks of 16 pixels a warp."""
    blocks_per_sm: int = 1

    @property
    def warps(self) -> int:
        return self.bundles * self.warps_m

    @property
    def pixels(self) -> int:
        return self.images * self.rows * self.columns


@lru_cache(4096)
def _conflicts(columns: int, row_step: int) -> float:
    """Bank conflicts of pixels in rows so long, each so many banks on from the one above; after eight rows it begins
    anew."""
    places = [(row * row_step + column) % BANKS for row in range(BANKS) for column in range(columns)]
    eights = [places[first : first + BANKS] for first in range(0, len(places), BANKS)]
    return sum(max(eight.count(place) for place in eight) for eight in eights) / len(eights)


@dataclass(frozen=True)
class _Tiling:
    """What follows from a problem and a config; the same sums as in the kernel."""

    problem: Conv2dProblem
    config: GroupedConfig
    card: Card

    @cached_property
    def bundle(self) -> _Bundle:
        return _Bundle.of(self.problem)

    @property
    def channel_blocks(self) -> int:
        """Blocks that share the groups; the last one may have fewer than others."""
        return ceil_div(self.problem.channels, self.config.bundles * self.bundle.channels)

    @property
    def tiles(self) -> int:
        p, c = self.problem, self.config
        across, down = ceil_div(p.output_width, c.columns), ceil_div(p.output_height, c.rows)
        return ceil_div(p.batch, c.images) * down * across

    @property
    def workers(self) -> int:
        """Blocks that share the tiles of the same channels."""
        return max(
            1, min(self.tiles, self.card.multiprocessors * self.config.blocks_per_sm // self.channel_blocks)
        )

    @cached_property
    def window(self) -> tuple[int, int]:
        """Rows and columns of inputs; all images' rows."""
        p = self.problem
        return (
            ((self.config.rows - 1) * p.stride[0] + (p.filter_height - 1) * p.dilation[0] + 1)
            * self.config.images,
            (self.config.columns - 1) * p.stride[1] + (p.filter_width - 1) * p.dilation[1] + 1,
        )

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
        """An estimate of a thread's: sums, addresses, weights, a step's operands, and the rest."""
        c, b = self.config, self.bundle
        weights = b.steps(self.problem) * b.tiles_n * 2 if self.register_weights else 4 * b.tiles_n
        addresses = c.tiles_m + (b.steps(self.problem) if b.units % 2 else 1)
        if _products(self.problem) > 1:
            weights += 4 * c.tiles_m * b.tiles_n + 4 * b.tiles_n + SPLIT_OPERANDS
        return 4 * c.tiles_m * b.tiles_n + addresses + weights + 50

    @property
    def fitting_blocks(self) -> int:
        """Blocks of a multiprocessor."""
        by_memory = self.card.multiprocessor_shared_bytes // (self.shared_bytes + BLOCK_SHARED)
        by_registers = self.card.registers // (self.config.warps * 32 * (ceil_div(self.registers, 8) * 8))
        return max(1, min(by_memory, by_registers, 4))

    @property
    def conflicts(self) -> float:
        """Turns that the banks of shared memory take for eight neighbouring pixels of 16 bytes, on the average."""
        c = self.config
        return _conflicts(c.columns, self.problem.stride[0] * c.pitch % BANKS)

    @property
    def clocks(self) -> float:
        """Clocks of the busiest multiprocessor: products, reads of shared memory, and copies go on at the same time."""
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
    """Products of tensor cores for each of the problem's."""
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
    """The shortest, and the next with which a row of outputs goes on in the banks where the one above it ends."""
    across, down = p.stride[1], p.stride[0]
    window = (columns - 1) * across + (p.filter_width - 1) * p.dilation[1] + 1
    pitches = range(ceil_div(window, across) * across, window + (BANKS + 1) * across, across)
    seamless = [pitch for pitch in pitches if (pitch * down - columns) % BANKS == 0]
    return list(dict.fromkeys((pitches[0], *seamless[:1])))


def _cuts(p: Conv2dProblem, bundles: int, warps_m: int, tiles_m: int, card: Card) -> list[GroupedConfig]:
    """Tiles for so many pixels, wide and narrow ones."""
    found = []
    pixels = warps_m * tiles_m * 16
    for columns in sorted({ceil_div(p.output_width, parts) for parts in range(1, p.output_width + 1)}):
        if columns > pixels or columns < min(LEAST_COLUMNS, p.output_width):
            continue
        rows = ceil_div(p.output_height, ceil_div(p.output_height, min(p.output_height, pixels // columns)))
        whole = rows == p.output_height and columns == p.output_width
        images = max(1, min(p.batch, pixels // (rows * columns))) if whole else 1
        used = ceil_div(ceil_div(images * rows * columns, 16), warps_m)  # fewer blocks of pixels may do
        for pitch in _pitches(p, columns):
            config = GroupedConfig(images, rows, columns, pitch, bundles, warps_m, used)
            tiling = _Tiling(p, config, card)
            if tiling.shared_bytes <= card.shared_bytes:
                found.append(replace(config, blocks_per_sm=tiling.fitting_blocks))
    return found


@lru_cache(4096)
def _best_first(p: Conv2dProblem, card: Card) -> tuple[GroupedConfig, ...]:
    found = sorted(_candidates(p, card), key=lambda config: _Tiling(p, config, card).clocks)
    small = [config for config in found if _Tiling(p, config, card).shared_bytes <= LEAST_SHARED]
    default = (small or found)[:1]
    return (*default, *[config for config in found if config not in default][: MOST_CONFIGS - 1])


@dataclass(frozen=True)
class Grouped(Conv2dRung[GroupedConfig]):
    def limits(self, problem: Conv2dProblem) -> str | None:
        p, name = problem, self.name
        if p.groups == 1:
            return f"{name} is for more than one group; fused_epilogue takes a single one"
        if p.layout != "nhwc":
            return f"{name} takes layout nhwc, not {p.layout}"
        if p.dtype not in MULTIPLIED:
            return f"{name} takes {', '.join(MULTIPLIED)}, not {p.dtype}"
        bundle = _Bundle.of(p)
        if p.groups % bundle.groups:
            return (
                f"{name} multiplies {bundle.groups} groups of {p.group_channels} channels and {p.group_filters} "
                f"filters together; {p.groups} groups are no multiple"
            )
        if max(bundle.channels, bundle.filters) > MOST_BUNDLE:
            return (
                f"{name} multiplies up to {MOST_BUNDLE} channels and filters together; groups of {p.group_channels} "
                f"and {p.group_filters} come to {bundle.channels} and {bundle.filters}"
            )
        if bundle.steps(p) * _products(p) > MOST_STEPS or not _best_first(p, self.card):
            return (
                f"the weights and windows of {p.filter_height}x{p.filter_width} filters over {bundle.channels} "
                f"channels are too many for {name} and the {self.card.shared_bytes} bytes of a block's shared memory; "
                "direct takes any"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[GroupedConfig, ...]:
        """The first fits every card, if one does."""
        return _best_first(problem, self.card)

    def clocks(self, problem: Conv2dProblem, config: GroupedConfig) -> float:
        return _Tiling(problem, config, self.card).clocks

    def recipe(self, problem: Conv2dProblem, config: GroupedConfig) -> Recipe:
        p, tiling = problem, _Tiling(problem, config, self.card)
        constants: dict[str, Constant] = {
            "Element": element(p.dtype),
            "FILTER_HEIGHT": p.filter_height,
            "FILTER_WIDTH": p.filter_width,
            "STRIDE_H": p.stride[0],
            "STRIDE_W": p.stride[1],
            "DILATION_H": p.dilation[0],
            "DILATION_W": p.dilation[1],
            "GROUP_CHANNELS": p.group_channels,
            "GROUP_FILTERS": p.group_filters,
            "BUNDLE": tiling.bundle.groups,
            "BUNDLES": config.bundles,
            "BUNDLES_ALIGNED": p.groups % (tiling.bundle.groups * config.bundles) == 0,
            "WARPS_M": config.warps_m,
            "TILES_M": config.tiles_m,
            "TILE_IMAGES": config.images,
            "TILE_ROWS": config.rows,
            "TILE_COLUMNS": config.columns,
            "PITCH": config.pitch,
            "REGISTER_WEIGHTS": tiling.register_weights,
            "BLOCKS_PER_SM": config.blocks_per_sm,
            "PRODUCTS": _products(p),
            **arguments.epilogue_constants(p),
        }
        call = KernelCall(
            Program.of("conv2d/grouped.cu", "conv2d_grouped", constants),
            (tiling.channel_blocks * tiling.workers, 1, 1),
            (config.warps * 32, 1, 1),
            (*arguments.tensors(), arguments.shape(p), WeightsReady()),
            shared_bytes=tiling.shared_bytes,
            overlap=True,
        )
        return Recipe((call,))

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        """In TF32 as other products of tensor cores; split operands have 22 bits each."""
        tolerance = product_tolerance(problem, super().tolerance(problem, peer_error))
        return max(tolerance, 2.0**-21) if _products(problem) > 1 else tolerance


# Prediction for 128to128_56_k3s1g32 at batch 256 in fp16 (ResNeXt-50 32x4d), 7.4 GFLOP and 411 MB.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Grouped(
        "grouped",
        "groups on tensor cores: a block walks over tiles of pixels with the window of a few groups in shared memory, "
        "where every tap finds its rows for ldmatrix, and small groups are multiplied side by side",
        below="direct",
        # 97 us at 4.24 TB/s; ldmatrix takes 0.16 clocks of a multiprocessor for an output (70 us), and windows overlap
        # by 1.3 (L2): 130 us. `direct` takes 72 loads and about 700 instructions for an output: 103M at 3e13 a
        # second, 2.4 ms.
        predicted_gain=18.0,
    ),
)
