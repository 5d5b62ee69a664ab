"""Stride-1 convolutions on Hopper: windows are copied once per k-tile, weights tap by tap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe, ReleaseDependents, TiledMap, WeightsReady
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.epilogue import SPECIAL_LANES, UNPLACED, activation_cost
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, Conversion, rounded
from escalade.ops.conv2d.rungs.sm90_persistent import PIECE_BYTES
from escalade.ops.conv2d.rungs.wgmma_conv import WgmmaConv, Windows
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
"""Bytes of one tap of 64 filters, and its barriers."""
MOST_SPLITS = 8
MOST_CONFIGS = 12

# Cycles, fitted by hand to within 10% of an H200's times for most tiles of ResNet-18's convolutions at batch 1 to 256.
COLUMN_CYCLES = 2.2
"""Tensor-core cycles per column of a tap, 64 filters by 128 bytes of channels: 2, and the loss to the power limit."""
START_CYCLES = 500.0
"""Cycles until the first copies are in flight."""
PING_PONG_CYCLES = 1000.0
"""Cycles between the products of two tiles."""
END_CYCLES_COLUMN = 13.5
"""Cycles per column of the last tile's epilogue."""
RESIDUAL_CYCLES = 360.0
"""Extra cycles per tile with residuals."""
RESIDUAL_CYCLES_BOX = 47.0
HANDING_CYCLES = 1500.0
"""Cycles until a shared staging tile is ready for the other warpgroup, besides its copies. A guess from the latencies
of a store and a load."""
LONELY_TAP_CYCLES = 2000.0
"""Extra cycles where a cluster splits the sum of a single tap, whose copies nothing hides: 1024to512_14 and
512to1024_14 at batch 1."""
MEETING_CYCLES_COLUMN = 12.0
"""Cycles per column in which a cluster exchanges, reduces and stores parts: 256 bytes per column at 21 per cycle."""


@dataclass(frozen=True)
class StreamedConfig(Config):
    rows: int
    """Output rows per tile."""
    columns: int
    windows: int
    """Window stages in shared memory, of one k-tile each."""
    tap_stages: int
    """Tap stages in shared memory, of 64 filters each."""
    splits: int = 1
    """CTAs of a cluster that share the channels of one tile."""
    images: int = 1
    """Images per tile: several only if they are small."""


def _tiling(conv: WgmmaConv, config: StreamedConfig) -> Tiling:
    return Tiling(conv, config.rows, config.columns, config.images)


