"""Reductions of rows and of columns: the rungs of reduce."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.ops.base.dtypes import element, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.reduce.problem import KINDS, ReduceProblem

_STATE_BYTES = 12
_MERGE_THREADS = 128
_LEAST_TURNS = 4
"""Turns of a block that are worth a share of the work of its own."""
_SEGMENT = 32
"""Accesses side by side in a block at most: a warp's."""
_X, _Y, _PARTIAL = Buffer("x"), Buffer("y"), Buffer("partial", optional=True)


@dataclass(frozen=True)
class SharedConfig(Config):
    threads: int
    """Threads of a block."""
    packs: int
    """Accesses of a thread that are under way at once."""
    splits: int
    """Blocks that share a result, about."""


@dataclass(frozen=True)
class RowsConfig(SharedConfig):
    row_threads: int
    """Threads of a row: a part of a warp, or a block."""


def _constants(problem: ReduceProblem) -> dict[str, Constant]:
    """What reduce.cuh leaves open: the kind, and the expressions on both sides as one program of two results."""
    common: dict[str, Constant] = {"Element": element(problem.dtype), "KIND": KINDS.index(problem.kind)}
    if not (problem.before or problem.relu or problem.activation):
        return common
    relu = Expression.apply("relu", "x") if problem.relu else IDENTITY
    before = Expression.parse(problem.before) if problem.before else IDENTITY
    after = Expression.parse(problem.activation) if problem.activation else relu
    both = before.joined(after.rename({"x": "total"}))
    places: dict[str, Constant] = {"ELEMENT": both.inputs.index("x"), "TOTAL": both.inputs.index("total")}
    return {**common, **places, **both.constants(problem.dtype)}


def _divisor(problem: ReduceProblem) -> float:
    return float(max(0.0, problem.reduced - problem.correction))


def _recipe(problem: ReduceProblem, call: KernelCall, splits: int) -> Recipe:
    """The launch, and a second one that merges what its blocks have found if they share results."""
    if splits == 1:
        return Recipe((call,))
    lanes = 32 if problem.results < 4096 else 1
    merge = KernelCall(
        Program.of(
            "reduce/reductions_merge.cu",
            "reduce_reductions_merge",
            {**_constants(problem), "THREADS": _MERGE_THREADS, "LANES": lanes},
        ),
        (blocks(problem.results * lanes, _MERGE_THREADS), 1, 1),
        (_MERGE_THREADS, 1, 1),
        (Buffer("partial"), _Y, Int64(problem.results), splits, _divisor(problem)),
        overlap=True,
    )
    return Recipe((call, merge), (Workspace("partial", _STATE_BYTES * splits * problem.results),))


