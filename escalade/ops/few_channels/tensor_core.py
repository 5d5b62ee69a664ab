"""Convolution of few channels on tensor cores: pairs of pixels by filters, whole images in shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from escalade.device.program import Program, Type
from escalade.device.recipe import Buffer, KernelCall, Recipe, Workspace
from escalade.ops.base.card import MIN_SHARED, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, element
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Config, Rung
from escalade.ops.few_channels import cuda_core
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.shared import activation

MOST_CHANNELS = 4
MOST_TAPS = 7
"""Largest filter side: a pair of pixels reads one more column, eight in all, and the weights stay in registers."""
POOLS = (2, 4)
_PACK_THREADS = 256


@dataclass(frozen=True)
class TileConfig(Config):
    images: int
    """Images per stage of a CTA."""
    rows: int
    """Convolution rows per warp at once."""
    warps: int
    blocks_per_sm: int
    """Target occupancy, which limits registers per thread and sets the grid."""
    tiles_n: int
    """8-column blocks per warp."""


@dataclass(frozen=True)
class Columns:
    """Columns and depth of the product."""

    problem: FewChannelsProblem
    tiles_n: int

    @property
    def split(self) -> bool:
        return self.problem.storage == "fp32"

    @property
    def operand(self) -> Type:
        return element("fp16" if self.split else self.problem.dtype)

    @property
    def single(self) -> bool:
        return self.problem.channels == 1

    @property
    def pixel(self) -> int:
        """Elements per staged pixel."""
        return 1 if self.single else 4

    @property
    def paired(self) -> bool:
        """True if a lane has both pixels of a pair for each of its filters: to pool them, or because they are adjacent
        in memory."""
        return self.problem.pool > 1 or self.problem.layout == "nchw"

    @property
    def few_filters(self) -> bool:
        return not self.paired and self.problem.filters <= 4

    @property
    def fit(self) -> bool:
        """True if all column blocks are full."""
        filled = ceil_div(self.problem.filters, 4 if self.paired else 8)
        return self.tiles_n == 1 or (not self.few_filters and filled % self.tiles_n == 0)

    @property
    def units(self) -> int:
        """Warps for all columns."""
        apart = not self.paired and not self.few_filters
        return ceil_div(self.problem.filters, (8 if apart else 4) * self.tiles_n) * (2 if apart else 1)

    @property
    def fragments(self) -> int:
        p = self.problem
        return (
            2 * ((p.filter_height + 2) // 2) if self.single else p.filter_height * ((p.filter_width + 4) // 4)
        )

    @property
    def packed_bytes(self) -> int:
        return self.units * ceil_div(self.weight_registers, 4) * 16 * 32

    @property
    def weight_registers(self) -> int:
        return (2 if self.split else 1) * self.fragments * self.tiles_n * 2

    @property
    def steps(self) -> float:
        """MMA steps per output row; with one channel, the mean over even and odd rows."""
        half_rows = ceil_div(self.problem.filter_height, 2) + ceil_div(self.problem.filter_height + 1, 2)
        return half_rows / 2 if self.single else self.fragments


@dataclass(frozen=True)
class Product:
    """Layout of the product: its rows, and the staged pixels."""

    problem: FewChannelsProblem
    config: TileConfig

    @property
    def columns(self) -> Columns:
        return Columns(self.problem, self.config.tiles_n)

    @property
    def row_blocks(self) -> int:
        """Row blocks per image; incomplete pooling windows need extra rows."""
        return ceil_div(self.problem.output_height * self.problem.pool, self.config.rows)

    @property
    def narrow(self) -> bool:
        """True if the last window of a row has one pair instead of two."""
        p = self.problem
        return p.pool == 4 and p.output_width > 1 and p.output_width * 4 >= p.conv_width + 2

    @property
    def cells_in_row(self) -> int:
        """Pairs of columns per row, or two pairs if windows are four wide."""
        p = self.problem
        return p.output_width - self.narrow if p.pool > 1 else ceil_div(p.conv_width, 2)

    @property
    def cells_in_image(self) -> int:
        return self.row_blocks * self.cells_in_row + (ceil_div(self.row_blocks, 2) if self.narrow else 0)

    @property
    def tiles(self) -> int:
        """16-row tiles of the product for the images of a CTA."""
        return ceil_div(self.config.images * self.cells_in_image, 8 if self.problem.pool == 4 else 16)

    @property
    def as_stored(self) -> bool:
        """True if images are copied without repacking."""
        p = self.problem
        packed = p.channels == 1 or (p.channels == 4 and p.layout == "nhwc")
        return packed and not any(p.padding) and p.width % 2 == 0

    @property
    def staged_height(self) -> int:
        return self.problem.height + 2 * self.problem.padding[0]

    @property
    def staged_width(self) -> int:
        p = self.problem
        return p.width if self.as_stored else 2 * ceil_div(p.width + 2 * p.padding[1], 2)

    @property
    def operand_width(self) -> int:
        """Row pitch, with a few extra pixels if that reduces bank conflicts of the eight pairs read at once."""
        if self.columns.single:
            return self.staged_width
        pitch = self.staged_width // 2
        return 2 * min(range(pitch, pitch + 8), key=lambda pitch: (self._wavefronts(pitch), pitch))

    @property
    def wavefronts(self) -> float:
        """Shared-memory wavefronts per fragment of pixels."""
        if self.columns.single:
            return 4
        return 4 * self._wavefronts(self.operand_width // 2)

    def _wavefronts(self, pitch: int) -> float:
        narrow = ceil_div(self.row_blocks, 2) if self.narrow else 0
        return _wavefronts(self.cells_in_row, self.config.rows, self.problem.pool == 4, min(narrow, 8), pitch)

    @property
    def copy_bytes(self) -> int:
        p = self.problem
        tile = self.config.images * p.channels * p.pixels * ELEMENT_BYTES[p.x_type]
        return next((size for size in (16, 8, 4) if self.as_stored and tile % size == 0), 0)

    @property
    def source_buffer(self) -> int:
        """Elements of a tile as stored, if it must be converted."""
        if ELEMENT_BYTES[self.problem.x_type] == 2:
            return 0
        elements = self.config.images * self.staged_height * self.staged_width * self.columns.pixel
        return 16 * ceil_div(elements, 16)

    @property
    def buffer(self) -> int:
        """Elements of a tile, including reads past its end: rows of the last block, pixels of the last pair."""
        p, config = self.problem, self.config
        below = max(0, self.row_blocks * config.rows + p.filter_height - self.staged_height)
        elements = (config.images * self.staged_height + below) * self.operand_width + 16
        return 16 * ceil_div(elements * self.columns.pixel, 16)

    @property
    def shared_bytes(self) -> int:
        """Bytes of two tiles, or of one as stored and its operands."""
        stored = ELEMENT_BYTES[self.problem.x_type]
        two = stored == 2 or self.columns.split
        return self.source_buffer * stored + self.buffer * (4 if two else 2)


@lru_cache(maxsize=4096)
def _wavefronts(cells_in_row: int, rows: int, windows: bool, narrow: int, pitch: int) -> float:
    """Return the mean passes to read eight pairs; `pitch` is that of image rows.

    Pairs have 16 bytes, of which shared memory serves eight at once; cells are in the order of
    kernels/few_channels/tensor_core_tile.cuh.
    """
    found = []
    for first in range(0, 8 * cells_in_row, 8):
        banks = [0] * 8
        for i in range(8):
            row, pair = divmod(first + i, cells_in_row)
            banks[(row * rows * pitch + (2 * pair + (i >= 4) if windows else pair)) % 8] += 1
        found.append(max(banks))
    if narrow:
        found.append(max(sum(i * rows * pitch % 8 == bank for i in range(narrow)) for bank in range(8)))
    return sum(found) / len(found)


def _clocks(product: Product) -> float:
    """Estimate the clocks of an SM per image; only the order matters.

    One mma every 1.65 clocks at best, one shared-memory wavefront per clock, four instructions per clock: the longest
    of them, and a third of the rest. In parallel, memory at 18 bytes per clock, a little less with many CTAs. Few warps
    leave gaps; so do uneven divisions of warps among schedulers or tiles, and few CTAs, especially if tiles must be
    converted.
    """
    p, config, columns = product.problem, product.config, product.columns
    sets, warps = (2 if columns.split else 1), config.warps * config.blocks_per_sm
    units = product.tiles * columns.units / config.images
    products = units * config.rows * columns.steps * columns.tiles_n * (3 if columns.split else 1)
    fragments = units * (config.rows + p.filter_height - 1) * sets
    fragments *= 0.5 if columns.single else (p.filter_width + 4) // 4
    stored = p.channels * p.pixels * ELEMENT_BYTES[p.x_type]
    copies = 8 * stored / 32 / (product.copy_bytes or ELEMENT_BYTES[p.x_type])
    loads = fragments * (4 if columns.single else 1)
    instructions = 1.5 * products + loads + copies + units * (60 + 10 * config.rows)
    times = (1.65 * products, fragments * product.wavefronts, instructions / 4)
    compute = (2 * max(times) + sum(times)) / 3
    memory = p.bytes / max(1, p.batch) / 18 * (1 + 0.03 * config.blocks_per_sm)
    waits = 0.5 if product.source_buffer else 0.1
    workers = config.warps // columns.units
    uneven = ceil_div(product.tiles, workers) * workers / product.tiles
    if config.warps > 4:
        uneven *= (4 * ceil_div(config.warps, 4) / config.warps) ** 2

    def gaps(enough: int) -> float:
        return (enough / min(enough, warps)) ** 0.5

    bound = max(compute * gaps(24 if columns.single else 16), memory * gaps(14))
    return (bound + min(compute, memory) / 3) * uneven**0.5 * (1 + waits / config.blocks_per_sm)


def _registers(columns: Columns, rows: int) -> int:
    """Estimate the registers per thread: weights, accumulators (and their promotion with halves), pixels, addresses."""
    sums = 4 * columns.tiles_n * rows
    if not columns.split:
        return columns.weight_registers + sums + 32
    if columns.single:
        return columns.weight_registers + 2 * sums + 40
    return (
        columns.weight_registers
        + sums
        + 4 * min(rows, 4) * columns.tiles_n
        + (40 if columns.problem.pool > 1 else 48)
    )


def _fitting(problem: FewChannelsProblem, card: Card) -> Iterator[TileConfig]:
    """Yield the configs that fit."""
    # With one channel two image rows are loaded at a time; an odd number would waste one.
    row_choices = (1, 2, 4, 8) if problem.channels == 1 else (1, 2, 4, 5, 7, 8)
    choices = itertools.product(row_choices, (1, 2, 3, 4), (1, 2, 4, 5, 6, 8, 12, 16), (1, 2, 4))
    for rows, images, warps, tiles_n in choices:
        columns = Columns(problem, tiles_n)
        registers = _registers(columns, rows)
        if rows % problem.pool or not columns.fit or warps % columns.units or registers > 224:
            continue
        sm_warps = min(24, card.registers // 32 // (8 * ceil_div(registers, 8)))
        if images > max(1, problem.batch) or warps > sm_warps:
            continue
        product = Product(problem, TileConfig(images, rows, warps, 1, tiles_n))
        if product.shared_bytes > MIN_SHARED:
            continue
        blocks_per_sm = min(sm_warps // warps, card.resident_blocks(product.shared_bytes))
        yield replace(product.config, blocks_per_sm=blocks_per_sm)


def _configs(problem: FewChannelsProblem, card: Card) -> tuple[TileConfig, ...]:
    """Return the best configs that fit, best first."""

    def cost(config: TileConfig) -> tuple[float, int]:
        return _clocks(Product(problem, config)), -config.images

    return tuple(sorted(_fitting(problem, card), key=cost)[:8])


@dataclass(frozen=True)
class TensorCore(Rung[FewChannelsProblem, TileConfig]):
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    finishes: bool = False
    """True to apply activation and pooling in registers instead of by a separate launch."""

    @property
    def scales_across_batch(self) -> bool:
        return "fp32" in self.dtypes  # a tile of several small images shares one scale

    def supports(self, problem: FewChannelsProblem) -> str | None:
        p = problem
        if p.dtype not in self.dtypes:
            return f"{self.name} takes {' and '.join(self.dtypes)}, not {p.dtype}; `matrix_unroll` takes every dtype"
        if p.channels > MOST_CHANNELS:
            return f"{self.name} takes up to {MOST_CHANNELS} channels, not {p.channels}; `matrix_unroll` takes more"
        if max(p.filter_height, p.filter_width) > MOST_TAPS:
            return (
                f"{self.name} takes filters up to {MOST_TAPS}x{MOST_TAPS}, not {p.filter_height}x{p.filter_width}; "
                "`matrix_unroll` takes larger ones"
            )
        if self.finishes and p.storage != "fp32" and not cuda_core.needs_finish(p):
            return f"{self.name} needs an activation or a pool; `images_a_tile` takes problems without"
        if self.finishes and (refusal := cuda_core.pools_before(self.name, p)):
            return refusal
        if self.finishes and p.pool > 1 and p.pool not in POOLS:
            return f"{self.name} pools 2x2 and 4x4 in registers, not {p.pool}x{p.pool}; `matrix_unroll` pools any"
        if not any(_fitting(self._part(p), self.card)):
            return f"{self.name} keeps images in shared memory; {p.height}x{p.width} is too large, use `matrix_unroll`"
        return None

    def configs(self, problem: FewChannelsProblem) -> tuple[TileConfig, ...]:
        return _configs(self._part(problem), self.card)

    def _part(self, problem: FewChannelsProblem) -> FewChannelsProblem:
        """Return the part of the problem that the convolution's kernel computes."""
        return problem if self.finishes else replace(problem, relu=False, activation="", pool=1)

    def recipe(self, problem: FewChannelsProblem, config: TileConfig) -> Recipe:
        part = self._part(problem)
        target = Buffer("y" if part == problem else "unfinished")
        columns = Columns(part, config.tiles_n)
        steps = (_pack(columns), _convolution(Product(part, config), target, self.card))
        packed = (
            Workspace("packed", columns.packed_bytes),
            Workspace("exponents", 4 * part.filters),
        )
        return Recipe(steps, packed) if part == problem else cuda_core.then_finish(problem, steps, packed)


