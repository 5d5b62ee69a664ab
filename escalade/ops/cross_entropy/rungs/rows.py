"""A warp, several or a part of one a row, a partial sum a block: the rungs of cross_entropy."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import element, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung
from escalade.ops.cross_entropy.problem import CrossEntropyProblem
from escalade.ops.reduce.rungs.reductions import total
from escalade.ops.shared.losses import loss_buffer
from escalade.ops.softmax.rungs.block_per_row import BlockConfig, held_configs
from escalade.ops.softmax.rungs.part_of_warp import LanesConfig, lanes_configs, refusal_of_long

_PARTIALS, _COUNTED, _TARGET = Buffer("partials"), Buffer("counted", optional=True), Buffer("target")
_PARTIAL_BYTES = 4
_COUNT_THREADS = 256
_PART_THREADS = 128
_COUNT_BLOCKS = 32
"""Blocks that count rows at most: a lane of a warp then reads one's count each."""

_COUNTED_HERE = 512
"""Rows up to which each warp looks at all targets, 16 a lane: less than a launch takes."""


@dataclass(frozen=True)
class Rows(Rung[CrossEntropyProblem]):
    wide: bool
    """Whether an access has up to 16 bytes and a row stays in registers, or a warp reads its elements one by one."""

    def supports(self, problem: CrossEntropyProblem) -> str | None:
        return None

    def configs(self, problem: CrossEntropyProblem) -> tuple[Config, ...]:
        if not self.wide:
            return tuple(BlockConfig(1, 0, rows) for rows in (8, 4, 16))
        return held_configs(problem.classes, problem.batch, problem.dtype, self.card)

    def recipe(self, problem: CrossEntropyProblem, config: Config) -> Recipe:
        assert isinstance(config, BlockConfig)
        vector = widest_vector(problem.dtype, problem.classes) if self.wide else 1
        held: dict[str, Constant] = {
            "VECTOR": vector, "WARPS": config.warps, "PACKS": config.packs, "ROWS": config.rows,
        }  # fmt: skip
        threads = 32 * config.warps * config.rows
        return _launches(problem, "rows", held, config.rows, threads)


@dataclass(frozen=True)
class PartOfWarp(Rung[CrossEntropyProblem]):
    def supports(self, problem: CrossEntropyProblem) -> str | None:
        return refusal_of_long(self.name, problem.classes, problem.dtype)

    def configs(self, problem: CrossEntropyProblem) -> tuple[Config, ...]:
        return lanes_configs(problem.classes, problem.dtype)

    def recipe(self, problem: CrossEntropyProblem, config: Config) -> Recipe:
        assert isinstance(config, LanesConfig)
        held: dict[str, Constant] = {
            "VECTOR": widest_vector(problem.dtype, problem.classes), "LANES": config.lanes, "PACKS": config.packs,
            "THREADS": _PART_THREADS,
        }  # fmt: skip
        return _launches(problem, "rows_part_of_warp", held, _PART_THREADS // config.lanes, _PART_THREADS)


def _launches(
    problem: CrossEntropyProblem, stem: str, held: dict[str, Constant], rows: int, threads: int
) -> Recipe:
    """The launches around a kernel whose blocks have so many rows and threads each, and `held` what they hold of them:
    a count of rows in front where that has to be known, and the sum of the blocks behind it."""
    constants: dict[str, Constant] = {
        **held, "Element": element(problem.dtype), "HAS_GRADIENT": problem.gradient,
        "SMOOTHED": problem.smoothing > 0, "HAS_IGNORED": problem.ignored is not None,
        "IS_MEAN": problem.reduction == "mean", "COUNTS_HERE": problem.batch <= _COUNTED_HERE,
    }  # fmt: skip
    grid, counters = ceil_div(problem.batch, rows), _counters(problem)
    call = KernelCall(
        Program.of(f"cross_entropy/{stem}.cu", f"cross_entropy_{stem}", constants),
        (grid, 1, 1),
        (threads, 1, 1),
        (
            Buffer("x"), _TARGET, Buffer("scale", optional=True), _COUNTED,
            Buffer("y" if problem.gradient else "", optional=True), _PARTIALS, problem.batch,
            problem.classes, counters, Int64(problem.ignored or 0),
            problem.smoothing / problem.classes, 1.0 - problem.smoothing,
        ),
        overlap=True,
    )  # fmt: skip
    sums = total(_PARTIALS, grid, Buffer(loss_buffer(problem)))
    workspaces = [Workspace(_PARTIALS.name, grid * _PARTIAL_BYTES)]
    if not problem.counts_first or problem.batch <= _COUNTED_HERE:
        return Recipe((call, *sums.steps), tuple(workspaces))
    workspaces.append(Workspace(_COUNTED.name, counters * _PARTIAL_BYTES))
    return Recipe((_count(problem, counters), call, *sums.steps), tuple(workspaces))


def _counters(problem: CrossEntropyProblem) -> int:
    return min(_COUNT_BLOCKS, ceil_div(problem.batch, _COUNT_THREADS))


def _count(problem: CrossEntropyProblem, counters: int) -> KernelCall:
    share = ceil_div(problem.batch, counters)
    return KernelCall(
        Program.of("cross_entropy/rows_count.cu", "cross_entropy_rows_count", {"THREADS": _COUNT_THREADS}),
        (counters, 1, 1),
        (_COUNT_THREADS, 1, 1),
        (_TARGET, _COUNTED, problem.batch, share, Int64(problem.ignored or 0)),
        overlap=True,
    )


# Predictions are for 65,536 rows of 1,000 classes in fp16 with a gradient: 131 MB in, 131 MB out, 62 us at the rate of
# a copy.
RUNGS: tuple[Rung[CrossEntropyProblem], ...] = (
    Rows(
        "warp_per_row",
        "a warp a row, an element an access, read again for the gradient",
        None,
        None,
        wide=False,
    ),
    Rows(
        "block_per_row",
        "16 bytes a load and the row in the registers of as many warps as it takes: read once, each exponential once",
        below="warp_per_row",
        # 75 us, near the copy. A warp a row: 66 M elements, two exponentials each and 2 bytes an access, 170 us.
        predicted_gain=2.2,
        wide=True,
    ),
    # Of 1,000 classes it takes none. For a million rows of 16, the classes of an image's pixels, in fp16: 42 MB in, 34
    # MB out, 18 us at the rate of a copy.
    PartOfWarp(
        "part_of_warp",
        "a short row in the registers of a part of a warp, so that no lane is idle",
        below="block_per_row",
        # 25 us. A warp a row has 2 lanes of 32 at work: a million warps of 150 instructions each, 150 us.
        predicted_gain=6.0,
    ),
)
