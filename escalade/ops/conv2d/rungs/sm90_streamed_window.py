"""Convolutions with stride 1 on Hopper whose windows are copied once, slab by slab of channels, weights tap by tap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, ReleaseDependents, TiledMap, WeightsReady
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.activation_costs import SPECIAL_LANES, activation_cost
from escalade.ops.conv2d.rungs.epilogue import UNPLACED
from escalade.ops.conv2d.rungs.job import Job
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, Conversion, rounded
from escalade.ops.conv2d.rungs.sm90_persistent import PIECE_BYTES
from escalade.ops.conv2d.rungs.sm90_rung import truncated_tolerance
from escalade.ops.conv2d.rungs.tma_windows import Windows
from escalade.ops.conv2d.rungs.window_tiling import (
    FILTERS,
    ROW_BYTES,
    TAP_BYTES,
    THREADS,
    Tiling,
    WindowRung,
    stacks_of,
    tilings_of,
)

MOST_WINDOWS = 3
MOST_TAP_STAGES = 12
LEAST_TAP_STAGES = 4
_TAP_STAGE_BYTES = TAP_BYTES + 16
"""A tap of 64 filters, and its barriers."""
MOST_SPLITS = 8
MOST_CONFIGS = 12

# Cycles, set by hand so that estimates come within 10% of what an H200 took for most tiles of ResNet-18's convolutions
# at batches of 1 to 256.
COLUMN_CYCLES = 2.2
"""Cycles of the tensor cores for one column of a tap, 64 filters by 128 bytes of channels: 2, and what power takes."""
START_CYCLES = 500.0
"""Cycles until the first copies are under way."""
TURN_CYCLES = 1000.0
"""Cycles from one tile's products to the next one's."""
END_CYCLES_COLUMN = 13.5
"""Cycles that the end of the last tile takes for each of its columns."""
RESIDUAL_CYCLES = 360.0
"""Cycles that a tile with residuals takes more than one without."""
RESIDUAL_CYCLES_BOX = 47.0
HANDING_CYCLES = 1500.0
"""Cycles from one warpgroup's sums to the panel that is ready for the other's, where they share it, besides what copies
take: a guess from the latencies of a store and a load."""
LONELY_TAP_CYCLES = 2000.0
"""Cycles more where blocks of a cluster share the sum of a single tap, whose copies nothing hides: 1024to512_14 and
512to1024_14 of one image."""
MEETING_CYCLES_COLUMN = 12.0
"""Cycles a column in which the blocks of a cluster push their parts, add them up and store: 256 bytes a column at 21 a
cycle."""


@dataclass(frozen=True)
class StreamedConfig(Config):
    rows: int
    """Rows of output pixels of a tile."""
    columns: int
    windows: int
    """Windows in shared memory, of a slab each."""
    tap_stages: int
    """Taps of 64 filters in shared memory."""
    splits: int = 1
    """Blocks of a cluster that share the channels of one tile."""
    images: int = 1
    """Images of a tile: more than one only if they are small."""


def _tiling(job: Job, config: StreamedConfig) -> Tiling:
    return Tiling(job, config.rows, config.columns, config.images)


def _shared_bytes(tiling: Tiling, windows: int, tap_stages: int, splits: int) -> int:
    """A panel for each of two warpgroups (or one, of twice the size, for both), windows, taps, and their barriers; of
    splits one panel, and the parts of the blocks of 8 pixels that a block owns."""
    assert tiling.width
    panels = (2 if splits == 1 else 1) * tiling.width * ROW_BYTES
    parts = ceil_div(tiling.width // 8, splits) * splits * PIECE_BYTES if splits > 1 else 0
    return panels + parts + windows * (tiling.stage_bytes + 16) + tap_stages * _TAP_STAGE_BYTES + 4 * 8


def _stages(tiling: Tiling, splits: int) -> tuple[int, int] | None:
    """Windows and taps that fit: the taps of a window's time first, then a third window."""
    for windows in range(MOST_WINDOWS, 1, -1):
        room = HOPPER_SHARED - _shared_bytes(tiling, windows, 0, splits)
        tap_stages = min(room // _TAP_STAGE_BYTES, MOST_TAP_STAGES)
        if tap_stages >= (
            LEAST_TAP_STAGES if windows == 2 else max(LEAST_TAP_STAGES, min(8, tiling.job.taps))
        ):
            return windows, tap_stages
    return None


def _slabs(windows: Windows | None) -> int:
    """Slabs of the channels of an image."""
    return ceil_div(windows.channels, windows.slab) if windows else 0


def _splits(tiling: Tiling, card: Card) -> Iterator[int]:
    """One, and those that leave a block fewer slabs, where all clusters run at once, y lies together and results have
    16 bits."""
    yield 1
    if tiling.job.placement != UNPLACED or tiling.shared_panel:
        return
    slabs, tiles = _slabs(tiling.job.windows), tiling.tiles * tiling.filter_tiles
    for splits in range(2, MOST_SPLITS + 1):
        fewer = ceil_div(slabs, splits) < ceil_div(slabs, splits - 1)
        if fewer and tiles <= card.clusters_at_once(splits):
            yield splits


def _cost(tiling: Tiling, splits: int, card: Card) -> float:
    """Cycles, as far as tensor cores, L2 and the ends of tiles decide."""
    assert tiling.width
    job = tiling.job
    tiles = tiling.tiles * tiling.filter_tiles
    copied = tiling.window_bytes + job.taps * TAP_BYTES
    copy = card.rates.copies.tma_streamed
    tap, rate = COLUMN_CYCLES * tiling.width, copy.together
    if splits > 1:
        rate = card.copy_rate(copy, tiles * splits)
    window = max(job.taps * tap, copied / rate)
    pixel_bytes = tiling.images * tiling.rows * tiling.window[1] * ROW_BYTES
    shortcut = max(tap, (pixel_bytes + TAP_BYTES) / copy.together)
    tile = ceil_div(_slabs(job.windows), splits) * window
    tile += ceil_div(_slabs(job.shortcut), splits) * shortcut
    if job.epilogue.companion:
        tile += RESIDUAL_CYCLES + RESIDUAL_CYCLES_BOX * tiling.boxes
    special = activation_cost(job.epilogue.activation)[1] / SPECIAL_LANES
    tile += special * tiling.width * FILTERS
    end = END_CYCLES_COLUMN * tiling.width
    if tiling.shared_panel:
        copies = 2 * tiling.width * ROW_BYTES / copy.together
        tile = max(tile, HANDING_CYCLES - TURN_CYCLES + (1 + job.epilogue.companion) * copies)
        end += copies / 2
    if splits == 1:
        return START_CYCLES + ceil_div(tiles, card.multiprocessors) * (tile + TURN_CYCLES) + end
    first = copied * tiles * splits / card.multiprocessors / card.rates.copies.tma_first
    lonely = LONELY_TAP_CYCLES if job.taps == 1 else 0.0
    return lonely + first + tile + MEETING_CYCLES_COLUMN * tiling.width


def _rounded_weights(job: Job) -> dict[str, Conversion]:
    """The weights rounded to TF32, by the names of what they replace."""
    if job.windows.dtype != "tf32":
        return {}
    found = {"weight": rounded("weight", job.filters * job.taps, job.windows.channels)}
    if job.shortcut:
        found["shortcut_weight"] = rounded("shortcut_weight", job.filters, job.shortcut_channels)
    return found


def _shortcut_maps(tiling: Tiling, shortcut: Windows, weight: Buffer) -> tuple[TiledMap, TiledMap]:
    """The pixels that the stride leaves over, numbered as in a window, and a slab of their weights."""
    step, (height, row), pixel = (
        shortcut.stride[0],
        shortcut.image,
        shortcut.channels * shortcut.element_bytes,
    )
    pixels = TiledMap(
        Buffer("shortcut"),
        shortcut.dtype,
        (shortcut.channels, shortcut.output[1], shortcut.output[0], shortcut.batch),
        (shortcut.slab, tiling.window[1], tiling.window[0] if tiling.stacked else tiling.rows, tiling.images),
        strides=(step * pixel, step * row * pixel, height * row * pixel),
    )
    return pixels, shortcut.weight_map(weight, tiling.job.filters, FILTERS)


@lru_cache(1024)
def _best_first(job: Job, card: Card) -> tuple[StreamedConfig, ...]:
    """The cheapest of every width of the product and number of splits, with one box and with several."""
    found: dict[tuple[int, int, bool], tuple[float, StreamedConfig]] = {}
    for tiling in (*tilings_of(job), *stacks_of(job)):
        if tiling.width is None:
            continue
        for splits in _splits(tiling, card):
            stages = _stages(tiling, splits)
            if stages is None:
                continue
            cost = _cost(tiling, splits, card)
            key = tiling.width, splits, tiling.boxes == 1
            if key not in found or cost < found[key][0]:
                found[key] = (
                    cost,
                    StreamedConfig(tiling.rows, tiling.columns, *stages, splits, tiling.images),
                )
    return tuple(config for _, config in sorted(found.values(), key=lambda pair: pair[0])[:MOST_CONFIGS])


@dataclass(frozen=True)
class StreamedWindow(WindowRung[StreamedConfig]):
    @property
    def takes_shortcut(self) -> bool:
        return True

    def job_limits(self, job: Job) -> str | None:
        sentence = super().job_limits(job)
        if sentence is not None:
            return sentence
        both = {"channels": job.windows.channels, "shortcut channels": job.shortcut_channels}
        copied = COPY_BYTES // job.windows.element_bytes
        for what, channels in both.items():
            if channels % copied:
                return f"{self.name} takes multiples of {copied} {what}, not {channels}"
        pixels = job.windows.pixels
        if pixels * (job.filters // FILTERS) >= 2**31 - 2 * self.card.multiprocessors:
            return f"{self.name} counts tiles in 32 bits; {pixels} output pixels are too many"
        if not self.job_configs(job):
            return (
                f"{self.name} has two windows in shared memory, of {job.reach[0] + 1}x{job.reach[1] + 1} pixels or "
                f"more; there are {HOPPER_SHARED // 1024} KiB"
            )
        return None

    def job_configs(self, job: Job) -> tuple[StreamedConfig, ...]:
        return _best_first(job, self.card)

    def job_clocks(self, job: Job, config: StreamedConfig) -> float:
        return _cost(_tiling(job, config), config.splits, self.card)

    def job_recipe(self, job: Job, config: StreamedConfig) -> Recipe:
        tiling = _tiling(job, config)
        constants: dict[str, Constant] = {
            **tiling.constants,
            "WINDOWS": config.windows,
            "TAP_STAGES": config.tap_stages,
            "SPLITS": config.splits,
            "Y_PITCH": job.y_pitch if config.splits > 1 else 0,  # of results that leave without TMA
            "SHORTCUT": job.shortcut is not None,
        }
        conversions = _rounded_weights(job)
        weight, shortcut_weight = (
            Buffer(conversions[name].name if name in conversions else name)
            for name in ("weight", "shortcut_weight")
        )
        maps = tiling.window_map, tiling.weight_map(weight)
        tiles = tiling.tiles * tiling.filter_tiles
        blocks = tiles if config.splits > 1 else min(tiles, self.card.multiprocessors)
        call = KernelCall(
            Program.of("conv2d/sm90_streamed_window.cu", "conv2d_sm90_streamed_window", constants),
            (blocks * config.splits, 1, 1),
            (THREADS, 1, 1),
            (
                *maps,
                *(_shortcut_maps(tiling, job.shortcut, shortcut_weight) if job.shortcut else maps),
                *tiling.panel_maps,
                Buffer("bias", optional=True),
                Buffer("y"),
                tiling.shape,
                WeightsReady((weight.name,)),
                ReleaseDependents(),
            ),
            shared_bytes=_shared_bytes(tiling, config.windows, config.tap_stages, config.splits),
            cluster=(config.splits, 1, 1),
            overlap=True,
        )
        return Recipe(
            (*(one.step for one in conversions.values()), call),
            tuple(one.workspace for one in conversions.values()),
        )

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        return truncated_tolerance(problem, super().tolerance(problem, peer_error))


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    StreamedWindow(
        "streamed_window",
        "windows for any number of channels, 64 at a time (32 in TF32), with weights that follow tap by tap; where "
        "tiles are few, the blocks of a cluster share their channels",
        below="window",
        # 256to256_14_k3 at batch 32, against overlapped_store: 98 tiles of 36 slabs that L2 feeds in 630 cycles each
        # are 22,700 cycles; 128 tiles of 4 windows and 9 taps of 448 cycles are 16,100.
        predicted_gain=1.4,
        dtypes=("fp16", "bf16", "tf32"),
    ),
)
