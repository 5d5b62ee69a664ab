"""Convolutions of 64 channels with stride 1 on Hopper: the window of a tile is copied once, and all taps read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, ReleaseDependents, WeightsReady
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.job import Job
from escalade.ops.conv2d.rungs.window_tiling import (
    FILTERS,
    ROW_BYTES,
    TAP_BYTES,
    THREADS,
    Tiling,
    WindowRung,
    tilings_of,
)

MOST_STAGES = 4
MOST_CONFIGS = 8
"""Configs that are worth a measurement, at most."""

# Cycles, set by hand so that estimates come within 5% of what an H200 took for 64to64_56_k3 at batches of 1 to 256.
SHARED_RATE = 128.0
"""Bytes that tensor cores read from shared memory in a cycle."""
COLUMN_CYCLES = 0.545
"""Cycles of the tensor cores for one column of a step, 64 filters by 16 channels: 0.5, and what power takes."""
START_CYCLES = 360.0
"""Cycles until a block's first copies are under way."""
TURN_CYCLES = 405.0
"""Cycles from one tile's products to the next one's: 10% of the tensor cores' time with tiles of 4 x 56 pixels."""
END_CYCLES = 470.0
"""Cycles of a tile's end, whatever its size: barriers and the way through the panel."""
END_CYCLES_COLUMN = 5.2
RESIDUAL_CYCLES = 130.0
"""Cycles that the last tile's end takes more with residuals than without."""
RESIDUAL_CYCLES_COLUMN = 3.4
RESIDUAL_CYCLES_BOX = 48.0
LAP_CYCLES = 510.0
"""Every two tiles after the first two, whose residuals cannot come before the panels are free again."""
LAP_CYCLES_BOX = 196.0


@dataclass(frozen=True)
class WindowConfig(Config):
    rows: int
    """Rows of output pixels of a tile."""
    columns: int
    stages: int
    """Windows in shared memory."""


def _weight_bytes(tiling: Tiling) -> int:
    return tiling.job.taps * TAP_BYTES


def _shared_bytes(tiling: Tiling, stages: int) -> int:
    """Weights, a panel for each of two warpgroups, windows, and their barriers."""
    assert tiling.width
    panels = 2 * tiling.width * ROW_BYTES
    barriers = 8 * (tiling.job.windows.taps[0] + 4)
    return _weight_bytes(tiling) + panels + stages * (tiling.stage_bytes + 16) + barriers


def stages_of(tiling: Tiling) -> int:
    """Stages, as many as there is room for; two, so that one is copied while another is read, or none."""
    return next((n for n in range(MOST_STAGES, 1, -1) if _shared_bytes(tiling, n) <= HOPPER_SHARED), 0)


def _blocks(tiling: Tiling, card: Card) -> int:
    """Blocks for every 64 filters: as many as have work at once."""
    return max(1, min(tiling.tiles, card.multiprocessors // tiling.filter_tiles))


def _cost(tiling: Tiling, card: Card) -> float:
    """Cycles of the block with the most tiles, as far as tensor cores, shared memory, L2 and ends decide."""
    assert tiling.width
    step = max(COLUMN_CYCLES * tiling.width, (FILTERS + tiling.width) * 32 / SHARED_RATE)
    products = tiling.job.taps * 4 * step + TURN_CYCLES
    end = END_CYCLES + END_CYCLES_COLUMN * tiling.width
    copies = tiling.window_bytes / card.rates.copies.tma_window
    # The end of one tile lies under the products of the other warpgroup's.
    tile = max(products, copies, (products + end) / 2)
    tiles = ceil_div(tiling.tiles, _blocks(tiling, card))
    residuals = 0.0
    if tiling.job.epilogue.companion:
        residuals = (
            RESIDUAL_CYCLES + RESIDUAL_CYCLES_COLUMN * tiling.width + RESIDUAL_CYCLES_BOX * tiling.boxes
        )
        residuals += (tiles - 1) // 2 * (LAP_CYCLES + LAP_CYCLES_BOX * tiling.boxes)
    first_row = _weight_bytes(tiling) / tiling.job.windows.taps[0] / card.rates.copies.tma_window
    waves = ceil_div(_blocks(tiling, card) * tiling.filter_tiles, card.multiprocessors)
    return waves * (START_CYCLES + copies + first_row + tiles * tile + end + residuals)


def _fitting(job: Job) -> Iterator[Tiling]:
    return (tiling for tiling in tilings_of(job) if stages_of(tiling))


@dataclass(frozen=True)
class Window(WindowRung[WindowConfig]):
    def job_limits(self, job: Job) -> str | None:
        sentence = super().job_limits(job)
        if sentence is not None:
            return sentence
        channels, slab = job.windows.channels, job.windows.slab
        if channels != slab:
            return f"{self.name} takes {slab} channels, not {channels}; streamed_window takes more"
        if next(_fitting(job), None) is None:
            return (
                f"{self.name} keeps all {job.taps} taps of {FILTERS} filters in shared memory, 8 KiB each, and two "
                f"windows of {job.reach[0] + 1}x{job.reach[1] + 1} pixels or more; there are "
                f"{HOPPER_SHARED // 1024} KiB"
            )
        return None

    def job_configs(self, job: Job) -> tuple[WindowConfig, ...]:
        """The cheapest of every width of the product, with one box and with several."""
        found: dict[tuple[int | None, bool], Tiling] = {}
        for tiling in sorted(_fitting(job), key=lambda tiling: _cost(tiling, self.card)):
            found.setdefault((tiling.width, tiling.boxes == 1), tiling)
        cheapest = list(found.values())[:MOST_CONFIGS]
        return tuple(WindowConfig(t.rows, t.columns, stages_of(t)) for t in cheapest)

    def job_clocks(self, job: Job, config: WindowConfig) -> float:
        return _cost(Tiling(job, config.rows, config.columns), self.card)

    def job_recipe(self, job: Job, config: WindowConfig) -> Recipe:
        tiling = Tiling(job, config.rows, config.columns)
        constants: dict[str, Constant] = {**tiling.constants, "STAGES": config.stages}
        call = KernelCall(
            Program.of("conv2d/sm90_window.cu", "conv2d_sm90_window", constants),
            (_blocks(tiling, self.card) * tiling.filter_tiles, 1, 1),
            (THREADS, 1, 1),
            (
                tiling.window_map,
                tiling.weight_map(Buffer("weight")),
                *tiling.panel_maps,
                Buffer("bias", optional=True),
                tiling.shape,
                WeightsReady(),
                ReleaseDependents(),
            ),
            shared_bytes=_shared_bytes(tiling, config.stages),
            overlap=True,
        )
        return Recipe((call,))


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Window(
        "window",
        "the window of a tile of 64 channels is copied once and all taps read it in place, weights stay in shared "
        "memory, and two warpgroups ping-pong over tiles",
        below="producer_consumer",
        # 64to64_56_k3 at batch 256, 59 GFLOP. Below: tiles of 256x64 copy 40 KB a slab, 1050 cycles where its products
        # take 512, so 9 * 1050 + 2000 cycles a tile and 24 tiles a multiprocessor: 157 us at 1.75 GHz. Here 36 steps of
        # 116 cycles are a tile of 4 x 56 pixels, 28 of them a multiprocessor: 67 us, at 88% of the tensor cores and
        # the clock that power leaves about 93.
        predicted_gain=1.7,
    ),
)
