"""Convolutions with stride 1 on Hopper whose windows are copied once: 64 channels at a time, weights tap by tap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, Relayed, Settled, TiledMap
from escalade.ops.conv2d.ends import UNPLACED
from escalade.ops.conv2d.hopper_windows import Windows
from escalade.ops.conv2d.job import Job
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.window_tiling import (
    FILTERS,
    ROW_BYTES,
    SLAB,
    TAP_BYTES,
    THREADS,
    Tiling,
    WindowRung,
    tilings_of,
)
from escalade.ops.elements import CLUSTERS, MOST_SHARED, SMS, ceil_div
from escalade.ops.ladder import Config, Rung

MOST_WINDOWS = 3
MOST_TAP_STAGES = 12
LEAST_TAP_STAGES = 4
MOST_SPLITS = 8
MOST_CONFIGS = 8

# Cycles, set by hand so that estimates come within 10% of what an H200 took for most tiles of ResNet-18's convolutions
# at batches of 1 to 256.
COPY_RATE = 39.0
"""Bytes that a multiprocessor gets from L2 in a cycle when all ask."""
COLUMN_CYCLES = 2.2
"""Of the tensor cores for one column of a tap, 64 filters by 64 channels: 2, and what power takes."""
START_CYCLES = 500.0
"""Until the first copies are under way."""
TURN_CYCLES = 1000.0
"""From one tile's products to the next one's."""
END_CYCLES_COLUMN = 13.5
"""Of the last tile's end."""
RESIDUAL_CYCLES = 360.0
"""Of a tile with residuals more than without."""
RESIDUAL_CYCLES_BOX = 47.0
MEETING_CYCLES = 2500.0
"""For the blocks of a cluster to lay down their parts, add them up and store."""
MEETING_CYCLES_COLUMN = 8.0
MEETING_CYCLES_PART = 2.0
"""Of a column of a part."""


@dataclass(frozen=True)
class StreamedConfig(Config):
    rows: int
    """Of output pixels of a tile."""
    columns: int
    windows: int
    """Of a slab each, in shared memory."""
    tap_stages: int
    """Taps of 64 filters, likewise."""
    splits: int = 1
    """Blocks of a cluster that share the channels of one tile."""


def _shared_bytes(tiling: Tiling, windows: int, tap_stages: int) -> int:
    """A panel for each of two warpgroups, windows, taps, and their barriers."""
    assert tiling.width
    panels = 2 * tiling.width * ROW_BYTES
    return panels + windows * (tiling.stage_bytes + 16) + tap_stages * (TAP_BYTES + 16) + 4 * 8


def _stages(tiling: Tiling) -> tuple[int, int] | None:
    """Windows and taps that fit: the taps of a window's time first, then a third window."""
    for windows in range(MOST_WINDOWS, 1, -1):
        for tap_stages in range(MOST_TAP_STAGES, LEAST_TAP_STAGES - 1, -1):
            if _shared_bytes(tiling, windows, tap_stages) <= MOST_SHARED and (
                windows == 2 or tap_stages >= min(8, tiling.job.taps)
            ):
                return windows, tap_stages
    return None


def _slabs(channels: int) -> int:
    return ceil_div(channels, SLAB)


def _splits(tiling: Tiling) -> Iterator[int]:
    """One, and those that leave a block fewer slabs, where all clusters run at once and y lies together."""
    yield 1
    if tiling.job.placement != UNPLACED:
        return
    slabs, tiles = _slabs(tiling.job.windows.channels), tiling.tiles * tiling.filter_tiles
    for splits in range(2, MOST_SPLITS + 1):
        fewer = ceil_div(slabs, splits) < ceil_div(slabs, splits - 1)
        # Parts are added 16 pixels at a time.
        if fewer and tiles <= CLUSTERS[splits] and tiling.width and tiling.width % 16 == 0:
            yield splits


def _cost(tiling: Tiling, splits: int) -> float:
    """Cycles, as far as tensor cores, L2 and the ends of tiles decide."""
    assert tiling.width
    job = tiling.job
    tap = COLUMN_CYCLES * tiling.width
    window = max(job.taps * tap, (tiling.window_bytes + job.taps * TAP_BYTES) / COPY_RATE)
    pixel_bytes = tiling.rows * tiling.window[1] * ROW_BYTES
    shortcut = max(tap, (pixel_bytes + TAP_BYTES) / COPY_RATE)
    tile = ceil_div(_slabs(job.windows.channels), splits) * window + TURN_CYCLES
    tile += ceil_div(_slabs(job.shortcut_channels), splits) * shortcut
    if job.ends.companion:
        tile += RESIDUAL_CYCLES + RESIDUAL_CYCLES_BOX * tiling.boxes
    tiles = tiling.tiles * tiling.filter_tiles
    if splits == 1:
        return START_CYCLES + ceil_div(tiles, SMS) * tile + END_CYCLES_COLUMN * tiling.width
    meeting = MEETING_CYCLES + (MEETING_CYCLES_COLUMN + MEETING_CYCLES_PART * splits) * tiling.width
    return ceil_div(tiles, CLUSTERS[splits]) * (START_CYCLES + tile + meeting)


