"""Convolutions in NCHW on Hopper, in TF32: pixels reach the tensor cores through registers, so nothing is converted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import (
    Buffer,
    Int64,
    Ints,
    KernelCall,
    Recipe,
    ReleaseDependents,
    TiledMap,
    WeightsReady,
    Workspace,
)
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.epilogue import SPECIAL_LANES, activation_cost
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, CUT_OFF
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.shared import activation

WIDTHS = (32, 64, 112, 128)
"""Filters of a CTA: N of the products."""
K_STEPS = (8, 16, 32)
"""Channels of a window."""
CONSUMERS, THREADS = 2, 384
BLOCK = 64
"""Pixels of a product: its rows."""
GROUP = 8
"""Adjacent pixels that the lanes of a warp hold of one filter."""
MOST_ACCUMULATORS = 128
"""Registers per thread."""
MOST_OF_PRODUCTS = 184
"""Registers of a thread for accumulators and two sets of rows; addresses take about 35 more."""
MOST_IN_BOX = 256
"""Largest side of a TMA box."""
MOST_STRIDE = 2
MOST_WEIGHT_STAGES = 10
MOST_CONFIGS = 12
PACKED_ROW = 64
"""Floats in a row of the packed weights' tensor map."""
BANKS = 32

# Cycles, fitted to an H200's times of 191 configs of ten convolutions, 3 to 128 channels: within 15% for the best ones.
PART_CYCLES, PING_PONG_PART_CYCLES = 43.0, 129.0
"""Cycles per stage of weights in which a warpgroup multiplies nothing; with ping-pong no other one fills them."""
COPY_RATE = 41.0
"""Bytes of windows and streamed weights that reach an SM per cycle, while all others copy too."""
STORE_CYCLES, STORE_CYCLES_PER_BLOCK = 4.5, 0.9
"""Cycles for a warp to store one register: four sectors, while all other SMs store too."""
SPLIT_STORE_CYCLES, SPLIT_STORE_CYCLES_PER_BLOCK, SPLIT_AT_EDGES = 5.2, 1.8, 1.2
"""The same if rows of y begin anywhere, so that several warps write parts of a sector; at both ends of a tile's rows
also other CTAs."""
STORES_SEEN, STORES_ALONE = 0.3, 1.74
"""With ping-pong: share of the stores' time that slows the other team's products, and factor on it if the stores
are the limiter."""
FUNCTIONS_SEEN = 1.5
"""Cycles per cycle of an activation's instructions: two warps per scheduler leave gaps."""
SPILL = "a few counters, once per tile: accumulators, two sets of rows and the epilogue's operands take all registers"
SECTOR = 32
COPIED_ROW_CYCLES = 2.3
"""Cycles of TMA per row of a window, however short."""
TILE_CYCLES = 480.0
"""Cycles of a tile in which nothing is multiplied or stored."""
START_CYCLES = 5000.0
"""Cycles until the first products, plus those after the last."""


@dataclass(frozen=True)
class PlanesConfig(Config):
    width: int
    """Filters per CTA."""
    blocks: int
    """64-pixel blocks per consumer warpgroup."""
    groups: int
    """Groups of 8 pixels in a row of a tile; a warp has two, and as many rows as it has blocks."""
    stages: int
    """Windows in shared memory, per team."""
    weight_stages: int
    ping_pong: bool = False
    """True if each consumer is a team of its own, with tiles, windows and streamed weights of its own: it stores one
    while the other multiplies. False if both share a tile and its weights."""


