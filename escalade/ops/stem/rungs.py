"""Rungs of stem; sources in kernels/stem have the same names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import (
    Argument,
    Buffer,
    Int64,
    Ints,
    KernelCall,
    Recipe,
    ReleaseDependents,
    Workspace,
)
from escalade.ops.base.card import MIN_SHARED, RESERVED_SHARED, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung
from escalade.ops.shared import activation
from escalade.ops.stem.problem import Pool, StemProblem

# --- arguments and launches that rungs share


_THREADS = 256


def shape(problem: StemProblem, row_tiles: int = 1, column_tiles: int = 1) -> Ints:
    return Ints.of("stem/shape.cuh", "StemShape", problem=problem, tiles=(row_tiles, column_tiles))


def tensors(weight: Buffer, y: Buffer, bias_optional: bool = False) -> tuple[Argument, ...]:
    """Leading arguments of every convolution kernel."""
    return (
        Buffer("x"),
        weight,
        Buffer("bias", optional=bias_optional),
        Buffer("scale", optional=True),
        Buffer("shift", optional=True),
        y,
    )


def unpooled(problem: StemProblem) -> Workspace:
    """Return the workspace of the convolution's result before pooling."""
    return Workspace("unpooled", max(1, problem.conv_elements * ELEMENT_BYTES[problem.storage]))


def pool(problem: StemProblem) -> KernelCall:
    """Return the launch that pools `unpooled` into y."""
    p = problem
    assert p.pool is not None
    vector = widest_vector(p.storage, p.filters)
    return kernel_call(
        Program.of("stem/pool.cu", problem=p, vector=vector),
        blocks(p.output_elements, vector * _THREADS),
        _THREADS,
        Buffer("unpooled"), Buffer("y"), p.conv_height, p.conv_width, p.filters, p.output_height, p.output_width,
        *p.pool, Int64(p.output_elements),
    )  # fmt: skip


def then_pool(
    problem: StemProblem, steps: tuple[KernelCall, ...], workspaces: tuple[Workspace, ...]
) -> Recipe:
    """Append pooling as a separate launch, if there is any."""
    if problem.pool is None:
        return Recipe(steps, workspaces)
    return Recipe((*steps, pool(problem)), (*workspaces, unpooled(problem)))


# --- rung separate: one thread per output, pooling as a separate launch


class Separate(ThreadsRung[StemProblem]):
    threads = (256, 128, 512)

    def recipe(self, problem: StemProblem, config: ThreadsConfig) -> Recipe:
        target = Buffer("unpooled" if problem.pool else "y")
        convolution = kernel_call(
            Program.of("stem/separate.cu", constants=activation.constants_of(problem), problem=problem),
            blocks(problem.conv_elements, config.threads),
            config.threads,
            *tensors(Buffer("weight"), target), shape(problem),
        )  # fmt: skip
        return then_pool(problem, (convolution,), ())


SEPARATE = Separate("separate", "one thread per output, converting on load; then pooling", None, None)


# --- tiles of rungs on tensor cores, and their packed weights


POOLS: dict[Pool | None, int] = {None: 0, (2, 2, 0): 2, (3, 2, 1): 3}
"""Pools supported in registers, and their number in kernels/stem/tile.cuh."""
PIXEL_BYTES = 8
MOST_WIDTH = 8
"""A filter row is one or two steps of 4 taps."""
STAGING_CLOCKS = 3000
"""Clocks for a CTA to load, convert and store its first pixels, and to start (estimate)."""


def filter_steps(problem: StemProblem) -> int:
    """Return the MMA steps of 16 values of k: 4 taps of a filter row by 4 channels."""
    return problem.filter_height * blocks(problem.filter_width, 4)


