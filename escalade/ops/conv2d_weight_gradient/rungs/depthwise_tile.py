"""Weight gradients of depthwise convolutions: tiles are copied asynchronously, and threads hold sums of all taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from escalade.device.architecture import ALL_ARCHITECTURES, WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import Argument, Buffer, KernelCall, Recipe, TiledMap
from escalade.device.sources import Constant, Macro
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import MULTIPLIED, VECTOR_BYTES
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs.depthwise import overlapped
from escalade.ops.conv2d.rungs.depthwise_tile import BOX, cuts, even_shares
from escalade.ops.conv2d.rungs.rung import fitting_blocks
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs import parts
from escalade.ops.conv2d_weight_gradient.rungs.rung import WeightGradientRung

WARP = 32
LEAST_THREADS, MOST_THREADS = 64, 512
MOST_CODE = 1800
"""Largest number of unrolled multiply-adds per thread."""
MOST_SUMS = 50
"""Largest number of taps, and the bias: a thread has two sums and two inputs of each in registers."""
BESIDES = 30
"""Registers per thread for addresses and counters."""
MOST_BLOCKS = 8
"""Largest number of CTAs per SM."""
STAGES = (2, 3)
MOST_CONFIGS = 8

# Clocks of an SM.
ISSUE_RATE = 4.0
"""Warp instructions issued per clock."""
HALF_ISSUE = 0.7
"""Warps per scheduler at which it reaches half its issue rate."""
START = 2500.0
"""To the first tile of a CTA, and to add up its sums at the end."""
TMA_START = 600.0
"""More to the first tile if TMA copies it: its descriptor is fetched and its barriers are initialized."""
TURN = 900.0
"""From the end of a tile to the products of the next, hidden by other CTAs."""
CONFLICTS = 1.3
"""Passes per read of shared memory (a guess)."""
SECTOR = 32
"""Copy granularity in bytes."""
COPY = 14
"""Instructions per copy that a thread issues, with its address."""
COPY_BYTES = (16, 8, 4)
BESIDE = 0.2
"""Share of the shorter of memory and SM time that is not hidden."""


@dataclass(frozen=True)
class TileConfig(Config):
    channels: int
    """Channels per CTA."""
    segment: int
    """Output columns per thread."""
    segments: int
    """Segments per row of a tile."""
    rows: int
    """Output rows per tile."""
    stages: int
    """Tiles in shared memory."""
    blocks_per_sm: int = 1
    rounds: int = 1
    """Tiles per CTA."""


@dataclass(frozen=True)
class _Tiling:
    """Sizes derived from a problem and a config; the kernel computes the same."""

    problem: Conv2dWeightGradientProblem
    config: TileConfig
    card: Card
    by_tma: bool

    @property
    def forward(self) -> Conv2dProblem:
        return self.problem.forward

    @property
    def columns(self) -> int:
        return self.config.segment * self.config.segments

    @property
    def groups(self) -> int:
        """Threads with the same channels."""
        return self.config.rows * self.config.segments

    @property
    def sums(self) -> int:
        return self.forward.taps + self.problem.bias

    @cached_property
    def threads(self) -> int:
        return ceil_div(self.config.channels // 2 * self.groups, WARP) * WARP

    @cached_property
    def window(self) -> tuple[int, int]:
        return self.forward.window(self.config.rows, self.columns)

    @cached_property
    def stage_bytes(self) -> int:
        pixel = self.config.channels * self.forward.element_bytes
        window, gradient = self.window[0] * self.window[1] * pixel, self.config.rows * self.columns * pixel
        return ceil_div(window, 128) * 128 + ceil_div(gradient, 128) * 128

    @property
    def shared_bytes(self) -> int:
        """Bytes of the stages, or of the sums of all threads that replace them, and of the barriers."""
        sums = self.groups * self.sums * self.config.channels * 4
        return max(self.config.stages * self.stage_bytes, sums) + 8 * self.config.stages

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Tiles down and across an image."""
        f = self.forward
        return ceil_div(f.output_height, self.config.rows), ceil_div(f.output_width, self.columns)

    @property
    def tiles(self) -> int:
        return self.forward.batch * self.grid[0] * self.grid[1]

    @property
    def channel_blocks(self) -> int:
        return ceil_div(self.forward.channels, self.config.channels)

    @property
    def one_wave(self) -> int:
        """Tiles per CTA if all CTAs run at once."""
        at_once = self.card.multiprocessors * self.config.blocks_per_sm // self.channel_blocks
        return ceil_div(self.tiles, max(1, at_once))

    @property
    def parts(self) -> int:
        return ceil_div(self.tiles, self.config.rounds)

    @property
    def clocks(self) -> float:
        f, c = self.forward, self.config
        ctas = ceil_div(self.channel_blocks * self.parts, self.card.multiprocessors)
        resident, warps = min(ctas, c.blocks_per_sm), self.threads // WARP
        each = resident * warps / ISSUE_RATE
        rate = ISSUE_RATE * each / (each + HALF_ISSUE)
        tiles = ctas * c.rounds
        reads = 1 + f.filter_height * min(f.stride[1], f.filter_width)
        converted = 2 * reads if f.element_bytes == 2 else 0
        taken: float = warps * (c.segment * (reads + converted + 2 * self.sums) + 50)
        if not self.by_tma:
            row = f.channels * f.element_bytes
            each_copy = next(bytes for bytes in COPY_BYTES if row % bytes == 0)
            taken += COPY * self.stage_bytes / each_copy / WARP
        busy = tiles * taken / rate
        read = tiles * warps * c.segment * reads * CONFLICTS
        pixel = c.channels * f.element_bytes
        copied = (
            tiles * self.stage_bytes * ceil_div(pixel, SECTOR) * SECTOR / pixel / self.card.rates.copies.loads
        )
        start = START + TMA_START * self.by_tma
        waits = start * ceil_div(ctas, resident) + c.rounds * TURN / resident
        parallel = sorted((busy, read, copied))
        reduced = parts.reduction_cycles(self.parts, self.problem.part_elements, self.card)
        return waits + parallel[2] + 0.3 * parallel[1] + reduced