@dataclass(frozen=True)
class _Tiling:
    """Sizes derived from a problem and the tile of a config; the kernel computes the same."""

    problem: Conv2dProblem
    width: int
    blocks: int
    groups: int
    ping_pong: bool = False

    @staticmethod
    def of(problem: Conv2dProblem, config: PlanesConfig) -> _Tiling:
        return _Tiling(problem, config.width, config.blocks, config.groups, config.ping_pong)

    @property
    def teams(self) -> int:
        return CONSUMERS if self.ping_pong else 1

    @property
    def k_step(self) -> int:
        """Channels of a window: few if each is read for many products, so that more windows and weights fit."""
        most = K_STEPS[-1] if self.column_taps == 1 else K_STEPS[-2]
        return next((step for step in K_STEPS if step >= min(self.problem.channels, most)), most)

    @property
    def chunks(self) -> int:
        return ceil_div(self.problem.channels, self.k_step)

    @property
    def tile(self) -> tuple[int, int]:
        """Output rows and columns of a tile."""
        groups = CONSUMERS // self.teams * self.blocks * BLOCK // GROUP
        return groups // self.groups, GROUP * self.groups

    @property
    def shift(self) -> int:
        """Columns by which a window begins too early, because TMA copies from multiples of 16 bytes on."""
        return -self.problem.padding[1] % 4

    @property
    def window(self) -> tuple[int, int]:
        """Rows and columns of a window. Columns are a multiple of 16 bytes; the planes of the four channels that a warp
        loads at once start in banks that are 8 apart, if a few more rows or columns can achieve that."""
        p = self.problem
        rows, columns = p.window(*self.tile)
        columns = ceil_div(columns + self.shift, 4) * 4
        wanted = (8, 24) if p.stride[1] == 1 else (16,)
        padded = (
            (rows + more, columns + 4 * wider)
            for more in range(3)
            for wider in range(3)
            if (rows + more) * (columns + 4 * wider) % BANKS in wanted
        )
        return min(padded, key=lambda sides: sides[0] * sides[1], default=(rows, columns))

    @property
    def window_bytes(self) -> int:
        return self.k_step * self.window[0] * self.window[1] * 4

    @property
    def column_taps(self) -> int:
        """Taps of a filter's column whose products share the rows they read: all of them if the registers suffice."""
        p = self.problem
        rows = (self.blocks - 1) * p.stride[0] + p.filter_height
        fits = self.blocks * self.width // 2 + 2 * 4 * rows <= MOST_OF_PRODUCTS
        return p.filter_height if fits and p.dilation[0] == 1 else 1

    @property
    def part_steps(self) -> int:
        """Steps of 8 channels between two waits for weights; a window has an even number of parts, or one."""
        return 2 if self.column_taps == 1 and self.k_step == 32 else 1

    @property
    def weight_stage_bytes(self) -> int:
        return self.column_taps * self.part_steps * 8 * self.width * 4

    @property
    def weights_per_tile(self) -> int:
        """Stages of weights that a tile reads."""
        steps = self.chunks * self.k_step // 8
        return steps * self.problem.taps // self.part_steps // self.column_taps

    @property
    def filter_tiles(self) -> int:
        return ceil_div(self.problem.filters, self.width)

    @property
    def tiles(self) -> int:
        p, (rows, columns) = self.problem, self.tile
        return p.batch * ceil_div(p.output_height, rows) * ceil_div(p.output_width, columns)

    def shared_bytes(self, stages: int, weight_stages: int) -> int:
        rings = 1 if weight_stages == self.weights_per_tile else self.teams
        windows = self.teams * stages * (_to_kib(self.window_bytes) + 16)
        return windows + rings * weight_stages * (_to_kib(self.weight_stage_bytes) + 16) + 16

    def stages(self) -> tuple[int, int]:
        """Return the stages of windows and weights that fit; (0, 0) if not even two of each do."""
        resident = self.weights_per_tile
        streamed = [(n, m) for n in (3, 2) for m in range(MOST_WEIGHT_STAGES, 3 - n + 1, -1) if m < resident]
        offered = [(n, resident) for n in (4, 3, 2)] + streamed
        return next((one for one in offered if self.shared_bytes(*one) <= HOPPER_SHARED), (0, 0))

    def clocks(self, weight_stages: int, card: Card) -> float:
        """Estimate the clocks of the busiest SM, for both consumers and one tile of each at a time."""
        p = self.problem
        products = CONSUMERS * self.blocks * self.chunks * p.taps * self.k_step // 8
        rows = self.teams * self.chunks * self.k_step * self.window[0]
        streamed = (
            0 if weight_stages == self.weights_per_tile else self.weights_per_tile * self.weight_stage_bytes
        )
        fetched = rows * (ceil_div(self.window[1], 8) + 1) * SECTOR + self.teams * streamed
        part_cycles = PING_PONG_PART_CYCLES if self.ping_pong else PART_CYCLES
        parts = CONSUMERS * self.weights_per_tile * part_cycles
        multiplied = max(products * self.width / 2, fetched / COPY_RATE) + parts + rows * COPIED_ROW_CYCLES
        results = CONSUMERS * self.blocks * BLOCK * min(self.width, p.filters)
        stored = results // (p.pool[0] * p.pool[1])
        instructions, special = activation_cost(p.activation)
        functions = max(instructions * results / 128, special * results / SPECIAL_LANES)
        blocks = self.blocks if self.width > WIDTHS[0] else 1  # more of them slow wide tiles only
        if p.result_size[1] * p.element_bytes % SECTOR:
            store = SPLIT_STORE_CYCLES + SPLIT_STORE_CYCLES_PER_BLOCK * blocks
            store *= 1 + SPLIT_AT_EDGES / self.groups
        else:
            store = STORE_CYCLES + STORE_CYCLES_PER_BLOCK * blocks
        stores = max(stored / 32 * store, FUNCTIONS_SEEN * functions)
        if self.ping_pong:
            tile = max(multiplied + STORES_SEEN * stores, STORES_ALONE * stores) + TILE_CYCLES / 2
        else:
            tile = multiplied + stores + TILE_CYCLES
        ctas = max(1, card.multiprocessors // self.filter_tiles)
        return START_CYCLES + ceil_div(ceil_div(self.tiles, self.teams), ctas) * tile


def _to_kib(count: int) -> int:
    return ceil_div(count, 1024) * 1024


def _tilings(p: Conv2dProblem) -> Iterator[_Tiling]:
    """Yield tiles of every shape whose accumulators fit into the registers."""
    widths = [width for width in WIDTHS if width >= p.filters] or [WIDTHS[-1]]
    for width in sorted({widths[0], *(w for w in (64, 128) if w < p.filters)}, reverse=True):
        for blocks, groups, ping_pong in itertools.product((1, 2, 4), (2, 4, 8, 16), (False, True)):
            tiling = _Tiling(p, width, blocks, groups, ping_pong)
            fits = blocks * width // 2 <= MOST_ACCUMULATORS and tiling.tile[0] >= blocks > ping_pong
            if fits and max(tiling.window) <= MOST_IN_BOX and blocks % p.pool[0] == 0:
                yield tiling


@lru_cache(4096)
def best_first(p: Conv2dProblem, card: Card) -> tuple[PlanesConfig, ...]:
    """Return configs in the order of their estimates."""
    found: list[tuple[float, PlanesConfig]] = []
    for tiling in _tilings(p):
        stages, weight_stages = tiling.stages()
        if stages and tiling.filter_tiles <= card.multiprocessors:
            own = PlanesConfig(
                tiling.width, tiling.blocks, tiling.groups, stages, weight_stages, tiling.ping_pong
            )
            found.append((tiling.clocks(weight_stages, card), own))
    return tuple(config for _, config in sorted(found, key=lambda one: one[0])[:MOST_CONFIGS])


@dataclass(frozen=True)
class Transposed:
    """A transposed convolution as one of stride 1 with filters for every phase."""

    phases: tuple[int, int]
    offset: tuple[int, int]
    """Rows and columns of the first phases that are before the result."""
    result: tuple[int, int]
    """Height and width."""
    filter_size: tuple[int, int]
    """Height and width of the filters as given."""


def planes_refusal(name: str, problem: Conv2dProblem, card: Card) -> str | None:
    """Return why the kernel does not support a convolution."""
    p = problem
    if p.pools and (p.pool != (2, 2) or p.places or p.residual):
        return f"{name} takes pools of 2x2 pixels without places and residual, not {p.name}"
    if max(p.stride) > MOST_STRIDE:
        return f"{name} takes strides up to {MOST_STRIDE}, not {p.stride}"
    if p.width * p.element_bytes % COPY_BYTES:
        return f"{name} copies rows of whole {COPY_BYTES} bytes; {p.width} pixels are no multiple of them"
    if p.batch < 1 or p.output_pixels >= 2**31 - BLOCK * card.multiprocessors:
        return f"{name} counts tiles in 32 bits; {p.output_pixels} output pixels are out of range"
    if not best_first(p, card):
        return (
            f"{name} keeps two windows in shared memory; those of {p.name} exceed {HOPPER_SHARED // 1024} KiB"
        )
    return None


def planes_clocks(problem: Conv2dProblem, config: PlanesConfig, card: Card) -> float:
    return _Tiling.of(problem, config).clocks(config.weight_stages, card)


def planes_recipe(
    problem: Conv2dProblem, config: PlanesConfig, card: Card, transposed: Transposed | None, aux: str
) -> Recipe:
    """Return the launches of a convolution, or of a transposed one that `problem` describes with all phases' filters.

    `aux` names the residual, or the mask.
    """
    p, tiling = problem, _Tiling.of(problem, config)
    elements = tiling.filter_tiles * tiling.weights_per_tile * tiling.weight_stage_bytes // 4
    phases = transposed.phases if transposed else (1, 1)
    own_size = transposed.filter_size if transposed else (p.filter_height, p.filter_width)
    result = (*transposed.result, *transposed.offset) if transposed else (*p.result_size, 0, 0)
    x, source = ("gradient" if transposed else "x"), "conv2d/sm90_planes"
    packed = Workspace("packed_weight", 4 * elements)
    pack = KernelCall(
        Program.of(
            f"{source}_weights.cu", config=config, tiling=tiling, factor=1 + CUT_OFF, phases=phases,
            transposed=transposed is not None,
        ),
        (ceil_div(elements, 256), 1, 1),
        (256, 1, 1),
        (
            Buffer("weight"), Buffer(packed.name), Int64(elements),
            Ints((p.filters, p.channels, p.filter_height, p.filter_width, *own_size)),
        ),
        weights_only=True,
        overlap=True,
    )  # fmt: skip
    rows, columns = tiling.window
    filter_tiles = tiling.filter_tiles
    call = KernelCall(
        Program.of(
            f"{source}.cu",
            constants=activation.constants_of(p),
            problem=p,
            config=config,
            tiling=tiling,
            resident=config.weight_stages == tiling.weights_per_tile,
            phases=phases,
            mask=aux == "mask",
        ),
        (min(ceil_div(tiling.tiles, tiling.teams), card.multiprocessors // filter_tiles) * filter_tiles, 1, 1),
        (THREADS, 1, 1),
        (
            TiledMap(
                Buffer(x), "fp32", (p.width, p.height, p.channels, p.batch), (columns, rows, tiling.k_step, 1),
                swizzle=0,
            ),
            TiledMap(
                Buffer(packed.name), "fp32", (PACKED_ROW, elements // PACKED_ROW),
                (PACKED_ROW, tiling.weight_stage_bytes // 4 // PACKED_ROW), swizzle=0,
            ),
            Buffer("bias", optional=True),
            Buffer(aux, optional=True),
            *(Buffer(name, optional=True) for name in activation.VECTORS),
            Buffer("y"),
            arguments.shape(p),
            Ints(result),
            WeightsReady((packed.name,)),
            ReleaseDependents(),
        ),
        shared_bytes=tiling.shared_bytes(config.stages, config.weight_stages),
        overlap=True,
    )  # fmt: skip
    return Recipe((pack, call), (packed,))


@dataclass(frozen=True)
class Planes(Conv2dRung[PlanesConfig]):
    dtypes: tuple[str, ...] = ("tf32",)
    layouts: tuple[str, ...] = ("nchw",)
    intended_spill: ClassVar = SPILL

    architectures = WITH_WGMMA
    supports_vectors = True
    supports_pool = True
    supports_mean = True
    truncates = True

    def limits(self, problem: Conv2dProblem) -> str | None:
        return planes_refusal(self.name, problem, self.card)

    def configs(self, problem: Conv2dProblem) -> tuple[PlanesConfig, ...]:
        return best_first(problem, self.card)

    def clocks(self, problem: Conv2dProblem, config: PlanesConfig) -> float:
        return planes_clocks(problem, config, self.card)

    def recipe(self, problem: Conv2dProblem, config: PlanesConfig) -> Recipe:
        return planes_recipe(problem, config, self.card, None, "residual")


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Planes(
        "planes",
        "NCHW without conversions: windows of whole planes in shared memory, pixels gathered from them into registers "
        "as rows of wgmma, and stored as they are",
        below="fused_epilogue",
        # 64to128_128_k3 at batch 128 in tf32, 300 GFLOP: 0.75 ms of products, and stores that do not overlap them, 0.2
        # ms. Conversions of x and y, 3.2 GB of traffic, would take another 0.77 ms.
        predicted_gain=1.6,
    ),
)