def _pack(columns: Columns) -> KernelCall:
    """Return the launch that packs weights in the order of the fragments' registers."""
    return kernel_call(
        Program.of("few_channels/tensor_core_pack.cu", problem=columns.problem, columns=columns),
        blocks(columns.packed_bytes // 4, _PACK_THREADS),
        _PACK_THREADS,
        Buffer("weight"), Buffer("packed"), Buffer("exponents"),
        weights_only=True,
    )  # fmt: skip


def _convolution(product: Product, target: Buffer, card: Card) -> KernelCall:
    p, config = product.problem, product.config
    program = Program.of(
        "few_channels/tensor_core.cu",
        constants=activation.constants_of(p),
        problem=p,
        config=config,
        product=product,
        columns=product.columns,
    )
    tiles = blocks(p.batch, config.images)
    return kernel_call(
        program,
        min(tiles, card.multiprocessors * config.blocks_per_sm),
        config.warps * 32,
        *cuda_core.tensors(target), Buffer("packed"), Buffer("exponents"), p.batch,
        shared_bytes=product.shared_bytes,
    )  # fmt: skip


# Predictions for both convolutions of PROBLEMS, of 25 and 72 GFLOP, in fp16: 2.2 ms on CUDA cores at two thirds of 67
# TFLOP/s. On tensor cores memory bounds the first, 0.16 ms, and mma.sync the second: 21 M of them, one every 1.65
# clocks per SM, 0.15 ms.
RUNGS: tuple[Rung[FewChannelsProblem], ...] = (
    TensorCore(
        "images_a_tile",
        "on tensor cores: pairs of pixels by filters, so that overlapping windows fill k; whole images in shared "
        "memory, from which a warp takes any 16 pairs of columns",
        below="rows",
        # 0.36 ms with staging and storing, against 2.2.
        predicted_gain=6.0,
    ),
    TensorCore(
        "pooled",
        "ReLU and pooling in registers: a lane has all pixels of its windows",
        below="images_a_tile",
        # 0.26 ms with pooling: the first convolution is bound by its instructions, 0.09. Against 0.36 and a second
        # launch that reads 882 MB, 0.24.
        predicted_gain=2.3,
        finishes=True,
    ),
    TensorCore(
        "split_halves",
        "fp32 accuracy from fp16 products: operands split into two halves, three products per product",
        below="rows",
        # Three times the products, 0.45 ms for the second convolution, and twice the bytes, 0.31 ms for the first,
        # against 2.2 on CUDA cores.
        predicted_gain=2.6,
        dtypes=("fp32", "tf32"),
        finishes=True,
    ),
)