def _candidates(problem: Conv2dWeightGradientProblem, card: Card, by_tma: bool) -> Iterator[_Tiling]:
    f = problem.forward
    sums = f.taps + problem.bias
    segments = [segment for segment in cuts(f.output_width) if segment * f.taps * 2 <= MOST_CODE]
    for channels in even_shares(f):
        for segment in segments[-3:] or [1]:
            for across in cuts(ceil_div(f.output_width, segment)):
                for rows in cuts(f.output_height):
                    for stages in STAGES:
                        config = TileConfig(channels, segment, across, rows, stages)
                        tiling = _Tiling(problem, config, card, by_tma)
                        if not LEAST_THREADS <= tiling.threads <= MOST_THREADS and rows * across > 1:
                            continue
                        registers = 2 * sums + 2 * f.taps + BESIDES
                        shared = tiling.shared_bytes
                        blocks = min(fitting_blocks(card, tiling.threads, registers, shared), MOST_BLOCKS)
                        if max(tiling.window) <= BOX and shared <= card.shared_bytes and blocks:
                            resident = _Tiling(problem, config.changed(blocks_per_sm=blocks), card, by_tma)
                            yield _Tiling(
                                problem, resident.config.changed(rounds=resident.one_wave), card, by_tma
                            )


@lru_cache(4096)
def _best_first(problem: Conv2dWeightGradientProblem, card: Card, by_tma: bool) -> tuple[TileConfig, ...]:
    tilings = sorted(_candidates(problem, card, by_tma), key=lambda tiling: tiling.clocks)
    return tuple(tiling.config for tiling in tilings[:MOST_CONFIGS])


