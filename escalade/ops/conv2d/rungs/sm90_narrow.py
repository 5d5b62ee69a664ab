"""Stride-1 convolutions with few filters on Hopper: N of a product covers the filters of a whole row of taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe, ReleaseDependents, WeightsReady
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, rounded
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.wgmma_conv import ROW_BYTES, Windows
from escalade.ops.conv2d.rungs.window_tiling import MOST_IN_BOX, WIDTHS
from escalade.ops.shared import activation

MOST_FILTERS = 56
"""Largest number of filters; the rungs with filters as M have tiles of 64."""
BLOCK = 64
"""M of a wgmma."""
STEP_BYTES = 32
"""K of a wgmma in bytes."""
STORE_BYTES = 16
STAGED = 16
"""Filters reduced at a time, if stores are wide."""
EIGHT = 8
"""Filters per tap and per part are padded to this."""
MOST_CONSUMERS, LEAST_CONSUMERS = 4, 2
CONSUMER_THREADS = 128 + 32
"""A consumer warpgroup, and the producer warp that copies for it."""
OTHER_REGISTERS = 56
"""Registers per thread besides the accumulators, as compiled."""
MOST_BLOCKS = 4
"""Largest number of 64-row blocks per tile."""
MOST_STAGES = 6
MOST_CONFIGS = 12

# Cycles, fitted by hand to within 10% of an H200's times for most convolutions of DenseNet-121 at batch 32, with 32
# filters, and for others with 21 and 48.
SHARED_RATE = 128.0
"""Bytes of shared memory traffic per cycle, of tensor cores, copies and threads."""
MEASURED = 1.2
"""Measured / modeled cycles, fitted on 32to32_149_k3."""
START_CYCLES = 1000.0
"""Cycles until the first copies are in flight, plus those from the last result to the end of the launch."""
ROUND_CYCLES = 200.0
"""Cycles in which all warpgroups wait between two tiles."""
STORE_CYCLES = 20.0
"""Cycles for a warp to reduce, finish and store one vector per lane."""
END_CYCLES = 700.0
"""Cycles in which a warpgroup reduces and stores the parts of a tile."""
UNPREPARED = 1.15
"""Factor where the next tile's windows do not fit next to the current ones."""
POWER = 1.1
"""Factor on tensor-core time, due to the power limit."""


@dataclass(frozen=True)
class NarrowConfig(Config):
    rows: int
    """Output rows per tile."""
    columns: int
    consumers: int
    """Consumer warpgroups, each with tiles of its own."""
    stages: int
    """Window stages per consumer, of one k-tile each."""
    parts: int = 1
    """CTAs that share the filters of a tile."""


