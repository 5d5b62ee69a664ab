"""Convolution on CUDA cores: runs of pixels in registers, loaded from rows in shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe, WeightsReady
from escalade.ops.base.card import MIN_SHARED, Card
from escalade.ops.base.dtypes import full_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.few_channels.rungs import arguments
from escalade.ops.shared import activation

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
        refusal = arguments.pools_before(self.name, p) or arguments.too_wide(self.name, p)
        if refusal:
            return refusal
        if not any(_Tiling(p, config, self.card).shared_bytes <= MIN_SHARED for config in _shapes(p)):
            return f"{self.name} keeps the input rows of an output row in shared memory; `direct` takes any number"
        return None

    def configs(self, problem: FewChannelsProblem) -> tuple[RowsConfig, ...]:
        return _row_configs(problem, self.card)

    def recipe(self, problem: FewChannelsProblem, config: RowsConfig) -> Recipe:
        p, tiling = problem, _Tiling(problem, config, self.card)
        call = KernelCall(
            Program.of(
                "few_channels/rows.cu",
                constants=activation.constants_of(p),
                problem=p,
                config=config,
                tiling=tiling,
            ),
            (tiling.blocks, 1, 1),
            (config.threads, 1, 1),
            (
                *arguments.tensors(Buffer("y")),
                arguments.shape(p),
                tiling.row_tiles,
                tiling.column_tiles,
                WeightsReady(),
            ),
            shared_bytes=tiling.shared_bytes,
            overlap=True,
        )
        return Recipe((call,))


# Predictions are for 4to16_40_k7_b10000 in fp32: 36 G multiply-adds, 1.15 G of a warp's.
RUNGS: tuple[Rung[FewChannelsProblem], ...] = (
    Rows(
        "rows",
        "rows of x are loaded into shared memory once, and results pooled in registers",
        below="direct",
        # `direct`: 14 reads of x with a dozen instructions each for 224 multiply-adds, 400 instructions in all; here 13
        # reads for 476 multiply-adds, 500 in all.
        predicted_gain=1.7,
    ),
)