@dataclass(frozen=True)
class DepthwiseTile(WeightGradientRung[TileConfig]):
    layouts: tuple[str, ...] = ("nhwc",)
    takes_groups = True
    by_tma: bool = False

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA if self.by_tma else ALL_ARCHITECTURES

    def limits(self, problem: Conv2dWeightGradientProblem) -> str | None:
        f = problem.forward
        unit = VECTOR_BYTES // f.element_bytes if self.by_tma else 2
        if not f.groups == f.channels == f.filters:
            return f"{self.name} takes one filter per channel; direct takes any"
        if f.dilation != (1, 1) or f.taps + problem.bias > MOST_SUMS:
            return (
                f"{self.name} keeps a window of up to {MOST_SUMS - 1} adjacent taps in registers, not "
                f"{f.filter_height}x{f.filter_width} with a dilation of {f.dilation}; depthwise and direct take more"
            )
        if f.channels % unit:
            return f"{self.name} takes multiples of {unit} channels, not {f.channels}; depthwise takes any"
        if not self.configs(problem):
            return f"{self.name} has no tile whose window fits into shared memory; depthwise needs none"
        return None

    def configs(self, problem: Conv2dWeightGradientProblem) -> tuple[TileConfig, ...]:
        return _best_first(problem, self.card, self.by_tma)

    def estimate(self, problem: Conv2dWeightGradientProblem, config: TileConfig) -> float:
        clocks = _Tiling(problem, config, self.card, self.by_tma).clocks
        return overlapped(self.card, clocks, problem.traffic, BESIDE) + self.card.rates.launch_us

    def recipe(self, problem: Conv2dWeightGradientProblem, config: TileConfig) -> Recipe:
        f, tiling = problem.forward, _Tiling(problem, config, self.card, self.by_tma)
        generated: dict[str, Constant] = {}
        operands: tuple[Argument, ...] = (Buffer("x"), Buffer("gradient"))
        if self.by_tma:
            generated["BY_TMA"] = Macro("")
            element = "fp32" if f.dtype == "tf32" else f.dtype
            operands = (
                TiledMap(
                    Buffer("x"), element, (f.channels, f.width, f.height, f.batch),
                    (config.channels, tiling.window[1], tiling.window[0], 1), swizzle=0,
                ),
                TiledMap(
                    Buffer("gradient"), element, (f.channels, f.output_width, f.output_height, f.batch),
                    (config.channels, tiling.columns, config.rows, 1), swizzle=0,
                ),
            )  # fmt: skip
        product = KernelCall(
            Program.of(
                "conv2d_weight_gradient/depthwise_tile.cu",
                constants=generated,
                problem=problem,
                forward=f,
                tiling=tiling,
                config=config,
            ),
            (tiling.channel_blocks * tiling.parts, 1, 1),
            (tiling.threads, 1, 1),
            (*operands, Buffer(parts.PARTS), tiling.tiles),
            shared_bytes=tiling.shared_bytes,
            overlap=True,
        )
        return parts.recipe(problem, product, tiling.parts)


# Predictions for 144to144_56_k3s1g144 at batch 64 in fp16, 0.5 GFLOP and 116 MB.
DEPTHWISE_STAGED = DepthwiseTile(
    "depthwise_staged",
    "asynchronous copies keep tiles of x and the gradient in flight, and a thread walks along a row of two channels "
    "with the inputs of all taps in registers",
    below="depthwise",
    # `depthwise` took 100 us, three times the memory's 28: loads wait in registers, and 16 warps per SM have too few of
    # them in flight; keeping inputs in a ring of registers (half the loads) took 110. Here 55 KB per CTA are in flight;
    # a pair of channels takes 30 instructions per pixel and its share of the copies 5 more, 17 us, which hide: 38 us.
    predicted_gain=2.6,
    dtypes=MULTIPLIED,
)
DEPTHWISE_TILE = DepthwiseTile(
    "depthwise_tile",
    "TMA copies the tiles, with zeros beyond borders: one thread, and no addresses",
    below="depthwise_staged",
    # The instructions of copies are gone, but memory was the limit.
    predicted_gain=1.08,
    dtypes=MULTIPLIED,
    by_tma=True,
)