@dataclass(frozen=True)
class Naive(Rung[ReduceProblem]):
    def supports(self, problem: ReduceProblem) -> str | None:
        return None

    def configs(self, problem: ReduceProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (64, 32, 128))

    def recipe(self, problem: ReduceProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        call = KernelCall(
            Program.of("reduce/naive.cu", "reduce_naive", _constants(problem)),
            (blocks(problem.results, config.threads), 1, 1),
            (config.threads, 1, 1),
            (_X, _Y, Int64(problem.results), problem.reduced, problem.inner, _divisor(problem)),
            overlap=True,
        )
        return Recipe((call,))


@dataclass(frozen=True)
class Rows(Rung[ReduceProblem]):
    def supports(self, problem: ReduceProblem) -> str | None:
        if problem.inner == 1:
            return None
        return f"it reduces what lies side by side; here results do, {problem.inner} of them: `columns` takes these"

    def configs(self, problem: ReduceProblem) -> tuple[Config, ...]:
        """Offers for many rows as few threads each as have a few packs, for few rows blocks, and several of them where
        that leaves each enough to do."""
        packs = problem.reduced // widest_vector(problem.dtype, problem.reduced)
        narrow = next((threads for threads in (1, 2, 4, 8, 16, 32) if packs <= 4 * threads), 32)
        wide = 128 if packs <= 1024 else 256 if packs <= 8192 else 512
        wanted = ceil_div(self.card.filling, max(1, problem.batch))
        splits = max(1, min(wanted, packs // (wide * _LEAST_TURNS)))
        by_warps = [RowsConfig(128, under_way, 1, narrow) for under_way in (4, 2)]
        by_blocks = [RowsConfig(wide, under_way, splits, wide) for under_way in (4, 2)]
        whole = [RowsConfig(wide, 4, 1, wide)] if splits > 1 else []
        few = problem.batch * narrow < self.card.filling * 32 and packs > 32
        return tuple(by_blocks + whole + by_warps if few else by_warps + by_blocks + whole)

    def recipe(self, problem: ReduceProblem, config: Config) -> Recipe:
        assert isinstance(config, RowsConfig)
        vector = widest_vector(problem.dtype, problem.reduced)
        packs = problem.reduced // vector
        per_split = ceil_div(packs, config.splits)
        splits = ceil_div(packs, per_split)
        constants = {
            **_constants(problem), "VECTOR": vector, "PACKS": config.packs, "THREADS": config.threads,
            "ROW_THREADS": config.row_threads, "SPLIT": splits > 1,
        }  # fmt: skip
        call = KernelCall(
            Program.of("reduce/rows.cu", "reduce_rows", constants),
            (ceil_div(problem.batch, config.threads // config.row_threads), splits, 1),
            (config.threads, 1, 1),
            (_X, _Y, _PARTIAL, Int64(problem.batch), packs, per_split, _divisor(problem)),
            overlap=True,
        )
        return _recipe(problem, call, splits)


@dataclass(frozen=True)
class Columns(Rung[ReduceProblem]):
    def supports(self, problem: ReduceProblem) -> str | None:
        if problem.inner > 1:
            return None
        return "it has results side by side; here each is of a row, which `rows` takes"

    def configs(self, problem: ReduceProblem) -> tuple[Config, ...]:
        """Offers as many blocks a result as keep the card busy, and leave each enough to do."""
        offered = []
        for threads in (256, 128):
            _, width, across = self._width(problem)
            wanted = ceil_div(self.card.filling, max(1, problem.batch * across))
            most = problem.reduced // (threads // width * _LEAST_TURNS)
            for splits in dict.fromkeys((max(1, min(wanted, most)), max(1, min(wanted // 2, most)), 1)):
                offered += [SharedConfig(threads, under_way, splits) for under_way in (4, 2)]
        return tuple(offered)

    def _width(self, problem: ReduceProblem) -> tuple[int, int, int]:
        """Elements of an access, accesses side by side in a block, and blocks side by side."""
        vector = widest_vector(problem.dtype, problem.inner)
        width = min(problem.inner // vector, _SEGMENT)
        return vector, width, ceil_div(problem.inner // vector, width)

    def recipe(self, problem: ReduceProblem, config: Config) -> Recipe:
        assert isinstance(config, SharedConfig)
        vector, width, across = self._width(problem)
        per_split = ceil_div(problem.reduced, config.splits)
        splits = ceil_div(problem.reduced, per_split)
        constants = {
            **_constants(problem), "VECTOR": vector, "PACKS": config.packs, "THREADS": config.threads,
            "SPLIT": splits > 1,
        }  # fmt: skip
        call = KernelCall(
            Program.of("reduce/columns.cu", "reduce_columns", constants),
            (problem.batch * across, splits, 1),
            (config.threads, 1, 1),
            (
                _X, _Y, _PARTIAL, across, width, Int64(problem.results), problem.reduced, problem.inner, per_split,
                _divisor(problem),
            ),
            overlap=True,
        )  # fmt: skip
        return _recipe(problem, call, splits)


def total(parts: Buffer, count: int, y: Buffer) -> Recipe:
    """The sum of so many fp32 numbers by one block, always in the same order: the second stage of sums whose first are
    blocks of another operation."""
    problem = ReduceProblem("sum", 1, count)
    packs = count // widest_vector(problem.dtype, count)
    threads = next((some for some in (32, 128, 512) if packs <= _LEAST_TURNS * some), 1024)
    return ROWS.recipe(problem, RowsConfig(threads, 4, 1, threads)).remap({_X.name: parts, _Y.name: y})


# Predictions are for fp16: 51 MB of 100,352 rows of 256 elements, or of 32 images of 3,136 pixels of 256 channels: 12
# us at the rate of memory.
NAIVE = Naive("naive", "one thread a result, an element at a time", None, None)

ROWS = Rows(
    "rows",
    "16 bytes a load, a part of a warp or a block a row, and several blocks where rows are few",
    below="naive",
    # naive: the threads of a warp walk 32 rows, 26 M loads of 32 sectors a warp: 0.2 ms.
    predicted_gain=12.0,
)

COLUMNS = Columns(
    "columns",
    "16 bytes of results side by side a thread, rows shared by the threads of a block and by blocks",
    below="naive",
    # naive: 8,192 threads on 132 multiprocessors with 3,136 loads of 2 bytes in turn, eight of them under way for 0.6
    # us: 0.24 ms.
    predicted_gain=15.0,
)
