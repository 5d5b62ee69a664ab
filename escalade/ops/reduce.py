"""Reductions, also to the index of an extreme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, VECTOR_BYTES, widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call, launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung, first_that
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.shared import activation
from escalade.ops.shared.rows import LAYOUTS, check_fields

# --- the problem


KINDS = ("sum", "mean", "max", "min", "var", "logsumexp", "argmax", "argmin")
_INDEX_KINDS = ("argmax", "argmin")
"""Kinds whose results are int64: the index of the first of the extremes, or of the first NaN if there is one."""


@dataclass(frozen=True)
class ReduceProblem(Named):
    """y[o][i] = activated(kind over r of before(x[o][r][i])); x is [batch][reduced][inner], y [batch][inner].

    `before` is an expression in `x`, empty for x itself. A variance divides the squared distances from the mean by the
    number of elements minus `correction`. States are fp32 for every dtype.
    """

    NAME: ClassVar = NamePattern(
        "reduction",
        r"{kind}_{reduced}x{inner}_b{batch}[_less{correction}][\{{before:text}\}]{relu?_relu}"
        + activation.IN_NAME,
    )

    kind: str
    batch: int
    reduced: int
    inner: int = 1
    correction: float = 0.0
    before: str = ""
    relu: bool = False
    activation: str = ""
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        require("reduce", "kind", self.kind, KINDS)
        check_fields("reduce", self, DTYPES, {"reduced": self.reduced, "inner": self.inner})
        if not math.isfinite(self.correction) or (self.correction and self.kind != "var"):
            raise UnsupportedError(
                f"correction is {self.correction}: it must be finite, and 0 unless kind is var"
            )
        if self.before:
            expression = Expression.parse(self.before)
            if expression.inputs != ("x",) or len(expression.results) != 1:
                raise UnsupportedError(
                    f"before is {self.before!r}: it must be one expression in x, such as x * x"
                )
            object.__setattr__(self, "before", "" if expression.is_identity else expression.text)
        activation.normalize(self)
        if self.kind in _INDEX_KINDS and (self.before or self.relu or self.activation):
            raise UnsupportedError(f"{self.kind} takes no expressions: its result is an index")

    @property
    def result_dtype(self) -> torch.dtype:
        return torch.int64 if self.kind in _INDEX_KINDS else STORAGE[self.dtype]

    @property
    def results(self) -> int:
        return self.batch * self.inner

    @property
    def elements(self) -> int:
        return self.results * self.reduced

    @property
    def flops(self) -> int:
        """One per element; four for a variance or a logsumexp."""
        return self.elements * (4 if self.kind in ("var", "logsumexp") else 1)

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype] + self.results * self.result_dtype.itemsize

    @property
    def rounding(self) -> float:
        """A running sum, whose exponents are about 8 in a logsumexp; a variance has two sums, one of squares.

        Indices are exact.
        """
        if self.kind in _INDEX_KINDS:
            return 0.0
        sums = 2 if self.kind == "var" else 1
        return sums * 2.0**-24 * (8 + math.sqrt(1 + self.reduced / 6))


# --- rungs


_STATE_BYTES = 12
_MERGE_THREADS = 128
_LEAST_TURNS = 4
"""Fewest iterations of a CTA that are worth splitting the work."""
_SM_THREADS, _LONG = 2048, 1024
"""Threads that fill an SM, and packs of a row that a CTA reads in several turns."""
_WIDTHS = (32, 16, 8)
"""Adjacent accesses per CTA of `columns`, 16 bytes each: a warp's, or at least a cache line."""
_THREADS = (128, 256, 512)
_MOST_ROWS = 16
"""Rows per thread of which reading the last costs less than a second launch."""
_FEW_ROWS = 32
"""Most rows of an index that a thread reads alone, without a merge."""
_WARP = 32
_LANES = (1, 2, 4, 8, 16, 32)
_COSTLY = ("var", "logsumexp")
"""Kinds whose states take divisions or exponentials to merge."""
_LINE_BYTES = 128
_IN_FLIGHT = 4
"""Most accesses in flight per thread."""
_FEW_THREADS = 256
"""Threads per SM below which more of them share the rows of a result."""
_BUSY_THREADS = 1024
"""Threads per SM with `_IN_FLIGHT` accesses each that have 64 KB in flight."""
_X, _Y, _PARTIAL = Buffer("x"), Buffer("y"), Buffer("partial", optional=True)