def _shared_bytes(tiling: Tiling, windows: int, tap_stages: int, splits: int) -> int:
    """Bytes of a staging tile for each of two warpgroups (or one of twice the size for both), windows, taps and
    barriers. With splits there is one staging tile, and the parts of the groups of 8 pixels that a CTA owns."""
    assert tiling.width
    panels = (2 if splits == 1 else 1) * tiling.width * ROW_BYTES
    parts = ceil_div(tiling.width // 8, splits) * splits * PIECE_BYTES if splits > 1 else 0
    return panels + parts + windows * (tiling.stage_bytes + 16) + tap_stages * _TAP_STAGE_BYTES + 4 * 8


def _stages(tiling: Tiling, splits: int) -> tuple[int, int] | None:
    """Return the stages of windows and taps that fit: enough taps for one window first, then a third window."""
    for windows in range(MOST_WINDOWS, 1, -1):
        room = HOPPER_SHARED - _shared_bytes(tiling, windows, 0, splits)
        tap_stages = min(room // _TAP_STAGE_BYTES, MOST_TAP_STAGES)
        if tap_stages >= (
            LEAST_TAP_STAGES if windows == 2 else max(LEAST_TAP_STAGES, min(8, tiling.conv.taps))
        ):
            return windows, tap_stages
    return None


def _k_tiles(windows: Windows | None) -> int:
    """Return the k-tiles per tap."""
    return ceil_div(windows.channels, windows.k_tile) if windows else 0


def _splits(tiling: Tiling, card: Card) -> Iterator[int]:
    """Yield 1, and splits that leave a CTA fewer k-tiles, if all clusters run in one wave, y is contiguous and results
    have 16 bits."""
    yield 1
    if tiling.conv.placement != UNPLACED or tiling.shared_panel:
        return
    k_tiles, tiles = _k_tiles(tiling.conv.windows), tiling.tiles * tiling.filter_tiles
    for splits in range(2, MOST_SPLITS + 1):
        fewer = ceil_div(k_tiles, splits) < ceil_div(k_tiles, splits - 1)
        if fewer and tiles <= card.max_active_clusters(splits):
            yield splits


def _cost(tiling: Tiling, splits: int, card: Card) -> float:
    """Estimate the cycles from tensor cores, L2 and tile ends."""
    assert tiling.width
    conv = tiling.conv
    tiles = tiling.tiles * tiling.filter_tiles
    copied = tiling.window_bytes + conv.taps * TAP_BYTES
    copy = card.rates.copies.tma_streamed
    tap, rate = COLUMN_CYCLES * tiling.width, copy.together
    if splits > 1:
        rate = card.copy_rate(copy, tiles * splits)
    window = max(conv.taps * tap, copied / rate)
    pixel_bytes = tiling.images * tiling.rows * tiling.window[1] * ROW_BYTES
    shortcut = max(tap, (pixel_bytes + TAP_BYTES) / copy.together)
    tile = ceil_div(_k_tiles(conv.windows), splits) * window
    tile += ceil_div(_k_tiles(conv.shortcut), splits) * shortcut
    if conv.epilogue.aux:
        tile += RESIDUAL_CYCLES + RESIDUAL_CYCLES_BOX * tiling.boxes
    special = activation_cost(conv.epilogue.activation)[1] / SPECIAL_LANES
    tile += special * tiling.width * FILTERS
    end = END_CYCLES_COLUMN * tiling.width
    if tiling.shared_panel:
        copies = 2 * tiling.width * ROW_BYTES / copy.together
        tile = max(tile, HANDING_CYCLES - PING_PONG_CYCLES + (1 + conv.epilogue.aux) * copies)
        end += copies / 2
    if splits == 1:
        return START_CYCLES + ceil_div(tiles, card.multiprocessors) * (tile + PING_PONG_CYCLES) + end
    first = copied * tiles * splits / card.multiprocessors / card.rates.copies.tma_first
    lonely = LONELY_TAP_CYCLES if conv.taps == 1 else 0.0
    return lonely + first + tile + MEETING_CYCLES_COLUMN * tiling.width


def _rounded_weights(conv: WgmmaConv) -> dict[str, Conversion]:
    """Return the conversions to TF32, by the name of the buffer that they replace."""
    if conv.windows.dtype != "tf32":
        return {}
    found = {"weight": rounded("weight", conv.filters * conv.taps, conv.windows.channels)}
    if conv.shortcut:
        found["shortcut_weight"] = rounded("shortcut_weight", conv.filters, conv.shortcut_channels)
    return found


def _shortcut_maps(tiling: Tiling, shortcut: Windows, weight: Buffer) -> tuple[TiledMap, TiledMap]:
    """Return the maps of the strided shortcut pixels, numbered as in a window, and of one k-tile of their weights."""
    step, (height, row), pixel = (
        shortcut.stride[0],
        shortcut.image,
        shortcut.channels * shortcut.element_bytes,
    )
    pixels = TiledMap(
        Buffer("shortcut"),
        shortcut.dtype,
        (shortcut.channels, shortcut.output[1], shortcut.output[0], shortcut.batch),
        (
            shortcut.k_tile,
            tiling.window[1],
            tiling.window[0] if tiling.stacked else tiling.rows,
            tiling.images,
        ),
        strides=(step * pixel, step * row * pixel, height * row * pixel),
    )
    return pixels, shortcut.weight_map(weight, tiling.conv.filters, FILTERS)


@lru_cache(1024)
def _best_first(conv: WgmmaConv, card: Card) -> tuple[StreamedConfig, ...]:
    """Return the cheapest config per width of the product and number of splits, with one box and with several."""
    found: dict[tuple[int, int, bool], tuple[float, StreamedConfig]] = {}
    for tiling in (*tilings_of(conv), *stacks_of(conv)):
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
    dtypes: tuple[str, ...] = ("fp16", "bf16", "tf32")
    supports_shortcut = True
    truncates = True

    def conv_limits(self, conv: WgmmaConv) -> str | None:
        if reason := super().conv_limits(conv):
            return reason
        both = {"channels": conv.windows.channels, "shortcut channels": conv.shortcut_channels}
        copied = COPY_BYTES // conv.windows.element_bytes
        for what, channels in both.items():
            if channels % copied:
                return f"{self.name} takes multiples of {copied} {what}, not {channels}"
        pixels = conv.windows.pixels
        if pixels * (conv.filters // FILTERS) >= 2**31 - 2 * self.card.multiprocessors:
            return f"{self.name} counts tiles in 32 bits, too few for {pixels} output pixels"
        if not self.conv_configs(conv):
            return (
                f"{self.name} keeps two windows of at least {conv.reach[0] + 1}x{conv.reach[1] + 1} pixels in shared "
                f"memory; they do not fit into {HOPPER_SHARED // 1024} KiB"
            )
        return None

    def conv_configs(self, conv: WgmmaConv) -> tuple[StreamedConfig, ...]:
        return _best_first(conv, self.card)

    def conv_clocks(self, conv: WgmmaConv, config: StreamedConfig) -> float:
        return _cost(_tiling(conv, config), config.splits, self.card)

    def conv_recipe(self, conv: WgmmaConv, config: StreamedConfig) -> Recipe:
        tiling = _tiling(conv, config)
        conversions = _rounded_weights(conv)
        weight, shortcut_weight = (
            Buffer(conversions[name].name if name in conversions else name)
            for name in ("weight", "shortcut_weight")
        )
        maps = tiling.window_map, tiling.weight_map(weight)
        tiles = tiling.tiles * tiling.filter_tiles
        blocks = tiles if config.splits > 1 else min(tiles, self.card.multiprocessors)
        call = kernel_call(
            Program.of(
                "conv2d/sm90_streamed_window.cu",
                constants=conv.epilogue.activation_constants,
                tiling=tiling,
                config=config,
            ),
            blocks * config.splits,
            THREADS,
            *maps,
            *(_shortcut_maps(tiling, conv.shortcut, shortcut_weight) if conv.shortcut else maps),
            *tiling.panel_maps,
            Buffer("bias", optional=True),
            Buffer("y"),
            tiling.shape,
            WeightsReady((weight.name,)),
            ReleaseDependents(),
            shared_bytes=_shared_bytes(tiling, config.windows, config.tap_stages, config.splits),
            cluster=(config.splits, 1, 1),
        )
        return Recipe(
            (*(one.step for one in conversions.values()), call),
            tuple(one.workspace for one in conversions.values()),
        )


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    StreamedWindow(
        "streamed_window",
        "windows for any number of channels, 64 at a time (32 in TF32), with weights streamed tap by tap; where tiles "
        "are few, the CTAs of a cluster share their channels",
        below="window",
        # 256to256_14_k3 at batch 32. overlapped_store: 98 tiles of 36 k-tiles, which L2 delivers in 630 cycles each,
        # are 22,700 cycles; here 128 tiles of 4 windows and 9 taps of 448 cycles are 16,100.
        predicted_gain=1.4,
    ),
)
