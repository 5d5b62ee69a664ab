"""Convolutions with stride 1 on Hopper whose windows are copied once: 64 channels at a time, weights tap by tap."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe, TiledMap
from escalade.ops.conv2d import arguments
from escalade.ops.conv2d.hopper_windows import Windows
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rung import Conv2dRung
from escalade.ops.conv2d.window_tiling import FILTERS, ROW_BYTES, Tiling, tilings_of
from escalade.ops.elements import MOST_SHARED, SMS, ceil_div
from escalade.ops.ladder import Config, Rung

SLAB = 64
"""Channels of a window."""
TAP_BYTES = FILTERS * ROW_BYTES
MOST_WINDOWS = 3
MOST_TAP_STAGES = 12
LEAST_TAP_STAGES = 4
MOST_SPLITS = 8
MOST_CONFIGS = 8
THREADS = 384

COPY_RATE = 52.0
"""Bytes that a multiprocessor gets from L2 in a cycle when all ask."""
START_CYCLES = 2500.0
"""Until the first copies arrive, and from the last product to the end of the launch."""
TURN_CYCLES = 300.0
"""From one tile's products to the next one's."""
MEETING_CYCLES = 2500.0
"""For the blocks of a cluster to lay down their parts, add them up and store."""


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
                windows == 2 or tap_stages >= min(8, tiling.problem.taps)
            ):
                return windows, tap_stages
    return None


def _cost(tiling: Tiling, splits: int) -> float:
    """Cycles, as far as tensor cores, L2 and the ends of tiles decide."""
    assert tiling.width
    p = tiling.problem
    products = p.taps * max(2.0 * tiling.width, (FILTERS + tiling.width) * 1.0)
    copies = (tiling.window_bytes + p.taps * TAP_BYTES) / COPY_RATE
    slabs = ceil_div(ceil_div(p.channels, SLAB), splits)
    tiles = tiling.tiles * tiling.filter_tiles
    rounds = ceil_div(tiles, SMS // splits)
    tile = slabs * max(products, copies) + TURN_CYCLES
    return START_CYCLES + rounds * tile + (MEETING_CYCLES if splits > 1 else 6.0 * tiling.width)


@dataclass(frozen=True)
class StreamedWindow(Conv2dRung):
    @property
    def architectures(self) -> tuple[str, ...]:
        return ("sm_90a",)

    def limits(self, problem: Conv2dProblem) -> str | None:
        p = problem
        if p.groups != 1:
            return f"{self.name} takes groups=1, not {p.groups}"
        if p.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {p.layout}"
        if p.dtype not in ("fp16", "bf16"):
            return f"{self.name} takes fp16 and bf16, not {p.dtype}"
        if p.stride != (1, 1):
            return f"{self.name} takes stride 1, not {p.stride}; overlapped_store takes any"
        if p.channels % 8 or p.filters % FILTERS:
            return (
                f"{self.name} takes multiples of 8 channels and of {FILTERS} filters, not {p.channels} and {p.filters}"
            )
        if p.output_pixels >= 2**31 - 2 * SMS:
            return f"{self.name} counts tiles in 32 bits; {p.output_pixels} output pixels are too many"
        if not self.configs(p):
            return (
                f"{self.name} has two windows in shared memory, of "
                f"{p.dilation[0] * (p.filter_height - 1) + 1}x{p.dilation[1] * (p.filter_width - 1) + 1} pixels or more; "
                f"there are {MOST_SHARED // 1024} KiB"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[Config, ...]:
        found: dict[tuple[int | None, int], tuple[float, StreamedConfig]] = {}
        slabs = ceil_div(problem.channels, SLAB)
        for tiling in tilings_of(problem):
            stages = _stages(tiling)
            if stages is None or tiling.width is None:
                continue
            tiles = tiling.tiles * tiling.filter_tiles
            most = min(MOST_SPLITS, slabs, SMS // tiles) if tiling.width % 16 == 0 else 1
            for splits in range(1, max(most, 1) + 1):
                cost = _cost(tiling, splits)
                key = tiling.width, splits
                if key not in found or cost < found[key][0]:
                    found[key] = cost, StreamedConfig(tiling.rows, tiling.columns, *stages, splits)
        return tuple(config for _, config in sorted(found.values(), key=lambda pair: pair[0])[:MOST_CONFIGS])

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        assert isinstance(config, StreamedConfig)
        p = problem
        tiling = Tiling(p, config.rows, config.columns)
        assert tiling.width
        constants: dict[str, Constant] = {
            **tiling.constants,
            "WINDOWS": config.windows,
            "TAP_STAGES": config.tap_stages,
            "SPLITS": config.splits,
        }
        window_rows, window_columns = tiling.window
        windows = TiledMap(
            Buffer("x"), p.dtype, (p.channels, p.width, p.height, p.batch), (SLAB, window_columns, window_rows, 1)
        )
        weights = Windows.of(p).weight_map(Buffer("weight"), p.filters, FILTERS)
        tiles = tiling.tiles * tiling.filter_tiles
        blocks = tiles if config.splits > 1 else min(tiles, SMS)
        call = KernelCall(
            Program.of("conv2d/hopper_streamed_window.cu", "conv2d_hopper_streamed_window", constants),
            (blocks * config.splits, 1, 1),
            (THREADS, 1, 1),
            (
                windows,
                weights,
                tiling.panel_map("residual" if p.residual else "y"),
                tiling.panel_map("y"),
                Buffer("bias", optional=True),
                Buffer("y"),
                tiling.shape,
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
        # 256to256_14_k3 at batch 32, against overlapped_store: 98 tiles of 36 slabs that L2 feeds in 630 cycles each are
        # 22,700 cycles; 128 tiles of 4 windows and 9 taps of 448 cycles are 16,100.
        predicted_gain=1.4,
    ),
)