@dataclass(frozen=True)
class SharedConfig(Config):
    threads: int
    packs: int
    """Accesses in flight per thread."""
    splits: int
    """Approximate number of CTAs that share a result."""


@dataclass(frozen=True)
class ColumnsConfig(SharedConfig):
    width: int
    """Adjacent accesses per CTA."""
    access: int = VECTOR_BYTES
    """Most bytes per access."""


@dataclass(frozen=True)
class RowsConfig(SharedConfig):
    row_threads: int
    """Threads per row: part of a warp, or a CTA."""
    rows: int = 1
    """Rows per thread, loaded together."""


def _program(source: str, problem: ReduceProblem, **scope: Any) -> Program:
    """Return a program with the expressions on both sides, if any, as one expression of two results."""
    generated: dict[str, Constant] = {}
    if problem.before or problem.relu or problem.activation:
        relu = Expression.apply("relu", "x") if problem.relu else IDENTITY
        before = Expression.parse(problem.before) if problem.before else IDENTITY
        after = Expression.parse(problem.activation) if problem.activation else relu
        both = before.concat(after.rename({"x": "total"}))
        inputs = {"ELEMENT": both.inputs.index("x"), "TOTAL": both.inputs.index("total")}
        generated = {**inputs, **both.constants(problem.dtype)}
    return Program.of(f"reduce/{source}.cu", constants=generated, problem=problem, **scope)


def _divisor(problem: ReduceProblem) -> float:
    return float(max(0.0, problem.reduced - problem.correction))


def _recipe(problem: ReduceProblem, call: KernelCall, splits: int) -> Recipe:
    """Return the launch, plus one that merges partial results if CTAs share results."""
    if splits == 1:
        return Recipe((call,))
    lanes = 32 if problem.results < 4096 else 1
    merge = kernel_call(
        _program("reductions_merge", problem, threads=_MERGE_THREADS, lanes=lanes),
        blocks(problem.results * lanes, _MERGE_THREADS),
        _MERGE_THREADS,
        Buffer("partial"), _Y, Int64(problem.results), splits, _divisor(problem),
    )  # fmt: skip
    return Recipe((call, merge), (Workspace("partial", _STATE_BYTES * splits * problem.results),))


@dataclass(frozen=True)
class Naive(ThreadsRung[ReduceProblem]):
    threads = (64, 32, 128)

    def recipe(self, problem: ReduceProblem, config: ThreadsConfig) -> Recipe:
        return launch(
            _program("naive", problem),
            blocks(problem.results, config.threads),
            config.threads,
            _X, _Y, Int64(problem.results), problem.reduced, problem.inner, _divisor(problem),
        )  # fmt: skip


def _lanes(packs: int, access_bytes: int) -> int:
    """Return the threads of a warp for a short row: none idle, accesses of whole cache lines, and as few as possible.

    Without `access_bytes` just as few as possible.
    """
    if not access_bytes:
        return next((lanes for lanes in _LANES if packs <= _IN_FLIGHT * lanes), _WARP)

    def rank(lanes: int) -> tuple[int, bool]:
        turns = ceil_div(packs, lanes)
        return turns * lanes - packs, turns > 1 and lanes * access_bytes < _LINE_BYTES

    fitting = [lanes for lanes in _LANES if packs <= _IN_FLIGHT * lanes and lanes < 2 * packs]
    return min(fitting, key=rank, default=_WARP)


