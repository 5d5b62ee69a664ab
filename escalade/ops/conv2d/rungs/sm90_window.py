"""64-channel, stride-1 convolutions on Hopper: the window of a tile is copied once and read by all taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe, ReleaseDependents, WeightsReady
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.wgmma_conv import WgmmaConv
from escalade.ops.conv2d.rungs.window_tiling import (
    FILTERS,
    NARROW_ROW_BYTES,
    THREADS,
    Tiling,
    WindowRung,
    tilings_of,
)

MOST_STAGES = 4
MOST_CONFIGS = 8
"""Largest number of configs offered to the tuner."""

# Cycles, fitted by hand to within 5% of an H200's times for 64to64_56_k3 at batch 1 to 256.
SHARED_RATE = 128.0
"""Bytes per cycle that tensor cores read from shared memory."""
COLUMN_CYCLES = 0.545
"""Tensor-core cycles per column of a step, 64 filters by 16 channels: 0.5, and the loss to the power limit."""
START_CYCLES = 360.0
"""Cycles until a CTA's first copies are in flight."""
PING_PONG_CYCLES = 405.0
"""Cycles between the products of two tiles: 10% of the tensor cores' time with tiles of 4 x 56 pixels."""
END_CYCLES = 470.0
"""Fixed cycles of a tile's epilogue: barriers and the staging tile."""
END_CYCLES_COLUMN = 5.2
RESIDUAL_CYCLES = 130.0
"""Extra cycles of the last tile's epilogue with residuals."""
RESIDUAL_CYCLES_COLUMN = 3.4
RESIDUAL_CYCLES_BOX = 48.0
LAP_CYCLES = 510.0
"""Cycles per two tiles after the first two, whose residuals cannot be loaded before the staging tiles are free."""
LAP_CYCLES_BOX = 196.0
EIGHT_BIT_RESIDUAL = 1.2
"""Factor on the time of 1x1 filters with residuals and 8-bit operands, which store bytes from registers and read every
window for each 64 filters: mean of 64to256_56 and 128to512_28 in INT8."""


@dataclass(frozen=True)
class WindowConfig(Config):
    rows: int
    """Output rows per tile."""
    columns: int
    stages: int
    """Window stages in shared memory."""


def _weight_bytes(tiling: Tiling) -> int:
    return tiling.conv.taps * FILTERS * tiling.row_bytes


def _shared_bytes(tiling: Tiling, stages: int) -> int:
    """Bytes of weights, one staging tile for each of two warpgroups, windows, and barriers."""
    assert tiling.width
    panels = 2 * tiling.width * tiling.staged_row_bytes
    barriers = 8 * (tiling.conv.windows.taps[0] + 4)
    return _weight_bytes(tiling) + panels + stages * (tiling.stage_bytes + 16) + barriers


def stages_of(tiling: Tiling) -> int:
    """Return the stages that fit, at least two, so that one is copied while another is read; 0 if they do not."""
    return next((n for n in range(MOST_STAGES, 1, -1) if _shared_bytes(tiling, n) <= HOPPER_SHARED), 0)


