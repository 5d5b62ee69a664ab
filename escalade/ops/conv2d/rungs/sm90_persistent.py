"""Implicit GEMM by TMA and wgmma in persistent CTAs: ping-pong, TMA stores, swapped operands, clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from escalade.device.program import Program
from escalade.device.recipe import (
    Addresses,
    Buffer,
    Ints,
    KernelCall,
    Recipe,
    ReleaseDependents,
    TensorMap,
    TiledMap,
    WeightsReady,
)
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.naming import spell_pair
from escalade.ops.base.rung import Config, Rung
from escalade.ops.batch_norm_backward import MASKS
from escalade.ops.batch_statistics import merge_moments
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import (
    ONE_PHASE,
    SPECIAL_LANES,
    UNPLACED,
    activation_cost,
    phase_count,
)
from escalade.ops.conv2d.rungs.preparation import copied_channels, prepare_for_copies
from escalade.ops.conv2d.rungs.sm90_wgmma import K_TILE_RATE, PROMOTE_K_TILES, HopperRung, k_tiles_of
from escalade.ops.conv2d.rungs.wgmma_conv import (
    MN_MAJOR_FILTERS,
    PERMUTED_FILTERS,
    ROW_BYTES,
    WgmmaConv,
    Windows,
    shortcut_shape,
)

NORM = Addresses(
    tuple(Buffer(f"norm_{name}", optional=True) for name in ("x", "output", "mean", "rstd", "weight", "bias"))
)
"""A batch normalization whose gradient the results are."""
PING_PONG, PIXELS, FILTERS, DEPTH = "turns", "pixels", "filters", "depth"
"""Work sharing of two warpgroups: one tile each (ping-pong), or pixels, filters or alternate k-tiles of one tile."""
PANEL = 64
"""Pixels and filters per staging tile of results."""
THREADS = 384
LEAST_FILTERS = 64
"""Smallest tile in filters; missing filters are zero-filled."""
WIDTHS = (64, 128, 256)
"""Supported N of a wgmma in tf32 and fp8."""
MOST_PROMOTED = 64 * 128
"""Accumulators of a warpgroup that fit into registers twice."""
MOST_SPLITS = 8
"""Portable cluster size limit."""
PIECE_BYTES = 128 * 16
"""Split-K exchanges parts in pieces of four accumulators per thread of a warpgroup (kernels/conv2d/shared_sum.cuh)."""

MOST_CONFIGS = 16
"""Largest number of configs offered to the tuner."""

START_CYCLES = 1600.0
"""Cycles until the first copies arrive, plus those from the last results to the end of the launch."""
PING_PONG_CYCLES, PING_PONG_CYCLES_PER_RESULT = 500.0, 0.04
"""Cycles between the products of two tiles with ping-pong: fixed, and per result."""
END_CYCLES, END_CYCLES_PER_RESULT = 900.0, 0.12
"""Cycles between the products of two tiles if nothing else is multiplied meanwhile: fixed, and per result."""
UNEVEN_CYCLES_PER_RESULT, UNEVEN_WIDE_CYCLES_PER_RESULT = 0.1, 0.35
"""Extra cycles per result if filters are no multiple of the tile: of 64 (240to40_28, 480to80_14, 112to672_14), and of
128 and more (24to72_56, 40to120_28, 104to104_28)."""
SPECIAL_CYCLES = 1.4
"""Factor on the time of an activation's special functions, fitted on 96to384_56, 192to768_28 and 384to1536_14 with
GELU."""
SWAPPED = 0.92
"""Factor on all cycles with swapped operands: mean of 225 tiles of Inception v3, GoogLeNet and ConvNeXt."""
THIN_CYCLES_PER_COPIED_ROW = 4.3
"""Cycles per copied row of pixels or filters with fewer channels than a k-tile: 48to64_35_k5, 96to96_35_k3 and
80to192_73_k3."""
THIN_CYCLES_PER_PIXEL = 10.0
"""Extra cycles per pixel of a tile with fewer channels than a k-tile: 16to64_112."""
STRAIGHT = 1.4
"""Factor for stores directly from registers, a quarter of a line at a time."""
PERMUTED_STRAIGHT, PERMUTED_CYCLES_PER_RESULT = 0.7, 0.08
"""The same factor where a lane stores 16 adjacent filters, and the cycles per result then: fitted on 66 INT8 layers of
ResNet-18 and ResNet-50 at batch 32 and 256."""
WIDER_CYCLES_PER_RESULT = 0.1
"""Cycles per 16-bit result of 8-bit operands beyond what ping-pong hides: 64to256_56 at batch 32, 39 us."""
EXCHANGE_CYCLES, EXCHANGE_CYCLES_PER_RESULT = 300.0, 0.15
"""Cycles of a split-K exchange and reduction: fixed, and per result."""
POOL_CYCLES_PER_RESULT = 0.04
"""Extra cycles per pooled result. A guess: five instructions of one in 128 threads."""
STATISTICS_CYCLES_PER_RESULT = 0.04
"""Extra cycles per result for statistics: 170 instructions of each of four warps per staging tile."""
OVER_RING_CYCLES = 600.0
"""Extra cycles if CTAs must wait for each other before they push their parts."""


@dataclass(frozen=True)
class PersistentConfig(Config):
    pixels: int
    """Output pixels per tile."""
    filters: int
    share: str
    """Shared by two warpgroups: turns (ping-pong, one tile each), or pixels, filters or depth of one tile."""
    stages: int
    buffers: int = 0
    """Staging tiles per warpgroup in shared memory; 0 to store results directly from registers."""
    swapped: bool = False
    """Filters are M and pixels are N of the product."""
    cluster: int = 1
    """CTAs that share weights by multicast."""
    splits: int = 1
    """CTAs that share the sum of a tile (split-K)."""

    @property
    def promote(self) -> int:
        """K-tiles whose sums are promoted to fp32 registers at a time; 0 if accumulators have enough bits."""
        return 0

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        return (
            self.pixels // (2 if self.share == PIXELS else 1),
            self.filters // (2 if self.share == FILTERS else 1),
        )

    @property
    def panels(self) -> int:
        """Staging tiles of results per warpgroup and tile."""
        return math.prod(self.warpgroup_tile) // PANEL**2

    @property
    def supports_mn_major(self) -> bool:
        """True if a warpgroup has whole copies of MN-major weights, and they are not multicast."""
        return self.warpgroup_tile[1] % MN_MAJOR_FILTERS == 0 and self.cluster == 1

    def permutes(self, element_bytes: int, output_bytes: int, filters: int) -> bool:
        """Return True if lanes hold 16 adjacent filters, of 8-bit tiles that one CTA loads and stores directly."""
        is_one_tile = (self.parts, self.cluster, self.buffers) == (1, 1, 0)
        whole = self.warpgroup_tile[1] % PERMUTED_FILTERS == 0 and filters % self.filters == 0
        return is_one_tile and whole and element_bytes == 1 and output_bytes <= 2

    @property
    def parts(self) -> int:
        """Partial sums per tile."""
        return self.splits * (2 if self.share == DEPTH else 1)

    @property
    def columns(self) -> int:
        return self.warpgroup_tile[0 if self.swapped else 1]

    @property
    def parts_bytes(self) -> int:
        """Bytes of the pieces that one CTA reduces."""
        if self.parts == 1:
            return 0
        pieces = math.prod(self.warpgroup_tile) * 4 // PIECE_BYTES
        return ceil_div(pieces, self.splits) * self.splits * 2 * PIECE_BYTES

    def _bytes_besides_parts(self, output_bytes: int) -> int:
        """Bytes of staging tiles, stages, their barriers, and those of ping-pong or parts."""
        panels = 2 * self.buffers * PANEL * PANEL * output_bytes
        stages = self.stages * ((self.pixels + self.filters) * ROW_BYTES + 16)
        return panels + stages + 2 * self.buffers * 8 + 16

    @property
    def parts_apart(self) -> bool:
        """True if parts fit next to the stages (there are no staging tiles then). Otherwise they overwrite the stages
        after all CTAs have finished their products."""
        return self._bytes_besides_parts(0) + self.parts_bytes <= HOPPER_SHARED

    def shared_bytes(self, output_bytes: int) -> int:
        return self._bytes_besides_parts(output_bytes) + (self.parts_bytes if self.parts_apart else 0)

    def fitted(self, problem: Conv2dProblem) -> PersistentConfig | None:
        """Return this config with as many stages as fit, at least three, halving the staging tiles if necessary; None
        if it is not valid for the problem."""
        p = problem
        wg_pixels, wg_filters = self.warpgroup_tile
        if self.promote and (wg_pixels * wg_filters > MOST_PROMOTED or self.share == DEPTH):
            return None
        if p.dtype in ("tf32", "fp8") and self.columns not in WIDTHS:
            return None
        if p.is_quantized and self.buffers:  # staging tiles have 16- or 32-bit elements
            return None
        if self.buffers and p.filters * p.output_bytes % 16:
            return None
        step = -2 if self.share == DEPTH else -1
        for buffers in dict.fromkeys((self.buffers, self.buffers // 2)):
            for stages in range(self.stages, 2, step):
                config = self.changed(stages=stages, buffers=buffers)
                if (
                    bool(buffers) == bool(self.buffers)
                    and config.shared_bytes(p.output_bytes) <= HOPPER_SHARED
                ):
                    return config
        return None

    def tiles(self, pixels: int, filters: int, phases: int = 1) -> int:
        """Return the tiles, of all sub-pixel phases; the CTAs of a multicast cluster count as one."""
        return (
            phases * ceil_div(ceil_div(pixels, self.pixels), self.cluster) * ceil_div(filters, self.filters)
        )

    def clusters(self, pixels: int, filters: int, card: Card, phases: int = 1) -> int:
        tiles = self.tiles(pixels, filters, phases)
        return tiles if self.parts > 1 else min(tiles, card.multiprocessors // self.cluster)

    def cost(
        self, pixels: int, filters: int, k_tiles: int, card: Card, *, thin: int = 0, special: float = 0.0,
        phases: int = 1, permuted: bool = False,
    ) -> float:  # fmt: skip
        """Estimate the cycles from tensor cores, L2 and tile ends. `thin` k-tiles are not full, and each result needs
        `special` special functions. `permuted`: lanes hold adjacent filters."""
        products = self.pixels * self.filters / K_TILE_RATE
        if self.columns <= 64:  # reading both operands from shared memory takes as long as the MMA
            products *= 1.2
        tiles, sums = self.tiles(pixels, filters, phases), self.pixels * self.filters
        group = self.cluster * self.splits
        at_once = card.max_active_clusters(group)
        rate = card.copy_rate(card.rates.copies.tma_persistent, min(tiles, at_once) * group)
        copies = (self.pixels + self.filters / self.cluster) * ROW_BYTES / rate
        rounds = ceil_div(tiles, at_once)
        if self.share == PING_PONG and rounds > 1:
            end = PING_PONG_CYCLES + PING_PONG_CYCLES_PER_RESULT * sums
        else:
            end = END_CYCLES + (PERMUTED_CYCLES_PER_RESULT if permuted else END_CYCLES_PER_RESULT) * sums
        if not self.buffers:
            end *= PERMUTED_STRAIGHT if permuted else STRAIGHT
        if self.parts > 1:
            end += EXCHANGE_CYCLES + EXCHANGE_CYCLES_PER_RESULT * sums
            if not self.parts_apart:
                end += OVER_RING_CYCLES
        if self.cluster > 1:  # the CTAs wait for each other
            products, copies = 1.08 * products, 1.08 * copies
        if filters % self.filters:
            end += (
                UNEVEN_WIDE_CYCLES_PER_RESULT if self.filters > LEAST_FILTERS else UNEVEN_CYCLES_PER_RESULT
            ) * sums
        end += SPECIAL_CYCLES * special / SPECIAL_LANES * sums
        slower = max(0.0, THIN_CYCLES_PER_COPIED_ROW * (self.pixels + self.filters) - max(products, copies))
        multiplied = (
            ceil_div(k_tiles, self.splits) * max(products, copies) + ceil_div(thin, self.splits) * slower
        )
        return (rounds * (multiplied + end) + START_CYCLES) * (SWAPPED if self.swapped else 1.0)


@dataclass(frozen=True)
class PromotedConfig(PersistentConfig):
    """Config for accumulators that have fewer bits than the results."""

    promote: int = 1

    @staticmethod
    def variants(config: PersistentConfig, problem: Conv2dProblem) -> tuple[PersistentConfig, ...]:
        """Return the config with every promotion that the problem may use."""
        if problem.dtype not in PROMOTE_K_TILES or problem.output_bytes == 1:
            return (config,)
        fields = config.as_dict()
        return tuple(PromotedConfig(**fields, promote=k_tiles) for k_tiles in PROMOTE_K_TILES[problem.dtype])


def product(
    conv: WgmmaConv,
    config: PersistentConfig,
    card: Card,
    *,
    phases: Ints = ONE_PHASE,
    pool: tuple[int, int] = (1, 1),
    places: bool = False,
    statistics: bool = False,
    norm: str = "",
) -> KernelCall:
    """Return the launch over x, weight, bias, residual (or the mask), shortcut, shortcut_weight and y.

    With `statistics` the buffer `partial` receives the moments of `partial_sums` groups of results; with `norm`, one of
    `MASKS`, y is the gradient of a normalization's result, and `partial` receives the sums for its own gradients. With
    several sub-pixel phases, windows and placement are what all of them have in common.
    """
    windows, filters, epilogue, shortcut, placement = (
        conv.windows, conv.filters, conv.epilogue, conv.shortcut, conv.placement
    )  # fmt: skip
    output_bytes = ELEMENT_BYTES[epilogue.output]
    permuted = phase_count(phases) == 1 and config.permutes(windows.element_bytes, output_bytes, filters)
    program = Program.of(
        "conv2d/sm90_persistent.cu",
        constants=epilogue.activation_constants,
        windows=windows,
        filters=filters,
        config=config,
        epilogue=epilogue,
        share=(PING_PONG, PIXELS, FILTERS, DEPTH).index(config.share),
        shortcut=shortcut,
        placed=placement != UNPLACED,
        phases=phase_count(phases),
        y_pitch=conv.y_pitch,
        pool=pool,
        places=places,
        statistics=statistics,
        norm=("", *MASKS).index(norm),
        permuted=permuted,
    )
    pixel_map = windows.pixel_map(Buffer("x"), config.pixels)
    weight_box = config.filters // config.cluster
    weight_map = windows.weight_map(Buffer("weight"), filters, weight_box, permuted=permuted)
    maps: list[TensorMap] = [pixel_map, weight_map]
    if shortcut is not None:
        maps.append(shortcut.pixel_map(Buffer("shortcut"), config.pixels))
        maps.append(shortcut.weight_map(Buffer("shortcut_weight"), filters, weight_box, permuted=permuted))
    else:
        maps += [pixel_map, weight_map]

    def panel_map(buffer: str) -> TensorMap:
        if not config.buffers:
            return pixel_map
        if placement != UNPLACED:  # stored without TMA
            return (
                pixel_map if buffer == "y" else windows.placed_map(Buffer(buffer), filters, placement, PANEL)
            )
        if pool != (1, 1) and buffer == "y":
            return pixel_map
        box = (ROW_BYTES // output_bytes, PANEL)
        strides = (conv.y_pitch * output_bytes,) if conv.y_pitch and buffer == "y" else ()
        return TiledMap(Buffer(buffer), epilogue.output, (filters, windows.pixels), box, strides=strides)

    maps += [panel_map("residual" if epilogue.aux else "y"), panel_map("y")]
    group = config.cluster * config.splits
    clusters = config.clusters(windows.pixels, filters, card, phase_count(phases))
    if statistics or norm:
        across = ceil_div(filters, config.filters)
        clusters = clusters // across * across
    return kernel_call(
        program,
        clusters * group,
        THREADS,
        *maps,
        Buffer("bias", optional=True),
        Buffer("scale", optional=True),
        Buffer("scales", optional=True),
        Buffer("residual", optional=True),
        Buffer("y"),
        Buffer("places", optional=True),
        windows.shape(filters),
        shortcut_shape(shortcut),
        placement,
        phases,
        WeightsReady(("weight", "shortcut_weight")),
        ReleaseDependents(),
        conv.y_pitch,
        Buffer("partial", optional=True),
        NORM,
        shared_bytes=config.shared_bytes(output_bytes),
        cluster=(group, 1, 1),
    )


def partial_sums(call: KernelCall, filters: int, config: PersistentConfig) -> int:
    """Return the groups of results whose sums over pixels a launch of `product` writes."""
    sharing = call.grid[0] // ceil_div(filters, config.filters)
    return sharing if config.share == FILTERS else 2 * sharing


def _panels_have_windows(problem: Conv2dProblem) -> bool:
    """Return True if a staging tile consists of whole rows of pool windows, and no row is left over."""
    rows, columns = problem.pool
    return not (
        PANEL % (rows * problem.output_width)
        or problem.output_height % rows
        or problem.output_width % columns
    )


@dataclass(frozen=True)
class Persistent(HopperRung[PersistentConfig]):
    dtypes: tuple[str, ...] = ("fp16", "bf16", "tf32", "fp8", "int8")
    candidates: tuple[PersistentConfig, ...] = ()
    may_split: bool = False

    takes_frames = True
    pitched_buffers = ("x", "y")
    supports_pitched_residual = True
    supports_pool = True
    supports_statistics = True

    def limits(self, problem: Conv2dProblem) -> str | None:
        staged = all(config.buffers for config in self.candidates)
        if problem.pools and not staged:
            return f"{self.name} supports no pool, not {problem.pool}"
        if problem.statistics and not (staged and all(config.cluster == 1 for config in self.candidates)):
            return f"{self.name} does not compute mean and variance of its results; batch_statistics does"
        if problem.statistics and (problem.residual or problem.y_pitch or problem.shortcut_channels):
            return f"{self.name} computes statistics of results without residual, shortcut and pitch"
        if problem.pools and not _panels_have_windows(problem):
            return (
                f"{self.name} pools staging tiles of {PANEL} pixels, which must be whole rows of windows; "
                f"{spell_pair(problem.pool)} over {problem.output_height}x{problem.output_width} pixels are not"
            )
        if problem.x_pitch and copied_channels(problem) != problem.channels:
            return f"{self.name} pads {problem.channels} channels by a copy, which needs a dense x"
        if problem.y_pitch and problem.residual and not staged:
            return f"{self.name} does not support a residual with a pitched y"
        reason = super().limits(problem)
        if reason is None and not self.configs(problem):
            return f"{self.name} has no tile for {problem.name}"
        return reason

    def configs(self, problem: Conv2dProblem) -> tuple[PersistentConfig, ...]:
        p = problem
        found = []
        for candidate in (one for each in self.candidates for one in PromotedConfig.variants(each, p)):
            config = candidate.fitted(p)
            if p.statistics and ceil_div(p.filters, candidate.filters) > self.card.multiprocessors:
                continue
            if config is None or not self.card.max_active_clusters(config.cluster):
                continue
            if self.may_split:
                found += self._split(p, config)
            elif config.filters == LEAST_FILTERS or config.filters < 2 * p.filters:
                found.append(config)
        return tuple(sorted(found, key=lambda config: self.clocks(p, config))[:MOST_CONFIGS])

    def _split(self, problem: Conv2dProblem, config: PersistentConfig) -> list[PersistentConfig]:
        """Return the config with every number of splits that leaves each CTA and warpgroup a k-tile and runs in one
        wave."""
        deep = config.share == DEPTH
        tiles = config.tiles(problem.output_pixels, problem.filters)
        most = min(MOST_SPLITS, k_tiles_of(problem) // (2 if deep else 1))
        return [
            config.changed(splits=splits)
            for splits in range(1 if deep else 2, most + 1)
            if tiles <= self.card.max_active_clusters(splits)
        ]

    def clocks(self, problem: Conv2dProblem, config: PersistentConfig) -> float:
        p = problem
        is_thin = p.taps > 1 and p.channels * p.element_bytes % ROW_BYTES != 0
        cost = config.cost(
            p.output_pixels, p.filters, k_tiles_of(p), self.card,
            thin=p.taps if is_thin else 0, special=activation_cost(p.activation)[1],
            permuted=config.permutes(p.element_bytes, p.output_bytes, p.filters),
        )  # fmt: skip
        rounds = ceil_div(config.tiles(p.output_pixels, p.filters), self.card.multiprocessors)
        results = rounds * config.pixels * config.filters
        if p.pools:
            cost += results * POOL_CYCLES_PER_RESULT
        if p.statistics:
            cost += results * STATISTICS_CYCLES_PER_RESULT
        if p.element_bytes < p.output_bytes and config.share == PING_PONG:
            cost += results * WIDER_CYCLES_PER_RESULT
        if p.taps == 1 and p.channels * p.element_bytes < ROW_BYTES:
            cost += rounds * config.pixels * THIN_CYCLES_PER_PIXEL
        return cost

    def recipe(self, problem: Conv2dProblem, config: PersistentConfig) -> Recipe:
        p, prepared = problem, prepare_for_copies(problem)
        call = product(
            replace(WgmmaConv.of(p), windows=Windows.of(prepared.shape)),
            config,
            self.card,
            pool=p.pool,
            places=p.places,
            statistics=p.statistics is not None,
        )
        converted = {"x": prepared.x, "weight": prepared.weight, "shortcut_weight": prepared.shortcut_weight}
        products = Recipe((call,)).remap(converted).steps
        if p.statistics is None:
            return Recipe((*prepared.steps, *products), prepared.workspaces)
        merge, partial = merge_moments(
            p.statistics,
            partial_sums(call, p.filters, config),
            config.warpgroup_tile[0],
            Buffer("statistics", optional=True),
        )
        return Recipe((*prepared.steps, *products, merge), (*prepared.workspaces, partial))

    def estimate(self, problem: Conv2dProblem, config: PersistentConfig) -> float:
        """Add the launch that merges statistics."""
        merge = self.card.microseconds(0, 0) if problem.statistics else 0.0
        return super().estimate(problem, config) + merge


_TILES = (
    PersistentConfig(128, 128, PING_PONG, 6),
    PersistentConfig(256, 128, PIXELS, 4),
    PersistentConfig(128, 256, PIXELS, 4),
    PersistentConfig(128, 128, PIXELS, 6),
    PersistentConfig(128, 64, PING_PONG, 8),
    PersistentConfig(64, 64, PING_PONG, 8),
    PersistentConfig(64, 128, FILTERS, 8),
    PersistentConfig(128, 192, PIXELS, 4),
)
_SWAPPED = (
    PersistentConfig(256, 64, PING_PONG, 4, buffers=4, swapped=True),
    PersistentConfig(256, 128, FILTERS, 4, buffers=2, swapped=True),
    PersistentConfig(128, 64, PING_PONG, 7, buffers=2, swapped=True),
    PersistentConfig(128, 128, FILTERS, 6, buffers=2, swapped=True),
    PersistentConfig(192, 64, PING_PONG, 5, buffers=3, swapped=True),
    PersistentConfig(192, 128, FILTERS, 4, buffers=3, swapped=True),
)
"""Tiles of 192 pixels are for problems whose last wave is half empty with 128 and 256."""
_STORED = tuple(replace(tile, buffers=math.gcd(tile.panels, 6)) for tile in _TILES)
_SPLIT = (
    PersistentConfig(64, 32, DEPTH, 12),
    PersistentConfig(64, 64, DEPTH, 10),
    PersistentConfig(128, 64, DEPTH, 8),
    PersistentConfig(64, 128, FILTERS, 8),
    PersistentConfig(128, 64, PIXELS, 8),
    PersistentConfig(128, 128, PIXELS, 6),
    PersistentConfig(256, 128, PIXELS, 4),
    PersistentConfig(128, 256, PIXELS, 4),
)

# Predictions for 128to128_28_k3 at batch 256, 59 GFLOP, where no other is named.
RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Persistent(
        "persistent",
        "persistent CTAs, one per SM: copies run ahead across tiles, and two warpgroups ping-pong over tiles of their "
        "own, so that one stores while the other multiplies",
        below="producer_consumer",
        # A tile of 18 k-tiles took the time of 24, 5 of them for filling and storing; now one is left: 560 -> 640
        # TFLOP/s.
        predicted_gain=1.12,
        candidates=_TILES,
    ),
    Persistent(
        "overlapped_store",
        "TMA stores results from staging tiles in shared memory, whole lines at a time, and loads residuals the same "
        "way, hidden behind the products",
        below="persistent",
        # 4-byte stores of quarters of a line keep a warpgroup busy for 1500 of a tile's 9200 cycles; half of that is
        # already hidden behind the other's products.
        predicted_gain=1.06,
        candidates=_STORED,
    ),
    Persistent(
        "swapped_operands",
        "filters are M and pixels are N of the product: 64 filters multiply at full rate, since the operand that is "
        "read again for every 64 rows is now the small one",
        below="overlapped_store",
        # 64to64_56_k3: tiles of 128x64 have 43 operations per L2 byte, 256x64 have 51; 9 TB/s allow 390 and 460
        # TFLOP/s.
        predicted_gain=1.15,
        candidates=_SWAPPED,
    ),
    Persistent(
        "cluster_multicast",
        "two CTAs of a cluster share their weights: each multicasts half of them",
        below="overlapped_store",
        # L2 traffic drops by a quarter, but was not the limit, and the CTAs now wait for each other.
        predicted_gain=0.97,
        candidates=tuple(replace(tile, cluster=2) for tile in (*_STORED[:3], *_SWAPPED[:2])),
    ),
    Persistent(
        "cluster_split_k",
        "split-K for problems with fewer tiles than SMs: the CTAs of a cluster share the sum of one tile and reduce it "
        "through distributed shared memory",
        below="persistent",
        # 512to512_7_k3 at batch 1: 4 CTAs of 72 k-tiles become 32 of 9: 72 * 330 cycles + 3 us against 9 * 330 + 4 us.
        predicted_gain=3.0,
        candidates=_SPLIT,
        may_split=True,
    ),
)