@dataclass(frozen=True)
class Rows(Rung[ReduceProblem, RowsConfig]):
    def supports(self, problem: ReduceProblem) -> str | None:
        if problem.inner == 1:
            return None
        return f"it reduces contiguous elements; here {problem.inner} results are adjacent: use `columns`"

    def configs(self, problem: ReduceProblem) -> tuple[RowsConfig, ...]:
        """For many rows prefer the fewest threads each that have a few packs; for few rows whole CTAs, and several of
        them if each has enough to do."""
        vector = widest_vector(problem.dtype, problem.reduced)
        packs = problem.reduced // vector
        narrow = _lanes(packs, 0 if problem.kind in _COSTLY else vector * ELEMENT_BYTES[problem.dtype])
        wide = 128 if packs <= 1024 else 256 if packs <= 8192 else 512
        wanted = ceil_div(self.card.busy_blocks, max(1, problem.batch))
        splits = max(1, min(wanted, packs // (wide * _LEAST_TURNS)))
        by_warps = self._by_warps(problem.batch, packs, narrow)
        by_blocks = [RowsConfig(wide, in_flight, splits, wide) for in_flight in (4, 2)]
        whole = [RowsConfig(wide, 4, 1, wide)] if splits > 1 else []
        few = problem.batch * narrow < self.card.busy_blocks * 32 and packs > 32
        few |= problem.batch * narrow < self.card.multiprocessors * _SM_THREADS and packs >= _LONG
        few |= problem.kind == "logsumexp" and packs >= _THREADS[0]  # exponentials: 6.9 us instead of 9.3
        return tuple(by_blocks + whole + by_warps if few else by_warps + by_blocks + whole)

    def _by_warps(self, batch: int, packs: int, lanes: int) -> list[RowsConfig]:
        """Prefer two rows per thread if that keeps the card busy."""
        in_flight = min(_IN_FLIGHT, ceil_div(packs, lanes))
        if packs > _IN_FLIGHT * lanes:
            return [RowsConfig(128, some, 1, lanes) for some in (_IN_FLIGHT, 2)]
        busy = _BUSY_THREADS * self.card.multiprocessors
        every = [
            RowsConfig(256, in_flight, 1, lanes, rows) for rows in (2, 1, 4) if rows * in_flight <= _IN_FLIGHT
        ]
        return list(first_that(lambda config: ceil_div(batch, config.rows) * lanes >= busy, every))

    def recipe(self, problem: ReduceProblem, config: RowsConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.reduced)
        packs = problem.reduced // vector
        per_split = ceil_div(packs, config.splits)
        splits = ceil_div(packs, per_split)
        call = kernel_call(
            _program("rows", problem, config=config, vector=vector, split=splits > 1),
            (ceil_div(problem.batch, config.threads // config.row_threads * config.rows), splits),
            config.threads,
            _X, _Y, _PARTIAL, problem.batch, packs, per_split, _divisor(problem),
        )  # fmt: skip
        return _recipe(problem, call, splits)


def _vector(problem: ReduceProblem, access: int) -> int:
    """Return the results per access of at most `access` bytes."""
    return min(widest_vector(problem.dtype, problem.inner), access // ELEMENT_BYTES[problem.dtype])


@dataclass(frozen=True)
class Columns(Rung[ReduceProblem, ColumnsConfig]):
    def supports(self, problem: ReduceProblem) -> str | None:
        if problem.inner > 1:
            return None
        return "it reduces strided elements; here they are contiguous: use `rows`"

    def configs(self, problem: ReduceProblem) -> tuple[ColumnsConfig, ...]:
        """Prefer one launch of the widest CTAs that reach every SM, with as many threads as few rows each take.

        CTAs share results if threads have many rows each for all that.
        """
        p, vector = problem, widest_vector(problem.dtype, problem.inner)
        across, sms = p.inner // vector, self.card.multiprocessors
        widths = list(dict.fromkeys(min(across, width) for width in _WIDTHS))
        width = next((one for one in widths if p.batch * ceil_div(across, one) >= sms), widths[-1])
        threads = next((one for one in _THREADS if p.reduced // (one // width) <= _MOST_ROWS), _THREADS[-1])
        few = p.batch * ceil_div(across, width) * threads < _BUSY_THREADS * sms
        if p.batch * ceil_div(across, width) * threads < _FEW_THREADS * sms and p.kind not in _INDEX_KINDS:
            threads = max(threads, _THREADS[1])  # 2.5 us instead of 2.9 for 64 x 4096 at batch 16
        split = self._split(p, widths[0], across)
        best = self._whole(p, threads, width)
        offered = [*split, best] if few and p.reduced // (threads // width) > _MOST_ROWS else [best, *split]
        others = [self._whole(p, threads, width) for width in widths for threads in _THREADS]
        if p.kind in _INDEX_KINDS:
            alone, shared = self._of_indices(p)
            fills = p.results >= _BUSY_THREADS * sms
            offered = [*alone, *offered] if fills and p.reduced <= _FEW_ROWS else [*offered, *alone]
            if width < widths[0]:  # too few columns for wide accesses: 1.7 us instead of 3.2 for 64 x 4096
                offered = [shared[1], *offered]
            others += shared
        return tuple(dict.fromkeys([*offered, *others]))

    def _of_indices(self, problem: ReduceProblem) -> tuple[list[ColumnsConfig], list[ColumnsConfig]]:
        """Return configs with 16 bytes of int64 results per thread: adjacent threads store adjacent packs.

        In the first ones a thread reads all rows of its results; in the others threads merge through smem.
        """
        access = 2 * ELEMENT_BYTES[problem.dtype]
        across = problem.inner // _vector(problem, access)
        alone = [self._whole(problem, threads, min(across, threads), access) for threads in _THREADS]
        shared = [self._whole(problem, threads, min(across, _WIDTHS[0]), access) for threads in _THREADS]
        return alone, shared

    def _whole(
        self, problem: ReduceProblem, threads: int, width: int, access: int = VECTOR_BYTES
    ) -> ColumnsConfig:
        rows = problem.reduced // (threads // width)
        return ColumnsConfig(threads, next((packs for packs in (4, 2) if packs <= rows), 1), 1, width, access)

    def _split(self, problem: ReduceProblem, width: int, across: int) -> list[ColumnsConfig]:
        """Offer as many CTAs per result as keep the card busy and have enough to do."""
        offered = []
        wanted = ceil_div(self.card.busy_blocks, max(1, problem.batch * ceil_div(across, width)))
        for threads in (256, 128):
            most = problem.reduced // (threads // width * _LEAST_TURNS)
            for splits in dict.fromkeys(max(1, min(some, most)) for some in (wanted, wanted // 2)):
                offered += [ColumnsConfig(threads, in_flight, splits, width) for in_flight in (4, 2)]
        return offered

    def recipe(self, problem: ReduceProblem, config: ColumnsConfig) -> Recipe:
        vector = _vector(problem, config.access)
        across = ceil_div(problem.inner // vector, config.width)
        per_split = ceil_div(problem.reduced, config.splits)
        splits = ceil_div(problem.reduced, per_split)
        call = kernel_call(
            _program("columns", problem, config=config, vector=vector, split=splits > 1),
            (problem.batch * across, splits),
            config.threads,
            _X, _Y, _PARTIAL, across, Int64(problem.results), problem.reduced, problem.inner,
            per_split, _divisor(problem),
        )  # fmt: skip
        return _recipe(problem, call, splits)


def total(parts: Buffer, count: int, y: Buffer) -> Recipe:
    """Return the sum of `count` fp32 numbers by one CTA in a fixed order, as second stage of other kernels' sums."""
    problem = ReduceProblem("sum", 1, count)
    packs = count // widest_vector(problem.dtype, count)
    threads = next((some for some in (32, 128, 512) if packs <= _LEAST_TURNS * some), 1024)
    return ROWS.recipe(problem, RowsConfig(threads, 4, 1, threads)).remap({_X.name: parts, _Y.name: y})


# Predictions are for fp16: 51 MB of 100,352 rows of 256 elements, or of 32 images of 3,136 pixels of 256 channels: 12
# us at DRAM rate.
NAIVE = Naive("naive", "one thread per result, one element at a time", None, None)

ROWS = Rows(
    "rows",
    "16-byte loads, part of a warp or a CTA per row, and several CTAs if rows are few",
    below="naive",
    # naive: the threads of a warp walk 32 rows, 26 M loads of 32 sectors per warp: 0.2 ms.
    predicted_gain=12.0,
)

COLUMNS = Columns(
    "columns",
    "16 bytes of adjacent results per thread, rows shared by the threads of a CTA and by CTAs",
    below="naive",
    # naive: 8,192 threads on 132 SMs with 3,136 sequential loads of 2 bytes, eight in flight for 0.6 us: 0.24 ms.
    predicted_gain=15.0,
)


# --- the reference


_BY_KIND: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(1),
}


def random_inputs(problem: ReduceProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Normal around 1, so that sums do not cancel; for indices quarters, so that several elements are extreme."""
    p = problem
    x = 1 + draw.normal(p.batch, p.reduced, p.inner)
    if p.kind in _INDEX_KINDS:
        x = (4 * x).round().clamp(-4, 12) / 4
    return {"x": x.to(STORAGE[p.dtype])}


def empty_output(problem: ReduceProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, problem.inner), dtype=problem.result_dtype, device=device)


def peer(problem: ReduceProblem, inputs: Tensors) -> torch.Tensor:
    x = inputs["x"].reshape(problem.batch, problem.reduced, problem.inner)
    if problem.before:
        (x,) = Expression.parse(problem.before).evaluate({"x": x})
    y = x.var(1, correction=problem.correction) if problem.kind == "var" else _BY_KIND[problem.kind](x)
    return activation.apply(problem, y)


def exact(problem: ReduceProblem, inputs: Tensors) -> torch.Tensor:
    return in_float64(peer)(problem, inputs).double()


# --- the operation


class ReduceOperation(Operation[ReduceProblem]):
    name = "reduce"
    problem = ReduceProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("reduce", (NAIVE, ROWS, COLUMNS))
    problems = (
        ReduceProblem("max", 32, 3136, 256),
        ReduceProblem("mean", 100_352, 96),
        ReduceProblem("sum", 32, 802_816, before="x * x", activation="sqrt(x)"),
        ReduceProblem("var", 1, 100_352, 64, correction=1.0),
        ReduceProblem("logsumexp", 10_000, 1000),
        ReduceProblem("argmax", 8, 21, 262_144),
    )
    """The maximum of each channel of an image, the mean over channels, the norm of an image, the variance of a channel
    in a batch, the denominator of log_softmax, and the class of each pixel."""
    small_problems = (
        ReduceProblem("sum", 3, 5, 7),
        ReduceProblem("mean", 37, 24),
        ReduceProblem("max", 2, 70, 24),
        ReduceProblem("min", 5, 33),
        ReduceProblem("var", 1, 1300, 64, correction=1.0),
        ReduceProblem("var", 3, 96, before="abs(x)"),
        ReduceProblem("logsumexp", 4, 1000),
        ReduceProblem("logsumexp", 2, 40, 8),
        ReduceProblem("sum", 1, 40_960, before="abs(x)", relu=True),
        ReduceProblem("argmax", 3, 70, 40),
        ReduceProblem("argmax", 2, 21, 262),
        ReduceProblem("argmin", 2, 1300, 8),
        ReduceProblem("argmax", 37, 21),
        ReduceProblem("argmin", 2, 40_960),
    )
    """Small problems: rows of part of a warp, of a CTA and of several; columns of one CTA and of several; and
    expressions on both sides."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("rows", "columns")


REDUCE = ReduceOperation()


# --- the PyTorch operator


def reduce(
    x: torch.Tensor,
    kind: str,
    first: int = -1,
    last: int = -1,
    correction: float = 0.0,
    before: str = "",
    activation: str = "",
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Reduce the dimensions from `first` to `last`, which are removed.

    `kind` is sum, mean, max, min, var, logsumexp, argmax or argmin. An argmax or argmin is an int64 index into the
    flattened reduced dimensions, as PyTorch returns it: the first of equal elements, and the first NaN.

    `before` is an expression in x applied to each element, such as `x * x`, and `activation` one applied to each
    result. `rung` names a rung of the ladder.
    """
    return OPERATOR(x, kind, first, last, correction, before, activation, rung)


def _plan(
    x: torch.Tensor, kind: str, first: int, last: int, correction: float, before: str, activation: str,
    rung: str | None = None,
) -> CallPlan:  # fmt: skip
    rank = x.dim()
    if not (-rank <= first < rank and -rank <= last < rank) or first % rank > last % rank:
        raise UnsupportedError(
            f"dimensions {first} to {last} of {rank}: they must be a range, each at least {-rank} and below {rank}"
        )
    begin, end = first % rank, last % rank + 1

    def problem() -> ReduceProblem:
        outer, inside, inner = (
            math.prod(part) for part in (x.shape[:begin], x.shape[begin:end], x.shape[end:])
        )
        dtype = NAMES[x.dtype]
        return ReduceProblem(
            kind, outer, inside, max(1, inner), correction, before, activation=activation, dtype=dtype
        )

    dtype = torch.int64 if kind in _INDEX_KINDS else x.dtype
    return CallPlan(REDUCE, lambda: x.new_empty((*x.shape[:begin], *x.shape[end:]), dtype=dtype), problem)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, *ctx.arguments, _ = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Differentiate PyTorch's formulation."""
    (x,) = ctx.saved_tensors
    problem: Any = _plan(x, *ctx.arguments).make_problem()
    with torch.enable_grad():
        again = x.detach().requires_grad_()
        y = peer(problem, {"x": again})
    (found,) = torch.autograd.grad(y, again, gradient.reshape(y.shape))
    return (found, *(None for _ in ctx.arguments), None)


OPERATOR = define_planned("reduce", _plan, "x: ... C", setup=_setup, backward=_backward)
