"""Rungs of few_channels on CUDA cores, with runs of pixels in registers, and launches that all rungs share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from escalade.device.program import Program
from escalade.device.recipe import (
    Argument,
    Buffer,
    ConstantCopy,
    Int64,
    Ints,
    KernelCall,
    Recipe,
    WeightsReady,
    Workspace,
)
from escalade.ops.base.card import MIN_SHARED, Card
from escalade.ops.base.dtypes import ELEMENT_BYTES, full_vector, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.launch import kernel_call, launch
from escalade.ops.base.rung import Config, Rung
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.shared import activation

# --- arguments and launches that rungs share


MOST_FILTER_WIDTH = 16
"""Widest filter: a thread keeps that much of a row besides its run in registers."""
_THREADS = 256


def shape(problem: FewChannelsProblem) -> Ints:
    return Ints.of("few_channels/shape.cuh", "FewChannelsShape", problem=problem)


def tensors(y: Buffer) -> tuple[Argument, ...]:
    """Leading arguments of every convolution kernel."""
    return (Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), y)


def needs_finish(problem: FewChannelsProblem) -> bool:
    """Return True if a separate launch must apply activation or pooling, where the convolution's kernel does
    neither."""
    return problem.relu or bool(problem.activation) or problem.pool > 1


def unfinished(problem: FewChannelsProblem, name: str = "unfinished") -> Workspace:
    """Return the workspace of the convolution's result before activation and pooling."""
    return Workspace(name, max(1, problem.conv_elements * ELEMENT_BYTES[problem.storage]))


def finish(
    problem: FewChannelsProblem, source: str = "unfinished", offset: int = 0, lane: int = 0
) -> KernelCall:
    """Return the launch of activation and pooling, from the workspace to y at byte `offset`."""
    p = problem
    vector = widest_vector(p.storage, p.filters) if p.layout == "nhwc" else 1
    return kernel_call(
        Program.of("few_channels/pool.cu", constants=activation.constants_of(p), problem=p, vector=vector),
        blocks(p.output_elements, vector * _THREADS),
        _THREADS,
        Buffer(source), Buffer("y", offset), p.conv_height, p.conv_width, p.filters, p.output_height,
        p.output_width, Int64(p.output_elements),
        lane=lane,
    )  # fmt: skip


def then_finish(
    problem: FewChannelsProblem, steps: tuple[KernelCall, ...], workspaces: tuple[Workspace, ...] = ()
) -> Recipe:
    """Append activation and pooling as a separate launch, if there are any."""
    if not needs_finish(problem):
        return Recipe(steps, workspaces)
    return Recipe((*steps, finish(problem)), (*workspaces, unfinished(problem)))


def pools_before(name: str, problem: FewChannelsProblem) -> str | None:
    """Return why a rung that pools before the activation does not support one that is not monotonic."""
    if problem.activation and problem.pool > 1:
        return f"{name} pools before the activation, which must be ReLU then; `direct` pools after any activation"
    return None


def too_wide(name: str, problem: FewChannelsProblem) -> str | None:
    if problem.filter_width > MOST_FILTER_WIDTH:
        return (
            f"{name} takes filters up to {MOST_FILTER_WIDTH} wide, not {problem.filter_width}; `matrix_unroll` "
            "takes any"
        )
    return None


# --- rung direct: rows loaded from global memory


_CONSTANT_BYTES = 64 * 1024
_STATIC_SHARED_BYTES = 48 * 1024


@dataclass(frozen=True)
class DirectConfig(Config):
    run: int
    """Adjacent pixels per thread."""
    filters: int
    """Filters per thread."""
    weights: str = "shared"
    """Memory of the weights: `shared` or `constant`."""
    threads: int = 128