def _shortcut_maps(tiling: Tiling, shortcut: Windows) -> tuple[TiledMap, TiledMap]:
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
        (SLAB, tiling.window[1], tiling.rows, 1),
        strides=(step * pixel, step * row * pixel, height * row * pixel),
    )
    return pixels, shortcut.weight_map(Buffer("shortcut_weight"), tiling.job.filters, FILTERS)


@dataclass(frozen=True)
class StreamedWindow(WindowRung):
    @property
    def takes_shortcut(self) -> bool:
        return True

    def job_limits(self, job: Job) -> str | None:
        sentence = super().job_limits(job)
        if sentence is not None:
            return sentence
        both = {"channels": job.windows.channels, "shortcut channels": job.shortcut_channels}
        for what, channels in both.items():
            if channels % 8:
                return f"{self.name} takes multiples of 8 {what}, not {channels}"
        pixels = job.windows.pixels
        if pixels * (job.filters // FILTERS) >= 2**31 - 2 * SMS:
            return f"{self.name} counts tiles in 32 bits; {pixels} output pixels are too many"
        if not self.job_configs(job):
            return (
                f"{self.name} has two windows in shared memory, of {job.reach[0] + 1}x{job.reach[1] + 1} pixels or "
                f"more; there are {MOST_SHARED // 1024} KiB"
            )
        return None

    def job_configs(self, job: Job) -> tuple[Config, ...]:
        """The cheapest of every width of the product and number of splits, with one box and with several."""
        found: dict[tuple[int, int, bool], tuple[float, StreamedConfig]] = {}
        for tiling in tilings_of(job):
            stages = _stages(tiling)
            if stages is None or tiling.width is None:
                continue
            for splits in _splits(tiling):
                cost = _cost(tiling, splits)
                key = tiling.width, splits, tiling.boxes == 1
                if key not in found or cost < found[key][0]:
                    found[key] = cost, StreamedConfig(tiling.rows, tiling.columns, *stages, splits)
        return tuple(config for _, config in sorted(found.values(), key=lambda pair: pair[0])[:MOST_CONFIGS])

    def job_clocks(self, job: Job, config: Config) -> float:
        assert isinstance(config, StreamedConfig)
        return _cost(Tiling(job, config.rows, config.columns), config.splits)

    def job_recipe(self, job: Job, config: Config) -> Recipe:
        assert isinstance(config, StreamedConfig)
        tiling = Tiling(job, config.rows, config.columns)
        constants: dict[str, Constant] = {
            **tiling.constants,
            "WINDOWS": config.windows,
            "TAP_STAGES": config.tap_stages,
            "SPLITS": config.splits,
            "SHORTCUT": job.shortcut is not None,
        }
        maps = tiling.window_map, tiling.weight_map
        tiles = tiling.tiles * tiling.filter_tiles
        blocks = tiles if config.splits > 1 else min(tiles, SMS)
        call = KernelCall(
            Program.of("conv2d/hopper_streamed_window.cu", "conv2d_hopper_streamed_window", constants),
            (blocks * config.splits, 1, 1),
            (THREADS, 1, 1),
            (
                *maps,
                *(_shortcut_maps(tiling, job.shortcut) if job.shortcut else maps),
                *tiling.panel_maps,
                Buffer("bias", optional=True),
                Buffer("y"),
                tiling.shape,
                Settled(),
                Relayed(),
            ),
            shared_bytes=_shared_bytes(tiling, config.windows, config.tap_stages),
            cluster=(config.splits, 1, 1),
            overlap=True,
        )
        return Recipe((call,))


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    StreamedWindow(
        "streamed_window",
        "windows for any number of channels, 64 at a time, with weights that follow tap by tap; where tiles are few, "
        "the blocks of a cluster share their channels",
        below="window",
        # 256to256_14_k3 at batch 32, against overlapped_store: 98 tiles of 36 slabs that L2 feeds in 630 cycles each
        # are 22,700 cycles; 128 tiles of 4 windows and 9 taps of 448 cycles are 16,100.
        predicted_gain=1.4,
    ),
)