@dataclass(frozen=True)
class _Tiling:
    """Sizes derived from a problem and a config; the kernel computes the same."""

    problem: Conv2dProblem
    rows: int
    columns: int
    parts: int = 1

    @property
    def padded(self) -> int:
        """Filters per CTA: the columns of one tap."""
        return ceil_div(ceil_div(self.problem.filters, self.parts), EIGHT) * EIGHT

    @property
    def width(self) -> int:
        """N of the product; 0 if a row of taps has too many columns."""
        columns = self.problem.filter_width * self.padded
        return next((width for width in WIDTHS if width >= columns), 0)

    @property
    def window(self) -> tuple[int, int]:
        return self.problem.window(self.rows, self.columns)

    @property
    def window_bytes(self) -> int:
        return self.window[0] * self.window[1] * ROW_BYTES

    @property
    def blocks(self) -> int:
        """64-row blocks of the product."""
        return ceil_div(self.rows * self.window[1], BLOCK)

    @property
    def tiles(self) -> int:
        p = self.problem
        return p.batch * ceil_div(p.output_height, self.rows) * ceil_div(p.output_width, self.columns)

    @property
    def k_tiles(self) -> int:
        return ceil_div(self.problem.channels * self.problem.element_bytes, ROW_BYTES)

    @property
    def stage_bytes(self) -> int:
        read = (self.blocks * BLOCK + self.problem.reach[0] * self.window[1]) * ROW_BYTES
        return ceil_div(max(read, self.window_bytes), 1024) * 1024

    @property
    def weight_bytes(self) -> int:
        return self.k_tiles * self.problem.filter_height * self.width * ROW_BYTES

    @property
    def staged_bytes(self) -> int:
        """Bytes of the parts of 16 filters, or of all, for all pixels, padded to avoid bank conflicts."""
        short = _vector(self.problem) * self.problem.element_bytes < STORE_BYTES // 2
        filters = self.padded if short or self.padded % STAGED else STAGED
        pitch = self.problem.filter_width * filters
        pitch += 0 if pitch % 16 else 8
        return ceil_div(self.blocks * BLOCK * pitch * 4, 1024) * 1024

    def shared_bytes(self, consumers: int, stages: int) -> int:
        barriers = 8 * self.k_tiles * self.problem.filter_height + 16 * consumers * stages
        return self.weight_bytes + consumers * (stages * self.stage_bytes + self.staged_bytes) + barriers

    def stages(self, consumers: int, card: Card) -> int:
        """Return the stages per consumer that fit; 0 if shared memory or registers do not hold a tile."""
        warpgroups = ceil_div(consumers * CONSUMER_THREADS, 128)
        registers = card.registers // (warpgroups * 128) // 8 * 8
        if self.blocks * self.width // 2 + OTHER_REGISTERS > registers:
            return 0
        fitting = (n for n in range(MOST_STAGES, 1, -1) if self.shared_bytes(consumers, n) <= HOPPER_SHARED)
        return next(fitting, 0)

    def clocks(self, consumers: int, stages: int, card: Card) -> float:
        """Estimate the clocks: tensor cores, shared memory and L2 of the SM, or a single warpgroup's latency if tiles
        are few."""
        p, width, multiprocessors = self.problem, self.width, card.multiprocessors // self.parts
        steps = p.filter_height * ceil_div(p.channels * p.element_bytes, STEP_BYTES)
        products = self.blocks * steps * width / 2 * POWER
        operands = self.blocks * steps * (BLOCK + width) * STEP_BYTES
        parts = 2 * self.blocks * BLOCK * p.filter_width * self.padded * 4
        windows = self.k_tiles * self.window_bytes
        rate = card.rates.copies.tma_window
        stores = self.rows * self.columns * ceil_div(self.padded, _vector(p)) / 32 * STORE_CYCLES
        busy = max(products, (operands + parts + windows) / SHARED_RATE + stores, windows / rate)
        rounds = ceil_div(self.tiles, multiprocessors * consumers)
        if rounds > 1 and stages <= self.k_tiles:
            busy *= UNPREPARED
        together = ceil_div(self.tiles, multiprocessors) * busy + rounds * ROUND_CYCLES
        alone = rounds * (products + END_CYCLES)
        return START_CYCLES + (windows + self.weight_bytes) / rate + MEASURED * max(together, alone)


def _vector(p: Conv2dProblem) -> int:
    """Return the results per vector store."""
    most = STORE_BYTES // p.element_bytes
    return next(n for n in (8, 4, 2, 1) if n <= most and p.filters % n == 0 and p.y_pitch % n == 0)


def _tilings(p: Conv2dProblem, parts: int) -> Iterator[_Tiling]:
    """Yield tilings with equal columns, and with rows that fill each number of 64-row blocks."""
    for columns in sorted({ceil_div(p.output_width, pieces) for pieces in range(1, p.output_width + 1)}):
        for blocks in range(1, MOST_BLOCKS + 1):
            most = blocks * BLOCK // _Tiling(p, 1, columns, parts).window[1]
            if most:
                rows = ceil_div(p.output_height, ceil_div(p.output_height, most))
                tiling = _Tiling(p, rows, columns, parts)
                if tiling.width and max(tiling.window) <= MOST_IN_BOX:
                    yield tiling


@lru_cache(4096)
def _best_first(p: Conv2dProblem, card: Card) -> tuple[NarrowConfig, ...]:
    """Return the cheapest config per number of consumers and 64-row blocks, with as few parts of the filters as fit."""
    found: dict[tuple[int, int], tuple[float, NarrowConfig]] = {}
    for parts in range(1, ceil_div(p.filters, EIGHT) + 1):
        for tiling in dict.fromkeys(_tilings(p, parts)):
            for consumers in range(LEAST_CONSUMERS, MOST_CONSUMERS + 1):
                stages = tiling.stages(consumers, card)
                if not stages:
                    break
                clocks, key = tiling.clocks(consumers, stages, card), (consumers, tiling.blocks)
                if key not in found or clocks < found[key][0]:
                    found[key] = (
                        clocks,
                        NarrowConfig(tiling.rows, tiling.columns, consumers, stages, parts),
                    )
        if found:
            break
    return tuple(config for _, config in sorted(found.values(), key=lambda pair: pair[0])[:MOST_CONFIGS])


