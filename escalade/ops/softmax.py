"""Softmax along the last dimension, or its logarithm, then any expression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe
from escalade.ops.base.card import Card
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.rung import Config, Rung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import activation, columns, rows
from escalade.ops.shared.rows import LAYOUTS, PerRow, check_fields, launch_rows

# --- the problem


@dataclass(frozen=True)
class SoftmaxProblem(Named):
    """y[row] = activated(exp(x[row] - max) / sum(exp(x[row] - max))), or with `log` activated(its logarithm).

    x and y are [batch][classes][inner] of one dtype.
    """

    NAME: ClassVar = NamePattern(
        "softmax",
        "{classes}_b{batch}[_inner{inner}]{log?_log}{relu?_relu}" + activation.IN_NAME,
    )

    batch: int
    classes: int
    dtype: str = "fp32"
    layout: str = "flat"
    inner: int = 1
    """Stride of a row's elements, and number of adjacent rows: the pixels of an image for softmax over its channels in
    NCHW."""
    log: bool = False
    relu: bool = False
    activation: str = ""

    def __post_init__(self) -> None:
        check_fields("softmax", self, DTYPES, {"classes": self.classes, "inner": self.inner})
        activation.normalize(self)

    @property
    def rows(self) -> int:
        return self.batch * self.inner

    @property
    def elements(self) -> int:
        return self.rows * self.classes

    @property
    def flops(self) -> int:
        """Per element: comparison, subtraction, exponential, addition, multiplication."""
        return 5 * self.elements

    @property
    def bytes(self) -> int:
        return 2 * self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        return softmax_rounding(self.classes)


def softmax_rounding(classes: int) -> float:
    """Return the rounding error of a probability: logit - max, about 8, is off by 2^-24 of itself; then exp, sum and
    quotient."""
    return 2.0**-24 * (8 + math.sqrt(1 + classes / 6))


# --- rungs


def _program(source: str, problem: SoftmaxProblem, **scope: Any) -> Program:
    constants = activation.constants_of(problem)
    return Program.of(f"softmax/{source}.cu", constants=constants, problem=problem, **scope)


@dataclass(frozen=True)
class ActivatedPerRow(PerRow[SoftmaxProblem]):
    def program(self, problem: SoftmaxProblem) -> Program:
        return _program(self.name, problem)


# Predictions are for 10,000 rows of 1,000 classes in fp16: 20 MB in, 20 MB out, 9.4 us at copy rate.
NAIVE = ActivatedPerRow(
    "naive",
    "one thread per row, in three passes",
    None,
    None,
    "softmax",
    row_threads=1,
    threads=(64, 32, 128),
)

WARP_PER_ROW = ActivatedPerRow(
    "warp_per_row",
    "one warp per row: maximum and sum in one pass, merged by shuffles, then a pass that writes",
    below="naive",
    # naive: 157 CTAs on 132 SMs, 2 warps each with one load from L1 or L2 at a time, 3,000 times some 200 clocks, in
    # two waves: 0.7 ms. One warp per row: 10 M elements, two exponentials each: 25 us.
    predicted_gain=28.0,
    operation="softmax",
    row_threads=32,
    threads=(256, 128, 512),
)


# --- rung block_per_row: a row in the registers of as many warps as it needs


@dataclass(frozen=True)
class BlockConfig(Config):
    warps: int
    """Warps per row."""
    packs: int
    """Accesses per thread that hold the row in registers; 0 if it is read twice instead."""
    rows: int
    """Rows per CTA."""


MOST_VALUES = 32
"""Most values per thread in registers: each of 1,024 threads has 64 registers."""


def held_configs(classes: int, batch: int, dtype: str, card: Card) -> tuple[BlockConfig, ...]:
    """Return ways to hold a row in registers: the fewest warps per row if there are many rows, the most that have work
    if there are few."""
    width = widest_vector(dtype, classes)
    offered = []
    for warps in (1, 2, 4, 8, 16, 32):
        packs = ceil_div(classes // width, 32 * warps)
        if packs * width <= MOST_VALUES:
            offered.append(BlockConfig(warps, packs, 4 if warps == 1 else 1))
        if packs == 1:
            break
    if not offered:
        return (BlockConfig(32, 0, 1), BlockConfig(16, 0, 1), BlockConfig(8, 0, 1))
    return tuple(reversed(offered) if batch <= card.busy_blocks else offered)


@dataclass(frozen=True)
class BlockPerRow(Rung[SoftmaxProblem, BlockConfig]):
    def supports(self, problem: SoftmaxProblem) -> str | None:
        return columns.refusal_of_dense(self.name, problem.inner)

    def configs(self, problem: SoftmaxProblem) -> tuple[BlockConfig, ...]:
        return held_configs(problem.classes, problem.batch, problem.dtype, self.card)

    def recipe(self, problem: SoftmaxProblem, config: BlockConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.classes)
        program = _program("block_per_row", problem, config=config, vector=vector)
        grid = ceil_div(problem.batch, config.rows)
        return launch_rows(problem, program, grid, 32 * config.warps * config.rows)


BLOCK_PER_ROW = BlockPerRow(
    "block_per_row",
    "16-byte loads, and the row in the registers of as many warps as it needs: one read and one exponential each",
    below="warp_per_row",
    # 11 us, near the copy, against 25.
    predicted_gain=2.2,
)


# --- rung columns: strided rows that are adjacent in memory


@dataclass(frozen=True)
class Columns(Rung[SoftmaxProblem, columns.ColumnsConfig]):
    def supports(self, problem: SoftmaxProblem) -> str | None:
        return columns.refusal(self.name, problem.rows, problem.classes, problem.inner)

    def configs(self, problem: SoftmaxProblem) -> tuple[columns.ColumnsConfig, ...]:
        p = problem
        return columns.configs(p.rows, p.classes, p.inner, p.dtype, self.card)

    def recipe(self, problem: SoftmaxProblem, config: columns.ColumnsConfig) -> Recipe:
        p = problem
        program = partial(_program, "columns", p)
        arguments = (Buffer("x"), Buffer("y"), p.rows, p.classes, p.inner)
        return columns.column_launch(
            config, p.rows, p.classes, p.dtype, self.card, program, *arguments,
            functions=p.log or bool(p.activation),
        )  # fmt: skip


# Predicted for 64 channels of 64 x 64 pixels, batch 64, fp16: 34 MB in, 34 MB out, 16 us at copy rate.
COLUMNS = Columns(
    "columns",
    "adjacent rows per lane, whose classes the warps of a CTA share and hold in registers; the next are prefetched",
    below=None,
    predicted_gain=None,
)


# --- rung part_of_warp: a short row in the registers of part of a warp


MOST_VALUES_PART_OF_WARP = 16
"""Most values per lane: several rows of a warp are in flight at once, so it need not hold many."""
_THREADS = 128


@dataclass(frozen=True)
class LanesConfig(Config):
    lanes: int
    """Lanes per row."""
    packs: int
    """Accesses per lane."""


def lanes_configs(classes: int, dtype: str) -> tuple[LanesConfig, ...]:
    """Return ways to hold a short row in registers, the fewest lanes first."""
    width = widest_vector(dtype, classes)
    whole = classes // width
    found = (LanesConfig(lanes, ceil_div(whole, lanes)) for lanes in (1, 2, 4, 8, 16))
    return tuple(
        one for one in found if one.packs * width <= MOST_VALUES_PART_OF_WARP and one.lanes < 2 * whole
    )


def refusal_of_long(rung: str, classes: int, dtype: str) -> str | None:
    """Return why a rung does not support rows of `classes` elements; None if it does."""
    if lanes_configs(classes, dtype):
        return None
    width = widest_vector(dtype, classes)
    return f"{rung} holds rows of up to {16 * MOST_VALUES_PART_OF_WARP // width * width} classes, not of {classes}"


@dataclass(frozen=True)
class PartOfWarp(Rung[SoftmaxProblem, LanesConfig]):
    def supports(self, problem: SoftmaxProblem) -> str | None:
        too_long = refusal_of_long(self.name, problem.classes, problem.dtype)
        return too_long or columns.refusal_of_dense(self.name, problem.inner)

    def configs(self, problem: SoftmaxProblem) -> tuple[LanesConfig, ...]:
        return lanes_configs(problem.classes, problem.dtype)

    def recipe(self, problem: SoftmaxProblem, config: LanesConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.classes)
        program = _program("part_of_warp", problem, config=config, vector=vector, threads=_THREADS)
        return launch_rows(problem, program, ceil_div(problem.batch, _THREADS // config.lanes), _THREADS)


# Predicted for a million rows of 64, 134 MB in, 134 MB out, 63 us at copy rate: 68 us.
PART_OF_WARP = PartOfWarp(
    "part_of_warp",
    "a short row in the registers of part of a warp, so that no lane is idle",
    below="block_per_row",
    # one warp per row has 8 of 32 lanes busy with 64 classes: 230 us
    predicted_gain=3.4,
)


# --- the reference


def random_inputs(problem: SoftmaxProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Standard normal: with a wider spread a few large probabilities would hide errors in all the others."""
    return {"x": draw.stored(problem, *_sizes(problem))}