def _blocks(tiling: Tiling, card: Card) -> int:
    """Return the CTAs per 64 filters in one wave."""
    return max(1, min(tiling.tiles, card.multiprocessors // tiling.filter_tiles))


def _cost(tiling: Tiling, card: Card) -> float:
    """Estimate the cycles of the CTA with the most tiles from tensor cores, shared memory, L2 and epilogues."""
    assert tiling.width
    step = max(COLUMN_CYCLES * tiling.width, (FILTERS + tiling.width) * 32 / SHARED_RATE)
    products = tiling.conv.taps * (tiling.row_bytes // 32) * step + PING_PONG_CYCLES
    end = END_CYCLES + END_CYCLES_COLUMN * tiling.width
    copies = tiling.window_bytes / card.rates.copies.tma_window
    # One warpgroup's epilogue is hidden behind the products of the other.
    tile = max(products, copies, (products + end) / 2)
    tiles = ceil_div(tiling.tiles, _blocks(tiling, card))
    residuals = 0.0
    if tiling.conv.epilogue.aux:
        residuals = (
            RESIDUAL_CYCLES + RESIDUAL_CYCLES_COLUMN * tiling.width + RESIDUAL_CYCLES_BOX * tiling.boxes
        )
        residuals += (tiles - 1) // 2 * (LAP_CYCLES + LAP_CYCLES_BOX * tiling.boxes)
    first_row = _weight_bytes(tiling) / tiling.conv.windows.taps[0] / card.rates.copies.tma_window
    waves = ceil_div(_blocks(tiling, card) * tiling.filter_tiles, card.multiprocessors)
    return waves * (START_CYCLES + copies + first_row + tiles * tile + end + residuals)


def _fitting(conv: WgmmaConv) -> Iterator[Tiling]:
    return (tiling for tiling in tilings_of(conv) if stages_of(tiling))


@dataclass(frozen=True)
class Window(WindowRung[WindowConfig]):
    dtypes: tuple[str, ...] = ("fp16", "bf16", "int8")

    def conv_limits(self, conv: WgmmaConv) -> str | None:
        if reason := super().conv_limits(conv):
            return reason
        channels, k_tile = conv.windows.channels, conv.windows.k_tile
        is_narrow = conv.windows.element_bytes * channels == NARROW_ROW_BYTES
        if channels != k_tile and not (conv.windows.dtype == "int8" and is_narrow):
            return f"{self.name} takes {k_tile} channels, not {channels}; streamed_window takes more"
        if conv.epilogue.output != conv.windows.dtype:
            return f"{self.name} stores {conv.windows.dtype}, not {conv.epilogue.output}"
        if next(_fitting(conv), None) is None:
            return (
                f"{self.name} keeps all {conv.taps} taps of {FILTERS} filters in shared memory, 8 KiB each, and two "
                f"windows of at least {conv.reach[0] + 1}x{conv.reach[1] + 1} pixels; they do not fit into "
                f"{HOPPER_SHARED // 1024} KiB"
            )
        return None

    def conv_configs(self, conv: WgmmaConv) -> tuple[WindowConfig, ...]:
        """Return the cheapest config per width of the product, with one box and with several."""
        found: dict[tuple[int | None, bool], Tiling] = {}
        for tiling in sorted(_fitting(conv), key=lambda tiling: _cost(tiling, self.card)):
            found.setdefault((tiling.width, tiling.boxes == 1), tiling)
        cheapest = list(found.values())[:MOST_CONFIGS]
        return tuple(WindowConfig(t.rows, t.columns, stages_of(t)) for t in cheapest)

    def conv_clocks(self, conv: WgmmaConv, config: WindowConfig) -> float:
        return _cost(Tiling(conv, config.rows, config.columns), self.card)

    def estimate(self, problem: Conv2dProblem, config: WindowConfig) -> float:
        slower = problem.is_quantized and problem.residual and problem.taps == 1
        return super().estimate(problem, config) * (EIGHT_BIT_RESIDUAL if slower else 1.0)

    def conv_recipe(self, conv: WgmmaConv, config: WindowConfig) -> Recipe:
        tiling = Tiling(conv, config.rows, config.columns)
        generated = conv.epilogue.activation_constants
        return launch(
            Program.of("conv2d/sm90_window.cu", constants=generated, tiling=tiling, config=config),
            _blocks(tiling, self.card) * tiling.filter_tiles,
            THREADS,
            tiling.window_map,
            tiling.weight_map(Buffer("weight")),
            *tiling.panel_maps,
            Buffer("bias", optional=True),
            tiling.shape,
            WeightsReady(),
            ReleaseDependents(),
            Buffer("scale", optional=True),
            Buffer("scales", optional=True),
            shared_bytes=_shared_bytes(tiling, config.stages),
        )


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Window(
        "window",
        "the 64-channel window of a tile is copied once and read in place by all taps, weights stay in shared memory, "
        "and two warpgroups ping-pong over tiles",
        below="producer_consumer",
        # 64to64_56_k3 at batch 256, 59 GFLOP. The rung below: tiles of 256x64 copy 40 KB per k-tile in 1050 cycles, for
        # 512 cycles of products, so 9 * 1050 + 2000 cycles per tile and 24 tiles per SM: 157 us at 1.75 GHz. Here a
        # tile of 4 x 56 pixels is 36 steps of 116 cycles, 28 tiles per SM: 67 us, or about 93 at 88% of the tensor
        # cores and the clock under the power limit.
        predicted_gain=1.7,
    ),
)
