"""Convolutions of few filters with stride 1 on Hopper: a product's columns are the filters of a whole row of taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from escalade.device.architecture import WITH_WGMMA
from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, ReleaseDependents, WeightsReady
from escalade.ops.base.card import HOPPER_SHARED, Card
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.rungs import arguments
from escalade.ops.conv2d.rungs.epilogue import Epilogue
from escalade.ops.conv2d.rungs.preparation import COPY_BYTES, rounded
from escalade.ops.conv2d.rungs.rung import Conv2dRung
from escalade.ops.conv2d.rungs.sm90_rung import truncated_tolerance
from escalade.ops.conv2d.rungs.tma_windows import ROW_BYTES, Windows
from escalade.ops.conv2d.rungs.window_tiling import MOST_IN_BOX, WIDTHS

MOST_FILTERS = 56
"""Filters at most: 64 are the rows of the rungs that multiply filters by pixels."""
BLOCK = 64
"""Rows of a product."""
STEP_BYTES = 32
"""Bytes of channels of a product."""
STORE_BYTES = 16
STAGED = 16
"""Filters whose parts are added up at a time, if stores are long."""
EIGHT = 8
"""Filters of a tap, and of a part, are a multiple."""
MOST_CONSUMERS, LEAST_CONSUMERS = 4, 2
CONSUMER_THREADS = 128 + 32
"""A warpgroup that multiplies, and the warp that copies for it."""
OTHER_REGISTERS = 56
"""Registers of a thread besides its sums, by what the compiler takes."""
MOST_BLOCKS = 4
"""Blocks of 64 rows of a tile at most."""
MOST_STAGES = 6
MOST_CONFIGS = 12

# Cycles, set by hand so that estimates come within 10% of what an H200 took for most convolutions of DenseNet-121 at
# batch 32, with 32 filters, and for others with 21 and 48.
SHARED_RATE = 128.0
"""Bytes of shared memory that tensor cores, copies and threads read or write in a cycle, together."""
MEASURED = 1.2
"""What tiles of 32to32_149_k3 took of the cycles that were counted."""
START_CYCLES = 1000.0
"""Cycles until the first copies are under way, and from the last result to the end of the launch."""
ROUND_CYCLES = 200.0
"""Cycles in which all warpgroups wait between one tile and the next."""
STORE_CYCLES = 20.0
"""Cycles of a multiprocessor for what the lanes of a warp add up, finish and store at once."""
END_CYCLES = 700.0
"""Cycles in which a warpgroup adds up and stores the parts of a tile, for others to fill."""
UNPREPARED = 1.15
"""How much longer tiles take where no window of the next one has room beside those of this one."""
POWER = 1.1
"""How much longer tensor cores take than they could, for power."""


@dataclass(frozen=True)
class NarrowConfig(Config):
    rows: int
    """Rows of output pixels of a tile."""
    columns: int
    consumers: int
    """Warpgroups that multiply, each with tiles of its own."""
    stages: int
    """Windows in shared memory, of a slab of channels each, for every one of them."""
    parts: int = 1
    """Blocks that share the filters of a tile."""


@dataclass(frozen=True)
class _Tiling:
    """What follows from a problem and a config; the same sums as in the kernel."""

    problem: Conv2dProblem
    rows: int
    columns: int
    parts: int = 1

    @property
    def padded(self) -> int:
        """Filters of a block: the columns of a tap."""
        return ceil_div(ceil_div(self.problem.filters, self.parts), EIGHT) * EIGHT

    @property
    def width(self) -> int:
        """Columns of a product; 0 if a row of taps has more."""
        columns = self.problem.filter_width * self.padded
        return next((width for width in WIDTHS if width >= columns), 0)

    @property
    def reach(self) -> tuple[int, int]:
        p = self.problem
        return (p.filter_height - 1) * p.dilation[0], (p.filter_width - 1) * p.dilation[1]

    @property
    def window(self) -> tuple[int, int]:
        return self.rows + self.reach[0], self.columns + self.reach[1]

    @property
    def window_bytes(self) -> int:
        return self.window[0] * self.window[1] * ROW_BYTES

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows of the product."""
        return ceil_div(self.rows * self.window[1], BLOCK)

    @property
    def tiles(self) -> int:
        p = self.problem
        return p.batch * ceil_div(p.output_height, self.rows) * ceil_div(p.output_width, self.columns)

    @property
    def slabs(self) -> int:
        return ceil_div(self.problem.channels * self.problem.element_bytes, ROW_BYTES)

    @property
    def stage_bytes(self) -> int:
        read = (self.blocks * BLOCK + self.reach[0] * self.window[1]) * ROW_BYTES
        return ceil_div(max(read, self.window_bytes), 1024) * 1024

    @property
    def weight_bytes(self) -> int:
        return self.slabs * self.problem.filter_height * self.width * ROW_BYTES

    @property
    def staged_bytes(self) -> int:
        """The parts of 16 filters, or of all, of all pixels, with gaps for the banks."""
        short = _vector(self.problem) * self.problem.element_bytes < STORE_BYTES // 2
        filters = self.padded if short or self.padded % STAGED else STAGED
        pitch = self.problem.filter_width * filters
        pitch += 0 if pitch % 16 else 8
        return ceil_div(self.blocks * BLOCK * pitch * 4, 1024) * 1024

    def shared_bytes(self, consumers: int, stages: int) -> int:
        barriers = 8 * self.slabs * self.problem.filter_height + 16 * consumers * stages
        return self.weight_bytes + consumers * (stages * self.stage_bytes + self.staged_bytes) + barriers

    def stages(self, consumers: int, card: Card) -> int:
        """Stages of each consumer, as many as there is room for; 0 if shared memory or registers do not hold a tile."""
        warpgroups = ceil_div(consumers * CONSUMER_THREADS, 128)
        registers = card.registers // (warpgroups * 128) // 8 * 8
        if self.blocks * self.width // 2 + OTHER_REGISTERS > registers:
            return 0
        fitting = (n for n in range(MOST_STAGES, 1, -1) if self.shared_bytes(consumers, n) <= HOPPER_SHARED)
        return next(fitting, 0)

    def clocks(self, consumers: int, stages: int, card: Card) -> float:
        """Tensor cores, shared memory and L2 are the multiprocessor's; where tiles are few, a warpgroup waits for what
        it does itself."""
        p, width, multiprocessors = self.problem, self.width, card.multiprocessors // self.parts
        steps = p.filter_height * ceil_div(p.channels * p.element_bytes, STEP_BYTES)
        products = self.blocks * steps * width / 2 * POWER
        operands = self.blocks * steps * (BLOCK + width) * STEP_BYTES
        parts = 2 * self.blocks * BLOCK * p.filter_width * self.padded * 4
        windows = self.slabs * self.window_bytes
        rate = card.rates.copies.tma_window
        stores = self.rows * self.columns * ceil_div(self.padded, _vector(p)) / 32 * STORE_CYCLES
        busy = max(products, (operands + parts + windows) / SHARED_RATE + stores, windows / rate)
        rounds = ceil_div(self.tiles, multiprocessors * consumers)
        if rounds > 1 and stages <= self.slabs:
            busy *= UNPREPARED
        together = ceil_div(self.tiles, multiprocessors) * busy + rounds * ROUND_CYCLES
        alone = rounds * (products + END_CYCLES)
        return START_CYCLES + (windows + self.weight_bytes) / rate + MEASURED * max(together, alone)