class Direct(Rung[FewChannelsProblem, DirectConfig]):
    def supports(self, problem: FewChannelsProblem) -> str | None:
        if not self.configs(problem):
            return f"{self.name} keeps a filter in {_STATIC_SHARED_BYTES} bytes, too few here; use `matrix_unroll`"
        return too_wide(self.name, problem)

    def configs(self, problem: FewChannelsProblem) -> tuple[DirectConfig, ...]:
        p = problem
        each = 4 * p.channels * p.taps
        shared = [
            DirectConfig(run, filters)
            for run, filters in ((8, 4), (16, 4), (8, 8), (4, 8), (16, 2), (16, 1))
            if filters < 2 * p.filters and filters * each <= _STATIC_SHARED_BYTES
        ]
        constant = [replace(config, weights="constant") for config in shared[:2]]
        fits = p.weight_elements * ELEMENT_BYTES[p.storage] <= _CONSTANT_BYTES
        return (*shared, *constant) if fits else tuple(shared)

    def recipe(self, problem: FewChannelsProblem, config: DirectConfig) -> Recipe:
        p = problem
        constant = config.weights == "constant"
        finished = p if p.pool == 1 else replace(p, relu=False, activation="")
        program = Program.of(
            "few_channels/direct.cu",
            constants=activation.constants_of(finished),
            problem=finished,
            config=config,
            constant_weights=p.weight_elements if constant else 0,
        )
        runs = p.batch * p.conv_height * ceil_div(p.conv_width, config.run)
        call = kernel_call(
            program,
            (blocks(runs, config.threads), ceil_div(p.filters, config.filters)),
            config.threads,
            *tensors(Buffer("y" if p.pool == 1 else "unfinished")), shape(p),
        )  # fmt: skip
        copies = (
            (
                ConstantCopy(
                    program, "constant_weights", Buffer("weight"),
                    p.weight_elements * ELEMENT_BYTES[p.storage],
                ),
            )
            if constant
            else ()
        )  # fmt: skip
        if p.pool == 1:
            return Recipe((*copies, call))
        return Recipe((*copies, call, finish(p)), (unfinished(p),))


DIRECT = Direct(
    "direct",
    "one run of pixels and a few filters per thread, with a sliding row of x in registers",
    None,
    None,
)


# --- rung rows: rows in shared memory, and results pooled in registers


_WARP = 32


@dataclass(frozen=True)
class RowsConfig(Config):
    images: int
    """Images per CTA; several only if they are whole."""
    rows: int
    """Rows of y per CTA."""
    segments: int
    """Runs per row of the CTA."""
    run: int
    """Adjacent pixels per thread, a multiple of the pooling window."""
    filters: int
    """Filters per thread."""
    threads: int = 128