@dataclass(frozen=True)
class Tiling:
    """Tiles of `rows` rows of y by `columns` columns of the convolution."""

    problem: StemProblem
    rows: int
    columns: int

    @property
    def pool(self) -> int:
        return POOLS[self.problem.pool]

    @property
    def halo(self) -> int:
        """Column that both tiles of a row compute, because pooling windows overlap."""
        needed = min(self.problem.conv_width, 2 * self.problem.output_width)
        return int(self.pool == 3 and self.columns < needed)

    @property
    def row_tiles(self) -> int:
        return blocks(self.problem.output_height, self.rows)

    @property
    def column_tiles(self) -> int:
        return blocks(self.problem.output_width, self.columns // (2 if self.pool else 1) - self.halo)

    @property
    def tiles(self) -> int:
        return max(1, self.problem.batch) * self.row_tiles * self.column_tiles

    def conv_rows(self, rows: int) -> int:
        return rows * (2 if self.pool else 1) + int(self.pool == 3)

    @property
    def staged_pixels(self) -> int:
        p = self.problem
        rows = (self.conv_rows(self.rows) - 1) * p.stride[0] + p.filter_height
        columns = (self.columns - 1) * p.stride[1] + 4 * blocks(p.filter_width, 4)
        return rows * 2 * blocks(columns, 2)

    @property
    def masks_columns(self) -> bool:
        """True if the last column of a pooling window may be outside of the convolution."""
        return self.pool == 3 and (bool(self.halo) or self.problem.conv_width % 2 == 1)

    def clocks(self, busy: float, alone: float, sharing: int, card: Card) -> float:
        """Estimate the clocks of the busiest SM. A tile keeps its tensor cores `busy`, takes `alone` clocks by itself,
        and `sharing` tiles fit on an SM."""
        each = blocks(self.tiles, card.multiprocessors)
        return max(each * busy, blocks(each, min(each, sharing)) * alone)


PACK_THREADS = 256


def unsupported(name: str, problem: StemProblem) -> str | None:
    p = problem
    if p.dtype not in ("fp16", "bf16"):
        return f"{name} takes fp16 and bf16, not {p.dtype}; `separate` takes every dtype"
    if p.filters % 16 or p.filters > 128:
        return f"{name} takes multiples of 16 filters up to 128, not {p.filters}; `separate` takes any number"
    if p.filter_width > MOST_WIDTH:
        return f"{name} takes filters up to {MOST_WIDTH} wide, not {p.filter_width}; `separate` takes any"
    if filter_steps(p) > 32:
        return f"{name} keeps the weights in registers; {p.filter_height} filter rows do not fit"
    return None


def pack(problem: StemProblem, warp_blocks: int, pixel_a_lane: bool) -> tuple[KernelCall, Workspace]:
    """Return the launch that packs weights in the order of the fragments' registers, and its workspace."""
    p = problem
    elements = filter_steps(p) * 16 * p.filters
    call = kernel_call(
        Program.of("stem/pack.cu", problem=p, warp_blocks=warp_blocks, pixel_a_lane=pixel_a_lane),
        blocks(elements, PACK_THREADS),
        PACK_THREADS,
        Buffer("weight"), Buffer("packed"), elements, p.filters // 16,
        weights_only=True,
    )  # fmt: skip
    return call, Workspace("packed", elements * 2)


# --- rungs tensor_core and pooled: by mma.sync, the image in shared memory, weights in registers


@dataclass(frozen=True)
class WarpConfig(Config):
    """Config of warps with 16 or 32 filters, each with a band of rows."""

    bands: int
    band_rows: int
    """Rows of y per band."""
    column_blocks: int
    """8-column blocks of the convolution per warp at once."""
    segments: int
    """Segments of a warp's columns per tile width."""
    blocks_per_sm: int
    """Target occupancy, which limits registers per thread."""

    def tiling(self, problem: StemProblem) -> Tiling:
        return Tiling(problem, self.bands * self.band_rows, self.segments * self.column_blocks * 8)

    def warps(self, problem: StemProblem) -> int:
        return self.bands * problem.filters // (16 * warp_blocks(problem))

    def shared_bytes(self, problem: StemProblem) -> int:
        tiling = self.tiling(problem)
        edges = self.warps(problem) * tiling.conv_rows(self.band_rows) * 8 * warp_blocks(problem) * 4
        return tiling.staged_pixels * PIXEL_BYTES + (edges if self.segments > 1 else 0)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """Estimate the clocks: an SM starts one mma every 1.65 clocks at best, a single warp every 12."""
        tiling = self.tiling(problem)
        warp_products = (
            tiling.conv_rows(self.band_rows)
            * self.segments
            * self.column_blocks
            * warp_blocks(problem)
            * filter_steps(problem)
        )
        rows = tiling.conv_rows(self.band_rows) * self.segments
        busy = 1.65 * warp_products * self.warps(problem) + tiling.staged_pixels / 8
        alone = max(12.0 * warp_products, busy) + rows * (100 + 30 * self.column_blocks) + STAGING_CLOCKS
        sharing = min(self.blocks_per_sm, card.resident_blocks(self.shared_bytes(problem)))
        return tiling.clocks(busy, alone, sharing, card)


def warp_blocks(problem: StemProblem) -> int:
    """Return the 16-filter blocks per warp, whose weights take 4 registers per step and block."""
    return 2 if problem.filters % 32 == 0 and filter_steps(problem) <= 16 else 1


def warp_configs(problem: StemProblem, card: Card) -> tuple[WarpConfig, ...]:
    """Return the valid configs, best first."""
    filter_warps = problem.filters // (16 * warp_blocks(problem))
    found = []
    for bands, band_rows, column_blocks, segments in product((1, 2, 4), (1, 2, 4, 7), (2, 4, 7), (1, 2, 4)):
        registers = 8 * blocks((4 * filter_steps(problem) + 5 * column_blocks) * warp_blocks(problem) + 64, 8)
        warps = filter_warps * bands
        if warps > 8 or (warps < 4 and bands < 4) or registers > (256 if segments > 1 else 240):
            continue  # the last few registers suffice only if the loop over segments is kept
        if segments > 1 and (segments - 1) * column_blocks * 8 >= problem.conv_width:
            continue
        config = WarpConfig(
            bands, band_rows, column_blocks, segments, max(1, card.registers // (32 * registers * warps))
        )
        if config.shared_bytes(problem) <= MIN_SHARED:
            found.append(config)
    return tuple(sorted(found, key=lambda config: config.cost(problem, card))[:12])


@dataclass(frozen=True)
class TensorCore(Rung[StemProblem, WarpConfig]):
    pools: bool = False
    """True to pool in registers instead of by a separate launch."""

    def supports(self, problem: StemProblem) -> str | None:
        refusal = unsupported(self.name, problem)
        if refusal:
            return refusal
        if self.pools and problem.pool is None:
            return f"{self.name} needs a pool; `tensor_core` takes problems without"
        if self.pools and problem.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if not warp_configs(self._part(problem), self.card):
            return f"{self.name} keeps a tile in shared memory; the smallest does not fit at stride {problem.stride}"
        return None

    def configs(self, problem: StemProblem) -> tuple[WarpConfig, ...]:
        return warp_configs(self._part(problem), self.card)

    def recipe(self, problem: StemProblem, config: WarpConfig) -> Recipe:
        part = self._part(problem)
        tiling = config.tiling(part)
        packing, packed = pack(problem, warp_blocks(part), pixel_a_lane=True)
        target = Buffer("y" if part == problem else "unpooled")
        convolution = kernel_call(
            Program.of(
                "stem/tensor_core.cu", constants=activation.constants_of(part), problem=part, tiling=tiling,
                config=config, filter_warps=config.warps(part) // config.bands, warp_blocks=warp_blocks(part),
            ),
            tiling.tiles,
            config.warps(part) * 32,
            *tensors(Buffer("packed"), target), shape(part, tiling.row_tiles, tiling.column_tiles),
            ReleaseDependents(),
            shared_bytes=config.shared_bytes(part),
        )  # fmt: skip
        if part == problem:
            return Recipe((packing, convolution), (packed,))
        return then_pool(problem, (packing, convolution), (packed,))

    def _part(self, problem: StemProblem) -> StemProblem:
        """Return the part of the problem that the convolution's kernel computes."""
        if self.pools or problem.pool is None:
            return problem
        return replace(problem, pool=None, output="")


# Predictions of all rungs are for 3to64_224_k7s2 at batch 256 with 3x3 pooling, fp16 from fp32 images: 60 GFLOP, 92
# with the padding to 4 channels and 8 taps; the image is 154 MB, the convolution's result 411 MB, y 103 MB.
TENSOR_CORE = TensorCore(
    "tensor_core",
    "filters x pixels by mma.sync: weights in registers, the image staged once in shared memory as pixels of four "
    "16-bit channels; fused bias and ReLU, then pooling",
    below="separate",
    # 0.23 ms of products (92 GFLOP at 400 TFLOP/s) and 0.12 ms of pooling (514 MB) against 30 G multiply-adds with
    # two loads each, about 4 ms.
    predicted_gain=11.0,
)
POOLED = TensorCore(
    "pooled",
    "pooled in registers: a lane has two columns of each window and its neighbor the third, row by row",
    below="tensor_core",
    # Saves the pooling launch, 0.12 ms; 7% of the rows are computed twice: 0.25 against 0.35 ms.
    predicted_gain=1.4,
    pools=True,
)


# --- rung warpgroup: by wgmma, with the staged row itself as the pixel operand


@dataclass(frozen=True)
class WarpgroupConfig(Config):
    """Config of a warpgroup of 64 filters."""

    rows: int
    """Rows of y per tile."""
    columns: int
    """Convolution columns per tile: N of a wgmma."""
    blocks_per_sm: int
    """Target occupancy, which limits registers per thread."""

    def tiling(self, problem: StemProblem) -> Tiling:
        return Tiling(problem, self.rows, self.columns)

    def shared_bytes(self, problem: StemProblem) -> int:
        """Windows of a wgmma are 16 bytes apart and 32 long. compute-sanitizer assumes that they do not overlap; with
        padding for that after the last row, it has nothing to report."""
        return self.tiling(problem).staged_pixels * PIXEL_BYTES + 16 * (self.columns - 1)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """Estimate the clocks: columns / 2 per step, at least 24; only other CTAs hide what follows a row."""
        tiling = self.tiling(problem)
        rows = tiling.conv_rows(self.rows)
        busy = rows * filter_steps(problem) * max(self.columns / 2, 24.0) + tiling.staged_pixels / 8
        alone = busy + rows * (150 + 2.5 * self.columns) + STAGING_CLOCKS
        sharing = min(self.blocks_per_sm, card.resident_blocks(self.shared_bytes(problem)))
        groups = problem.filters // 64
        return groups * tiling.clocks(busy, alone, sharing, card)


WARPGROUP_COLUMNS = (32, 64, 112, 128)
"""Supported N of a wgmma (kernels/common/hopper.cuh)."""


def warpgroup_configs(problem: StemProblem, card: Card) -> tuple[WarpgroupConfig, ...]:
    found = []
    for rows, columns in product((1, 2, 4, 7, 8, 14), WARPGROUP_COLUMNS):
        registers = 8 * blocks(4 * filter_steps(problem) + columns // 2 + columns // 8 + 40, 8)
        config = WarpgroupConfig(rows, columns, min(8, card.registers // (128 * registers)))
        if config.shared_bytes(problem) <= card.shared_bytes - RESERVED_SHARED:
            found.append(config)
    return tuple(sorted(found, key=lambda config: config.cost(problem, card))[:12])


class Warpgroup(Rung[StemProblem, WarpgroupConfig]):
    architectures = WITH_WGMMA

    def supports(self, problem: StemProblem) -> str | None:
        refusal = unsupported(self.name, problem)
        if refusal:
            return refusal
        if problem.filters % 64:
            return (
                f"{self.name} takes 64 or 128 filters, not {problem.filters}; `pooled` takes multiples of 16"
            )
        if problem.stride[1] != 2:
            return f"{self.name} takes stride 2 along rows, not {problem.stride[1]}; `pooled` takes any"
        if filter_steps(problem) > 16:
            return (
                f"{self.name} keeps the weights in registers; {problem.filter_height} filter rows do not fit"
            )
        if problem.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if not warpgroup_configs(problem, self.card):
            return f"{self.name} keeps a tile in shared memory; the smallest does not fit at stride {problem.stride}"
        return None

    def configs(self, problem: StemProblem) -> tuple[WarpgroupConfig, ...]:
        return warpgroup_configs(problem, self.card)

    def recipe(self, problem: StemProblem, config: WarpgroupConfig) -> Recipe:
        tiling = config.tiling(problem)
        packing, packed = pack(problem, 1, pixel_a_lane=False)
        call = kernel_call(
            Program.of(
                "stem/sm90_warpgroup.cu", constants=activation.constants_of(problem), problem=problem,
                tiling=tiling, config=config,
            ),
            (tiling.tiles, problem.filters // 64),
            128,
            *tensors(Buffer("packed"), Buffer("y")), shape(problem, tiling.row_tiles, tiling.column_tiles),
            shared_bytes=config.shared_bytes(problem),
        )  # fmt: skip
        return Recipe((packing, call), (packed,))


WARPGROUP = Warpgroup(
    "warpgroup",
    "by wgmma with the staged row itself as the pixel operand: overlapping windows, 16 bytes apart",
    below=("tensor_core", "pooled"),
    # 98 GFLOP at 700 TFLOP/s, 0.14 ms, against 0.25.
    predicted_gain=1.75,
)


# --- rung streamed: persistent CTAs, warpgroups that convert rows for others that multiply and pool


def dense_steps(problem: StemProblem) -> int:
    """Return the MMA steps in the order of sm90_streamed_dense.cuh: one slot per two taps except the first."""
    return problem.filter_height * (problem.filter_width // 2) // 2 + 1


STREAMS = 2
"""Streams per CTA, each with a producer and a consumer warpgroup."""
STREAM_START_CLOCKS = 4000
"""Clocks until the first row of a CTA can be multiplied, and after its last (estimate)."""


@dataclass(frozen=True)
class StreamedConfig(Config):
    """Config of persistent CTAs with wgmma that walk down the rows."""

    columns: int
    """Convolution columns per tile: N of a wgmma."""
    stages: int
    """Stages per stream, in pairs of image rows; a window spans half of the filter's height."""

    def tiling(self, problem: StemProblem) -> Tiling:
        """Return tiles as high as the image."""
        return Tiling(problem, max(1, problem.output_height), self.columns)

    def blocks(self, problem: StemProblem, card: Card) -> int:
        """Return the CTAs: one per SM, each with at least one row of y."""
        return max(1, min(self._rows(problem), card.multiprocessors // (problem.filters // 64)))

    def shared_bytes(self, problem: StemProblem) -> int:
        """Bytes of the stages, each with two rows of 16-byte slots and the window corners, and their barriers."""
        slots = self.columns + problem.filter_width // 2 - 1
        stage = 1024 * blocks((2 * slots + self.columns) * 16, 1024)
        return STREAMS * self.stages * (stage + 16)

    def cost(self, problem: StemProblem, card: Card) -> float:
        """Estimate the clocks: columns / 2 per step, at least 24; a row is pooled while the other stream multiplies."""
        tiling = self.tiling(problem)
        rows = ceil_div(self._rows(problem), self.blocks(problem, card))
        streams = min(STREAMS, rows)
        row = dense_steps(problem) * max(self.columns / 2, 24.0) + 30
        return streams * tiling.conv_rows(blocks(rows, STREAMS)) * row + STREAM_START_CLOCKS

    def _rows(self, problem: StemProblem) -> int:
        """Return the rows of y over all column tiles and images."""
        return problem.batch * self.tiling(problem).column_tiles * problem.output_height


class Streamed(Rung[StemProblem, StreamedConfig]):
    architectures = WITH_WGMMA

    def supports(self, problem: StemProblem) -> str | None:
        refusal = unsupported(self.name, problem)
        if refusal:
            return refusal
        p = problem
        if p.channels != 3:
            return f"{self.name} takes 3 channels, not {p.channels}; `warpgroup` takes 1 to 4"
        if p.filters % 64:
            return f"{self.name} takes 64 or 128 filters, not {p.filters}; `pooled` takes multiples of 16"
        if p.stride != (2, 2):
            return f"{self.name} takes stride 2, not {p.stride}; `pooled` takes any"
        if p.filter_width % 2 == 0 or p.filter_width < 3 or p.filter_height > 7:
            return (
                f"{self.name} takes filters 3, 5 or 7 wide and up to 7 high, not {p.filter_height}x{p.filter_width}; "
                "`warpgroup` takes other widths up to 8"
            )
        if p.pool not in POOLS:
            return f"{self.name} pools 3x3 with stride 2 and padding 1, or 2x2 with stride 2; `tensor_core` pools any"
        if p.batch * p.output_height * p.output_width >= 2**31:
            return f"{self.name} takes fewer than 2^31 pixels of y; `warpgroup` takes more"
        return None

    def configs(self, problem: StemProblem) -> tuple[StreamedConfig, ...]:
        found = [StreamedConfig(columns, stages) for columns, stages in product((112, 64, 32), (12, 16, 8))]
        valid = [config for config in found if config.shared_bytes(problem) <= self.card.shared_bytes]
        return tuple(sorted(valid, key=lambda config: config.cost(problem, self.card)))

    def recipe(self, problem: StemProblem, config: StreamedConfig) -> Recipe:
        return self.over(problem, config)

    def over(
        self, problem: StemProblem, config: StreamedConfig, *, weights_nhwc: bool = False, bias: bool = True
    ) -> Recipe:
        """Return the launches for weights in either layout, with or without a bias."""
        p = problem
        elements = dense_steps(p) * 16 * p.filters
        pack = kernel_call(
            Program.of("stem/sm90_streamed_pack.cu", problem=p, weights_nhwc=weights_nhwc, bias=bias),
            blocks(elements, PACK_THREADS),
            PACK_THREADS,
            Buffer("weight"), Buffer("bias", optional=True), Buffer("packed"), elements, p.filters // 16,
            weights_only=True,
        )  # fmt: skip
        tiling = config.tiling(p)
        call = kernel_call(
            Program.of(
                "stem/sm90_streamed.cu", constants=activation.constants_of(p), problem=p, tiling=tiling,
                config=config,
            ),
            (config.blocks(p, self.card), p.filters // 64),
            256 * STREAMS,
            *tensors(Buffer("packed"), Buffer("y"), bias_optional=True),
            shape(p, tiling.row_tiles, tiling.column_tiles), ReleaseDependents(),
            shared_bytes=config.shared_bytes(p),
        )  # fmt: skip
        return Recipe((pack, call), (Workspace("packed", elements * 2),))


STREAMED = Streamed(
    "streamed",
    "k without padding of channels and taps, by persistent CTAs: warpgroups convert two rows at a time for others "
    "that multiply and pool in ping-pong",
    below="warpgroup",
    # K is 176 instead of 224 and 2% of the rows are computed twice, not 6%: 74 GFLOP at 700 TFLOP/s, 0.106 ms,
    # which hides 257 MB (0.061 ms); against 0.183 ms, of which 0.140 are products.
    predicted_gain=1.65,
)

RUNGS: tuple[Rung[StemProblem], ...] = (SEPARATE, TENSOR_CORE, POOLED, WARPGROUP, STREAMED)