@dataclass(frozen=True)
class Narrow(Conv2dRung[NarrowConfig]):
    dtypes: tuple[str, ...] = ("fp16", "bf16", "tf32")
    layouts: tuple[str, ...] = ("nhwc",)

    architectures = WITH_WGMMA
    pitched_buffers = ("x", "y")
    supports_pitched_residual = True
    truncates = True

    def limits(self, problem: Conv2dProblem) -> str | None:
        p, name = problem, self.name
        if p.filter_width == 1:
            return f"{name} needs a filter wider than 1; use resident for {p.name}"
        if p.stride != (1, 1):
            return f"{name} takes stride 1, not {p.stride}; overlapped_store takes any up to 8"
        if p.filters > MOST_FILTERS:
            return f"{name} takes up to {MOST_FILTERS} filters, not {p.filters}; overlapped_store takes any"
        copied = COPY_BYTES // p.element_bytes
        if p.channels % copied:
            return f"{name} takes multiples of {copied} channels, not {p.channels}; ragged takes any"
        if p.batch < 1 or p.output_pixels >= 2**31 - MOST_CONSUMERS * self.card.multiprocessors:
            return f"{name} counts tiles in 32 bits; {p.output_pixels} output pixels are out of range"
        if not _best_first(p, self.card):
            return (
                f"{name} keeps the weights of {EIGHT} filters and two windows for each of two warpgroups in shared "
                f"memory; {p.name} needs more than {HOPPER_SHARED // 1024} KiB. overlapped_store takes any"
            )
        return None

    def configs(self, problem: Conv2dProblem) -> tuple[NarrowConfig, ...]:
        return _best_first(problem, self.card)

    def clocks(self, problem: Conv2dProblem, config: NarrowConfig) -> float:
        tiling = _Tiling(problem, config.rows, config.columns, config.parts)
        return tiling.clocks(config.consumers, config.stages, self.card)

    def recipe(self, problem: Conv2dProblem, config: NarrowConfig) -> Recipe:
        p, windows = problem, Windows.of(problem)
        tiling = _Tiling(p, config.rows, config.columns, config.parts)
        conversions = [rounded("weight", p.filters * p.taps, p.channels)] if p.dtype == "tf32" else []
        weight = Buffer(conversions[0].name if conversions else "weight")
        call = kernel_call(
            Program.of(
                "conv2d/sm90_narrow.cu",
                constants=activation.constants_of(p),
                problem=p,
                filters_aligned=p.filters % EIGHT == 0,
                tiling=tiling,
                config=config,
                vector=_vector(p),
            ),
            min(tiling.tiles, self.card.multiprocessors // config.parts) * config.parts,
            config.consumers * CONSUMER_THREADS,
            windows.window_map(Buffer("x"), tiling.window[1], tiling.window[0]),
            windows.weight_map(weight, p.filters, tiling.padded),
            Buffer("bias", optional=True),
            Buffer("residual", optional=True),
            Buffer("y"),
            arguments.shape(p),
            WeightsReady((weight.name,)),
            ReleaseDependents(),
            shared_bytes=tiling.shared_bytes(config.consumers, config.stages),
        )
        return Recipe((*(one.step for one in conversions), call), tuple(one.workspace for one in conversions))


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Narrow(
        "narrow",
        "few filters at the full tensor-core rate: the filters of all taps of a row are the columns of one product, "
        "and the epilogue adds up the parts of a pixel; weights stay in shared memory",
        below="ragged",
        # 128to32_56_k3 at batch 32, 7.4 GFLOP, 32 MB. For 64 pixels, 24 steps of 96 columns take the tensor cores 1152
        # cycles and shared memory 960, or 1560 with windows and parts; 14 such tiles per SM take 12.5 us, against 50
        # us. With the filters of one tap as columns, shared memory would take 2010 cycles; with filters as rows, half
        # of them empty, the tensor cores 2300.
        predicted_gain=3.5,
    ),
)