@dataclass(frozen=True)
class _Tiling:
    """Sizes derived from a config."""

    problem: FewChannelsProblem
    config: RowsConfig
    card: Card

    @property
    def window(self) -> int:
        """Pixels of a row that a thread reads, 4 at a time."""
        return 4 * ceil_div(self.config.run + self.problem.filter_width - 1, 4)

    @property
    def copied(self) -> bool:
        """True if each run has its own copy of its part of the row, required if runs do not start at multiples of 4."""
        return self.config.run % 4 != 0 and self.config.segments > 1

    @property
    def segment_pitch(self) -> int:
        return 4 * (self.window // 4 | 1) if self.copied else self.config.run

    @property
    def stage_columns(self) -> int:
        return self.window if self.copied else (self.config.segments - 1) * self.config.run + self.window

    @property
    def row_pitch(self) -> int:
        """Smallest sufficient pitch with the fewest bank conflicts."""
        c = self.config
        last = (c.segments - 1) * self.segment_pitch if self.copied else 0
        steps = (self.problem.pool, self.input_rows)
        return _row_pitch(
            last + self.stage_columns, self.segment_pitch, c.segments, c.images, self.filter_groups, steps
        )

    @property
    def filter_groups(self) -> int:
        return ceil_div(self.problem.filters, self.config.filters)

    @property
    def input_rows(self) -> int:
        return self.config.rows * self.problem.pool + self.problem.filter_height - 1

    @property
    def row_tiles(self) -> int:
        return ceil_div(self.problem.output_height, self.config.rows)

    @property
    def column_tiles(self) -> int:
        return ceil_div(
            self.problem.output_width, self.config.segments * (self.config.run // self.problem.pool)
        )

    @property
    def blocks(self) -> int:
        return blocks(self.problem.batch, self.config.images) * self.row_tiles * self.column_tiles

    @property
    def tasks(self) -> int:
        return self.config.images * self.config.rows * self.config.segments * self.filter_groups

    @property
    def shared_bytes(self) -> int:
        p = self.problem
        weights = 4 * ceil_div(p.channels * p.taps * self.filter_groups * self.config.filters, 4)
        return 4 * (weights + p.channels * self.config.images * self.input_rows * self.row_pitch)

    @property
    def x_vector(self) -> int:
        """Elements of x per load: channels of a pixel, or columns."""
        p = self.problem
        width = min(4, full_vector(p.x_type))
        columns = (p.width, p.padding[1], self.config.run, self.stage_columns)
        divided = (p.channels,) if p.layout == "nhwc" and p.channels > 1 else columns
        while any(length % width for length in divided):
            width //= 2
        return width

    @property
    def y_vector(self) -> int:
        """Elements of y per store: filters of a pixel, or columns."""
        p, c = self.problem, self.config
        divided = (p.filters, c.filters) if p.layout == "nhwc" else (p.output_width, c.run // p.pool)
        width = full_vector(p.storage)
        while any(length % width for length in divided):
            width //= 2
        return width

    @property
    def resident(self) -> int:
        """Estimated CTAs per SM."""
        p, c = self.problem, self.config
        kept = c.run // p.pool * c.filters if p.pool > 1 else 0
        registers = 8 * ceil_div(c.run * c.filters + kept + self.window + c.filters + 32, 8)
        return min(
            self.card.registers // (registers * c.threads),
            self.card.resident_blocks(self.shared_bytes),
            2048 // c.threads,
        )

    @property
    def efficiency(self) -> float:
        """Estimated share of useful multiply-adds in the SMs' issue slots."""
        p, c = self.problem, self.config
        multiply_adds = p.filter_width * c.run * c.filters
        reads = self.window // 4 + p.filter_width * ceil_div(c.filters, 4)
        each = p.channels * p.filter_height * (multiply_adds + reads + 6) + c.run * c.filters
        if p.pool > 1:
            each += 2 * c.run * c.filters
        conv_rows = min(p.pool, p.conv_height / p.output_height)
        task = conv_rows * each + 40 + c.run // p.pool * c.filters * (2 + 6 / self.y_vector)
        staged = c.images * self.input_rows * self.stage_columns * (c.segments if self.copied else 1)
        moved = staged * p.channels * (2 + 14 / self.x_vector) + 20 * p.channels * p.taps * p.filters
        warps, warp_tasks = c.threads // _WARP, ceil_div(self.tasks, _WARP)
        work = warp_tasks * task + moved / _WARP
        useful = p.conv_elements * p.channels * p.taps / _WARP / self.blocks
        # Mean active warps per scheduler: a CTA waits for its loads first and for its last warp in the end.
        span = ceil_div(warp_tasks, warps) * warps
        active = self.resident * warps / 4 * warp_tasks / span * work / (work + 4000 * warps)
        at_once = self.card.multiprocessors * self.resident
        waves = self.blocks / at_once
        return useful / work * active / (active + 0.3) * waves / ceil_div(self.blocks, at_once)


@cache
def _row_pitch(
    width: int, segment_pitch: int, segments: int, images: int, groups: int, steps: tuple[int, int]
) -> int:
    """Return the row pitch; `steps` are the rows between adjacent tasks, and between images."""

    def address(thread: int, pitch: int) -> int:
        run = thread // groups
        row = run // segments // images * steps[0] + run // segments % images * steps[1]
        return row * pitch + run % segments * segment_pitch

    def conflicts(pitch: int) -> int:
        total = 0
        for first in range(0, _WARP, 8):  # a phase of a 16-byte read
            banks = [at // 4 % 8 for at in {address(thread, pitch) for thread in range(first, first + 8)}]
            total += max(banks.count(bank) for bank in banks)
        return total

    return min(range(4 * ceil_div(width, 4), width + 36, 4), key=lambda pitch: (conflicts(pitch), pitch))


MOST_SUMS = 84
"""Largest number of accumulators per thread."""
MOST_RUN = 24
MOST_POOL = 16


def _shapes(problem: FewChannelsProblem) -> Iterator[RowsConfig]:
    """Yield mappings of outputs to threads, whether they fit or not."""
    p = problem
    for filters in (1, 2, 4, 8):
        for run in range(p.pool, max(p.pool, MOST_RUN) + 1, p.pool):
            fits = run * filters <= MOST_SUMS and run < p.conv_width + p.pool
            if filters >= 2 * p.filters or not (fits or run == p.pool):
                continue
            wide = ceil_div(p.output_width, run // p.pool)
            high = p.output_height
            for segments in sorted({wide, ceil_div(wide, 2), ceil_div(wide, 4), 1}):
                for rows in sorted(
                    {high, ceil_div(high, 2), ceil_div(high, 4), *(r for r in (8, 4, 2, 1) if r < high)}
                ):
                    whole = segments == wide and rows == high
                    for images in (1, 2, 4, 8) if whole else (1,):
                        if images <= max(1, p.batch):
                            yield RowsConfig(images, rows, segments, run, filters, 128)
                            yield RowsConfig(images, rows, segments, run, filters, 256)


@cache
def _row_configs(problem: FewChannelsProblem, card: Card) -> tuple[RowsConfig, ...]:
    """Return the valid configs, best first."""
    found: dict[RowsConfig, float] = {}
    for config in _shapes(problem):
        tiling = _Tiling(problem, config, card)
        # A CTA with half its threads idle makes sense only if there are no more tasks.
        idle = tiling.tasks <= config.threads // 2 and (config.threads > 128 or tiling.row_tiles > 1)
        if not idle and tiling.shared_bytes <= MIN_SHARED and tiling.resident and tiling.blocks < 2**31:
            found[config] = tiling.efficiency
    if not found:  # long rows: a CTA has few of them
        found = {c: 1.0 for c in _shapes(problem) if _Tiling(problem, c, card).shared_bytes <= MIN_SHARED}
    return tuple(sorted(found, key=lambda config: -found[config])[:12])


class Rows(Rung[FewChannelsProblem, RowsConfig]):
    def supports(self, problem: FewChannelsProblem) -> str | None:
        p = problem
        if p.pool > MOST_POOL:
            return f"{self.name} pools windows up to {MOST_POOL}, not {p.pool}; `direct` pools any"
        refusal = pools_before(self.name, p) or too_wide(self.name, p)
        if refusal:
            return refusal
        if not any(_Tiling(p, config, self.card).shared_bytes <= MIN_SHARED for config in _shapes(p)):
            return f"{self.name} keeps the input rows of an output row in shared memory; `direct` takes any number"
        return None

    def configs(self, problem: FewChannelsProblem) -> tuple[RowsConfig, ...]:
        return _row_configs(problem, self.card)

    def recipe(self, problem: FewChannelsProblem, config: RowsConfig) -> Recipe:
        p, tiling = problem, _Tiling(problem, config, self.card)
        return launch(
            Program.of(
                "few_channels/rows.cu", constants=activation.constants_of(p), problem=p, config=config,
                tiling=tiling,
            ),
            tiling.blocks,
            config.threads,
            *tensors(Buffer("y")), shape(p), tiling.row_tiles, tiling.column_tiles, WeightsReady(),
            shared_bytes=tiling.shared_bytes,
        )  # fmt: skip


# Predictions are for 4to16_40_k7_b10000 in fp32: 36 G multiply-adds, 1.15 G of a warp's.
ROWS = Rows(
    "rows",
    "rows of x are loaded into shared memory once, and results pooled in registers",
    below="direct",
    # `direct`: 14 reads of x with a dozen instructions each for 224 multiply-adds, 400 instructions in all; here 13
    # reads for 476 multiply-adds, 500 in all.
    predicted_gain=1.7,
)