def _vector(p: Conv2dProblem) -> int:
    """Results that a store takes at once."""
    most = STORE_BYTES // p.element_bytes
    return next(n for n in (8, 4, 2, 1) if n <= most and p.filters % n == 0 and p.y_pitch % n == 0)


def _tilings(p: Conv2dProblem, parts: int) -> Iterator[_Tiling]:
    """Images cut into equal columns, and into as many rows as fill so many blocks of the product."""
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
    """The cheapest of every number of consumers and blocks, with as few parts of the filters as have room."""
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

    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_WGMMA

    @property
    def takes_apart(self) -> tuple[str, ...]:
        return ("x", "y")

    def limits(self, problem: Conv2dProblem) -> str | None:
        p, name = problem, self.name
        if sentence := self.only_nhwc(p):
            return sentence
        if p.dtype not in self.dtypes:
            return f"{name} takes {', '.join(self.dtypes)}, not {p.dtype}"
        if p.filter_width == 1:
            return f"{name} makes columns of several taps of a row, and {p.name} has one; resident takes it"
        if p.stride != (1, 1):
            return f"{name} takes stride 1, not {p.stride}; overlapped_store takes any up to 8"
        if p.filters > MOST_FILTERS:
            return f"{name} takes up to {MOST_FILTERS} filters, not {p.filters}; overlapped_store takes any"
        copied = COPY_BYTES // p.element_bytes
        if p.channels % copied:
            return f"{name} takes multiples of {copied} channels, not {p.channels}; ragged takes any"
        if p.batch < 1 or p.output_pixels >= 2**31 - MOST_CONSUMERS * self.card.multiprocessors:
            return f"{name} counts tiles in 32 bits, from one on; {p.output_pixels} output pixels are beyond"
        if not _best_first(p, self.card):
            return (
                f"{name} keeps the weights of {EIGHT} filters in shared memory, and two windows for each of two "
                f"warpgroups; those of {p.name} are more than {HOPPER_SHARED // 1024} KiB. overlapped_store takes any"
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
        constants: dict[str, Constant] = {
            **Epilogue.of(p).constants(p.dtype),
            "Element": element(p.dtype),
            "CHANNELS": p.channels,
            "FILTERS": p.filters,
            "FILTERS_ALIGNED": p.filters % EIGHT == 0,
            "FILTERS_EVEN": p.filters % 2 == 0,
            "FILTER_HEIGHT": p.filter_height,
            "FILTER_WIDTH": p.filter_width,
            "DILATION_H": p.dilation[0],
            "DILATION_W": p.dilation[1],
            "WGMMA_N": tiling.width,
            "PADDED": tiling.padded,
            "TILE_ROWS": config.rows,
            "TILE_COLUMNS": config.columns,
            "CONSUMERS": config.consumers,
            "STAGES": config.stages,
            "VECTOR": _vector(p),
            "Y_STEP": p.y_pitch or p.filters,
        }
        call = KernelCall(
            Program.of("conv2d/sm90_narrow.cu", "conv2d_sm90_narrow", constants),
            (min(tiling.tiles, self.card.multiprocessors // config.parts) * config.parts, 1, 1),
            (config.consumers * CONSUMER_THREADS, 1, 1),
            (
                windows.window_map(Buffer("x"), tiling.window[1], tiling.window[0]),
                windows.weight_map(weight, p.filters, tiling.padded),
                Buffer("bias", optional=True),
                Buffer("residual", optional=True),
                Buffer("y"),
                arguments.shape(p),
                WeightsReady((weight.name,)),
                ReleaseDependents(),
            ),
            shared_bytes=tiling.shared_bytes(config.consumers, config.stages),
            overlap=True,
        )
        return Recipe((*(one.step for one in conversions), call), tuple(one.workspace for one in conversions))

    def tolerance(self, problem: Conv2dProblem, peer_error: float) -> float:
        return truncated_tolerance(problem, super().tolerance(problem, peer_error))


RUNGS: tuple[Rung[Conv2dProblem], ...] = (
    Narrow(
        "narrow",
        "few filters are multiplied at the tensor cores' rate: those of all taps of a row are the columns of one "
        "product, and the parts of a pixel are added up on their way out; weights stay in shared memory",
        below="ragged",
        # 128to32_56_k3 at batch 32, 7.4 GFLOP, 32 MB. Of 64 pixels 24 steps of 96 columns take the tensor cores 1152
        # cycles and shared memory 960, with windows and parts 1560; 14 such tiles a multiprocessor are 12.5 us, against
        # 50 us. Columns of one tap's filters alone would take shared memory 2010 cycles, filters as rows, half of them
        # empty, the tensor cores 2300.
        predicted_gain=3.5,
    ),
)