def empty_output(problem: SoftmaxProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(_sizes(problem), dtype=STORAGE[problem.dtype], device=device)


def peer(problem: SoftmaxProblem, inputs: Tensors) -> torch.Tensor:
    function = torch.log_softmax if problem.log else torch.softmax
    return activation.apply(problem, function(inputs["x"], 1))


def _sizes(problem: SoftmaxProblem) -> tuple[int, ...]:
    if problem.inner == 1:
        return problem.batch, problem.classes
    return problem.batch, problem.classes, problem.inner


# --- the operation


class SoftmaxOperation(Operation[SoftmaxProblem]):
    name = "softmax"
    problem = SoftmaxProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("softmax", (NAIVE, WARP_PER_ROW, BLOCK_PER_ROW, PART_OF_WARP, COLUMNS))
    problems = (
        *(SoftmaxProblem(batch, 1000) for batch in (1, 32, 256, 10_000)),
        SoftmaxProblem(262_144, 64),
        SoftmaxProblem(64, 64, inner=4096),
    )
    """Class probabilities, and softmax over an image's channels in NHWC and in NCHW."""
    small_problems = (
        SoftmaxProblem(5, 1000),
        SoftmaxProblem(3, 33),
        SoftmaxProblem(1, 2310),
        SoftmaxProblem(2, 33_002),
        SoftmaxProblem(600, 24),
        SoftmaxProblem(4, 1),
        SoftmaxProblem(2, 67, inner=40),
        SoftmaxProblem(1, 5, inner=9),
        SoftmaxProblem(3, 258, log=True),
        SoftmaxProblem(2, 33_002, log=True),
        SoftmaxProblem(2, 67, inner=40, log=True),
        SoftmaxProblem(3, 33, activation="2 * x"),
        SoftmaxProblem(2, 33_002, relu=True),
        SoftmaxProblem(600, 24, log=True, activation="silu(x)"),
        SoftmaxProblem(2, 67, inner=40, activation="tanh(x)"),
    )
    """Small problems: rows of one warp, of several, and too wide for registers; widths that no vector divides; strided
    rows; logarithms; activations."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("columns", "part_of_warp", "block_per_row")


SOFTMAX = SoftmaxOperation()


# --- the PyTorch operator


def softmax(x: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """Softmax along the last dimension, in x's dtype with fp32 sums. `rung` names a rung of the ladder."""
    return OPERATOR(x, rung)


def _plan(x: torch.Tensor, rung: str | None = None) -> CallPlan:
    return CallPlan(
        SOFTMAX, lambda: rows.empty_like(x), lambda: SoftmaxProblem(*rows.sizes(x), NAMES[x.dtype])
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (output,) = ctx.saved_tensors
    return torch.ops.aten._softmax_backward_data(gradient, output, -1, output.dtype), None


OPERATOR = define_planned("softmax", _plan, "x: ... C", setup=_setup, backward=_backward)
