"""The implicit GEMM with Hopper's own units by blocks that stay, and what follows: ping-pong, copies out, clusters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from escalade.device.program import Constant, Program
from escalade.device.recipe import (
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
from escalade.ops.base.dtypes import ELEMENT_BYTES, element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.naming import spell_pair
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.activation_costs import SPECIAL_LANES, activation_cost
from escalade.ops.conv2d.rungs.epilogue import ONE_CLASS, UNPLACED, Epilogue, class_count
from escalade.ops.conv2d.rungs.preparation import copied_channels, prepare_for_copies
from escalade.ops.conv2d.rungs.sm90_rung import PROMOTE_SLABS, SLAB_RATE, HopperRung, slabs_of
from escalade.ops.conv2d.rungs.tma_windows import MN_MAJOR_FILTERS, ROW_BYTES, Windows, shortcut_shape

PING_PONG, PIXELS, FILTERS, DEPTH = "turns", "pixels", "filters", "depth"
"""How two warpgroups share work: a tile each, halves of one tile, or every other slab of it."""
PANEL = 64
"""Pixels and filters of a panel of results."""
THREADS = 384
LEAST_FILTERS = 64
"""Filters of a tile at least: problems of fewer have zeros there."""
WIDTHS = (64, 128, 256)
"""Columns of products other than fp16's and bf16's."""
MOST_PROMOTED = 64 * 128
"""Sums of a warpgroup that registers hold twice."""
MOST_SPLITS = 8
"""Blocks of a cluster, on any Hopper GPU."""
PIECE_BYTES = 128 * 16
"""Four sums of every thread of a warpgroup: parts of a sum travel in such pieces (kernels/conv2d/shared_sum.cuh)."""

MOST_CONFIGS = 16
"""Configs that are worth a measurement, at most."""

START_CYCLES = 1600.0
"""Cycles until the first copies arrive, and from the last results to the end of the launch."""
TURN_CYCLES, TURN_CYCLES_A_SUM = 500.0, 0.04
"""Cycles from one tile's products to the next one's where warpgroups ping-pong: so many, and for every result."""
END_CYCLES, END_CYCLES_A_SUM = 900.0, 0.12
"""Cycles from one tile's products to the next one's where nothing else is multiplied meanwhile: so many, and for every
result."""
UNEVEN_CYCLES_A_SUM, UNEVEN_WIDE_CYCLES_A_SUM = 0.1, 0.35
"""Cycles more for every result where filters are no multiple of a tile's: of 64 in 240to40_28, 480to80_14 and
112to672_14, and of 128 and more in 24to72_56, 40to120_28 and 104to104_28."""
SPECIAL_CYCLES = 1.4
"""How much longer than its special functions take an activation keeps a tile: 96to384_56, 192to768_28 and 384to1536_14
with GELU."""
SWAPPED = 0.92
"""What filters as rows take of all these cycles, in the mean over 225 tiles of Inception v3, GoogLeNet and ConvNeXt."""
THIN_CYCLES_A_COPIED_ROW = 4.3
"""Cycles of a row that is copied, of pixels or filters, where its channels are less than a row of a slab: 48to64_35_k5,
96to96_35_k3 and 80to192_73_k3."""
THIN_CYCLES_A_ROW = 10.0
"""Cycles more for every pixel of a tile whose channels are less than a row of a slab: 16to64_112."""
STRAIGHT = 1.4
"""How much longer that takes straight from registers, a quarter of a line at a time."""
MEETING_CYCLES, MEETING_CYCLES_A_SUM = 300.0, 0.15
"""Cycles in which the blocks of a cluster push their parts and add them up: so many, and for every result."""
POOL_CYCLES_A_SUM = 0.04
"""Cycles more for every result of which maxima are taken: a guess, for five instructions of one of 128 threads."""
OVER_RING_CYCLES = 600.0
"""Cycles more where blocks wait for each other before they push their parts."""


@dataclass(frozen=True)
class PersistentConfig(Config):
    pixels: int
    """Output pixels of a tile."""
    filters: int
    share: str
    """What two warpgroups share: turns (ping-pong, a tile each), or the pixels, filters or depth of one tile."""
    stages: int
    buffers: int = 0
    """Panels of results a warpgroup has in shared memory; none: results go straight to y."""
    swapped: bool = False
    """Filters are the rows of the product."""
    cluster: int = 1
    """Blocks that share their weights."""
    splits: int = 1
    """Blocks that share the sum of a tile."""

    @property
    def warpgroup_tile(self) -> tuple[int, int]:
        return (
            self.pixels // (2 if self.share == PIXELS else 1),
            self.filters // (2 if self.share == FILTERS else 1),
        )

    @property
    def panels(self) -> int:
        """Panels of results that a warpgroup has of a tile."""
        return math.prod(self.warpgroup_tile) // PANEL**2

    @property
    def takes_mn_major(self) -> bool:
        """Whether a warpgroup has as many filters as MN-major weights come in, and they come to one block."""
        return self.warpgroup_tile[1] % MN_MAJOR_FILTERS == 0 and self.cluster == 1

    @property
    def parts(self) -> int:
        """Parts that the sums of a tile come in."""
        return self.splits * (2 if self.share == DEPTH else 1)

    @property
    def columns(self) -> int:
        return self.warpgroup_tile[0 if self.swapped else 1]

    @property
    def parts_bytes(self) -> int:
        """Bytes of the pieces that a block adds up."""
        if self.parts == 1:
            return 0
        pieces = math.prod(self.warpgroup_tile) * 4 // PIECE_BYTES
        return ceil_div(pieces, self.splits) * self.splits * 2 * PIECE_BYTES

    def _bytes_besides_parts(self, output_bytes: int) -> int:
        """Panels, stages, and the barriers of both and of ping-pong or parts."""
        panels = 2 * self.buffers * PANEL * PANEL * output_bytes
        stages = self.stages * ((self.pixels + self.filters) * ROW_BYTES + 16)
        return panels + stages + 2 * self.buffers * 8 + 16

    @property
    def parts_apart(self) -> bool:
        """Whether parts have room besides the stages (there are no panels then); else they come over them, when all
        blocks have multiplied."""
        return self._bytes_besides_parts(0) + self.parts_bytes <= HOPPER_SHARED

    def shared_bytes(self, output_bytes: int) -> int:
        return self._bytes_besides_parts(output_bytes) + (self.parts_bytes if self.parts_apart else 0)

    def fitted(self, problem: Conv2dProblem) -> PersistentConfig | None:
        """This config with as many stages as there is room for, up to those it has and three at least, with half the
        panels if need be; None if it does not suit."""
        p = problem
        wg_pixels, wg_filters = self.warpgroup_tile
        promoted = p.dtype in PROMOTE_SLABS
        if promoted and (wg_pixels * wg_filters > MOST_PROMOTED or self.buffers or self.share == DEPTH):
            return None
        if p.dtype not in ("fp16", "bf16") and self.columns not in WIDTHS:
            return None
        if self.buffers and p.filters * p.output_bytes % 16:
            return None
        step = -2 if self.share == DEPTH else -1
        for buffers in dict.fromkeys((self.buffers, self.buffers // 2)):
            for stages in range(self.stages, 2, step):
                config = replace(self, stages=stages, buffers=buffers)
                if (
                    bool(buffers) == bool(self.buffers)
                    and config.shared_bytes(p.output_bytes) <= HOPPER_SHARED
                ):
                    return config
        return None

    def tiles(self, pixels: int, filters: int, classes: int = 1) -> int:
        """Tiles of the problem, of each class of pixels alike; where a cluster shares weights, the tiles of its blocks
        count as one."""
        return (
            classes * ceil_div(ceil_div(pixels, self.pixels), self.cluster) * ceil_div(filters, self.filters)
        )

    def clusters(self, pixels: int, filters: int, card: Card, classes: int = 1) -> int:
        tiles = self.tiles(pixels, filters, classes)
        return tiles if self.parts > 1 else min(tiles, card.multiprocessors // self.cluster)

    def cost(
        self, pixels: int, filters: int, slabs: int, card: Card, *, thin: int = 0, special: float = 0.0,
        classes: int = 1,
    ) -> float:  # fmt: skip
        """Cycles, as far as tensor cores, L2 and the ends of tiles decide. So many of the slabs are thin, and each
        result takes so many special functions."""
        products = self.pixels * self.filters / SLAB_RATE
        if self.columns <= 64:  # both operands are read from shared memory as fast as they are multiplied
            products *= 1.2
        tiles, sums = self.tiles(pixels, filters, classes), self.pixels * self.filters
        group = self.cluster * self.splits
        at_once = card.clusters_at_once(group)
        rate = card.copy_rate(card.rates.copies.tma_persistent, min(tiles, at_once) * group)
        copies = (self.pixels + self.filters / self.cluster) * ROW_BYTES / rate
        rounds = ceil_div(tiles, at_once)
        if self.share == PING_PONG and rounds > 1:
            end = TURN_CYCLES + TURN_CYCLES_A_SUM * sums
        else:
            end = END_CYCLES + END_CYCLES_A_SUM * sums
        if not self.buffers:
            end *= STRAIGHT
        if self.parts > 1:
            end += MEETING_CYCLES + MEETING_CYCLES_A_SUM * sums
            if not self.parts_apart:
                end += OVER_RING_CYCLES
        if self.cluster > 1:  # they wait for each other
            products, copies = 1.08 * products, 1.08 * copies
        if filters % self.filters:
            end += (UNEVEN_WIDE_CYCLES_A_SUM if self.filters > LEAST_FILTERS else UNEVEN_CYCLES_A_SUM) * sums
        end += SPECIAL_CYCLES * special / SPECIAL_LANES * sums
        slower = max(0.0, THIN_CYCLES_A_COPIED_ROW * (self.pixels + self.filters) - max(products, copies))
        multiplied = (
            ceil_div(slabs, self.splits) * max(products, copies) + ceil_div(thin, self.splits) * slower
        )
        return (rounds * (multiplied + end) + START_CYCLES) * (SWAPPED if self.swapped else 1.0)


def product(
    windows: Windows,
    filters: int,
    config: PersistentConfig,
    epilogue: Epilogue,
    card: Card,
    *,
    x: str = "x",
    weight: str = "weight",
    residual: str = "residual",
    shortcut: Windows | None = None,
    shortcut_weight: str = "shortcut_weight",
    placement: Ints = UNPLACED,
    classes: Ints = ONE_CLASS,
    y_pitch: int = 0,
    pool: tuple[int, int] = (1, 1),
    places: bool = False,
    lane: int = 0,
) -> KernelCall:
    """One launch: y = epilogue(sum over taps and channels of x's windows times weight [filters][taps][channels]).

    With several classes of pixels, the windows and the placement are those that all have in common.
    """
    wg_pixels, wg_filters = config.warpgroup_tile
    dtype, output_bytes = windows.dtype, ELEMENT_BYTES[epilogue.output]
    constants: dict[str, Constant] = {
        "Element": element(dtype),
        "WG_PIXELS": wg_pixels,
        "WG_FILTERS": wg_filters,
        "SHARE": (PING_PONG, PIXELS, FILTERS, DEPTH).index(config.share),
        "SWAPPED": config.swapped,
        "STAGES": config.stages,
        "BUFFERS": config.buffers,
        "CLUSTER": config.cluster,
        "SPLITS": config.splits,
        "PARTS_APART": config.parts_apart,
        "PROMOTED": dtype in PROMOTE_SLABS,
        "SHORTCUT": shortcut is not None,
        "PLACED": placement != UNPLACED,
        "CLASSES": class_count(classes),
        "PITCHED": y_pitch > 0,
        "POOL_H": pool[0],
        "POOL_W": pool[1],
        "PLACES": places,
        "MN_MAJOR": windows.mn_major is not None,
        "FILTERS_ALIGNED": filters % config.filters == 0,
        "FILTERS_EVEN": filters % 2 == 0,
        **epilogue.constants(dtype),
    }
    pixel_map = windows.pixel_map(Buffer(x), config.pixels)
    weight_map = windows.weight_map(Buffer(weight), filters, config.filters // config.cluster)
    maps: list[TensorMap] = [pixel_map, weight_map]
    if shortcut is not None:
        maps.append(shortcut.pixel_map(Buffer("shortcut"), config.pixels))
        maps.append(shortcut.weight_map(Buffer(shortcut_weight), filters, config.filters // config.cluster))
    else:
        maps += [pixel_map, weight_map]

    def panel_map(buffer: str) -> TensorMap:
        if not config.buffers:
            return pixel_map
        if placement != UNPLACED:  # results go there without TMA
            return (
                pixel_map if buffer == "y" else windows.placed_map(Buffer(buffer), filters, placement, PANEL)
            )
        if pool != (1, 1) and buffer == "y":
            return pixel_map
        box = (ROW_BYTES // output_bytes, PANEL)
        strides = (y_pitch * output_bytes,) if y_pitch and buffer == "y" else ()
        return TiledMap(Buffer(buffer), epilogue.output, (filters, windows.pixels), box, strides=strides)

    maps += [panel_map(residual if epilogue.companion else "y"), panel_map("y")]
    group = config.cluster * config.splits
    return KernelCall(
        Program.of("conv2d/sm90_persistent.cu", "conv2d_sm90_persistent", constants),
        (config.clusters(windows.pixels, filters, card, class_count(classes)) * group, 1, 1),
        (THREADS, 1, 1),
        (
            *maps,
            Buffer("bias", optional=True),
            Buffer("scale", optional=True),
            Buffer("scales", optional=True),
            Buffer(residual, optional=True),
            Buffer("y"),
            Buffer("places", optional=True),
            windows.shape(filters),
            shortcut_shape(shortcut),
            placement,
            classes,
            WeightsReady((weight, shortcut_weight)),
            ReleaseDependents(),
            y_pitch,
        ),
        shared_bytes=config.shared_bytes(output_bytes),
        cluster=(group, 1, 1),
        overlap=True,
        lane=lane,
    )


def _panels_have_windows(problem: Conv2dProblem) -> bool:
    """Whether a panel's pixels, which follow each other in rows, are whole rows of windows, and no row is left over."""
    rows, columns = problem.pool
    return not (
        PANEL % (rows * problem.output_width)
        or problem.output_height % rows
        or problem.output_width % columns
    )


@dataclass(frozen=True)
class Persistent(HopperRung[PersistentConfig]):
    candidates: tuple[PersistentConfig, ...] = ()
    may_split: bool = False

    @property
    def takes_apart(self) -> tuple[str, ...]:
        return ("x", "y")

    @property
    def takes_pool(self) -> bool:
        return all(one.buffers for one in self.candidates)

    def limits(self, problem: Conv2dProblem) -> str | None:
        sentence = super().limits(problem)
        if problem.pools and not _panels_have_windows(problem):
            return (
                f"{self.name} takes maxima of panels of {PANEL} pixels; rows of windows of {spell_pair(problem.pool)} "
                f"over {problem.output_height}x{problem.output_width} pixels do not divide them"
            )
        if problem.x_pitch and copied_channels(problem) != problem.channels:
            return f"{self.name} pads {problem.channels} channels by a copy, which takes x dense"
        if problem.y_pitch and problem.residual and not all(one.buffers for one in self.candidates):
            return f"{self.name} reads a residual as y lies, dense"
        if sentence is None and not self.configs(problem):
            return f"no tile of {self.name} suits {problem.name}"
        return sentence

    def configs(self, problem: Conv2dProblem) -> tuple[PersistentConfig, ...]:
        p = problem
        found = []
        for candidate in self.candidates:
            config = candidate.fitted(p)
            if config is None or not self.card.clusters_at_once(config.cluster):
                continue
            if self.may_split:
                found += self._split(p, config)
            elif config.filters == LEAST_FILTERS or config.filters < 2 * p.filters:
                found.append(config)
        return tuple(sorted(found, key=lambda config: self.clocks(p, config))[:MOST_CONFIGS])

    def _split(self, problem: Conv2dProblem, config: PersistentConfig) -> list[PersistentConfig]:
        """The config with as many splits as give every block, and every warpgroup, a slab, and run at once."""
        deep = config.share == DEPTH
        tiles = config.tiles(problem.output_pixels, problem.filters)
        most = min(MOST_SPLITS, slabs_of(problem) // (2 if deep else 1))
        return [
            replace(config, splits=splits)
            for splits in range(1 if deep else 2, most + 1)
            if tiles <= self.card.clusters_at_once(splits)
        ]

    def clocks(self, problem: Conv2dProblem, config: PersistentConfig) -> float:
        p = problem
        is_thin = p.taps > 1 and p.channels * p.element_bytes % ROW_BYTES != 0
        cost = config.cost(
            p.output_pixels, p.filters, slabs_of(p), self.card,
            thin=p.taps if is_thin else 0, special=activation_cost(p.activation)[1],
        )  # fmt: skip
        if p.pools:
            rounds = ceil_div(config.tiles(p.output_pixels, p.filters), self.card.multiprocessors)
            cost += rounds * config.pixels * config.filters * POOL_CYCLES_A_SUM
        if p.taps > 1 or p.channels * p.element_bytes >= ROW_BYTES:
            return cost
        rounds = ceil_div(config.tiles(p.output_pixels, p.filters), self.card.multiprocessors)
        return cost + rounds * config.pixels * THIN_CYCLES_A_ROW

    def recipe(self, problem: Conv2dProblem, config: PersistentConfig) -> Recipe:
        p, prepared = problem, prepare_for_copies(problem)
        call = product(
            Windows.of(prepared.shape),
            p.filters,
            config,
            Epilogue.of(p),
            self.card,
            x=prepared.x.name,
            weight=prepared.weight.name,
            shortcut=Windows.of_shortcut(p) if p.shortcut_channels else None,
            shortcut_weight=prepared.shortcut_weight.name,
            y_pitch=p.y_pitch,
            pool=p.pool,
            places=p.places,
        )
        return Recipe((*prepared.steps, call), prepared.workspaces)


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
"""Tiles of 192 are for what those of 128 and 256 leave a half-empty last round of."""
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
        "as many blocks as multiprocessors take tile after tile; copies run ahead over the ends of tiles, and two "
        "warpgroups ping-pong over tiles of their own, so that one stores while the other multiplies",
        below="producer_consumer",
        # Of the 24 slabs' time that a tile of 18 takes, 5 went to filling and storing; now one is left: 560 -> 640.
        predicted_gain=1.12,
        candidates=_TILES,
    ),
    Persistent(
        "overlapped_store",
        "results leave through panels in shared memory by TMA, whole lines at a time, and residuals come "
        "the same way under the products",
        below="persistent",
        # 4-byte stores of quarters of a line keep a warpgroup for 1500 cycles of a tile's 9200; half of them lie under
        # the other's products already.
        predicted_gain=1.06,
        candidates=_STORED,
    ),
    Persistent(
        "swapped_operands",
        "filters are the rows of the product and pixels its columns: 64 filters multiply at the full rate, for what is "
        "read again for every 64 rows is then the small operand",
        below="overlapped_store",
        # For 64to64_56_k3: 128x64 asks L2 for 43 operations a byte's worth, 256x64 for 51: 9 TB/s allow 390 and 460.
        predicted_gain=1.15,
        candidates=_SWAPPED,
    ),
    Persistent(
        "cluster_multicast",
        "two neighbouring blocks share their weights: each copies half of them to both",
        below="overlapped_store",
        # L2 is asked for a quarter less, but it was not the limit, and the blocks now wait for each other.
        predicted_gain=0.97,
        candidates=tuple(replace(tile, cluster=2) for tile in (*_STORED[:3], *_SWAPPED[:2])),
    ),
    Persistent(
        "cluster_split_k",
        "where tiles are fewer than multiprocessors, the blocks of a cluster share the sum of one tile and add up "
        "through each other's shared memory",
        below="persistent",
        # 512to512_7_k3 at batch 1: 4 blocks of 72 slabs become 32 of 9: 72 * 330 cycles + 3 us against 9 * 330 + 4 us.
        predicted_gain=3.0,
        candidates=_SPLIT,
        may_split=True,
    ),
)
