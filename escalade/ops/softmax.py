"""Softmax along the last dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, dtype_of, element, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.rung import Config, Rung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import columns, row_rungs, rows
from escalade.ops.shared.rows import LAYOUTS, check_fields

# --- the problem


@dataclass(frozen=True)
class SoftmaxProblem(Named):
    """y[row] = exp(x[row] - max) / sum(exp(x[row] - max)); x and y are [batch][classes][inner] of one dtype."""

    NAME: ClassVar = NamePattern(
        "softmax",
        "{classes}_b{batch}[_inner{inner}]",
    )

    batch: int
    classes: int
    dtype: str = "fp32"
    layout: str = "flat"
    inner: int = 1
    """Rows of each of the batch, which lie side by side, and elements from one of a row to its next: the pixels of an
    image, for its channels in NCHW."""

    def __post_init__(self) -> None:
        check_fields("softmax", self, DTYPES, {"classes": self.classes, "inner": self.inner})

    @property
    def rows(self) -> int:
        return self.batch * self.inner

    @property
    def elements(self) -> int:
        return self.rows * self.classes

    @property
    def flops(self) -> int:
        """A comparison, a difference, an exponential, an addition and a product an element."""
        return 5 * self.elements

    @property
    def bytes(self) -> int:
        return 2 * self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        return softmax_rounding(self.classes)


def softmax_rounding(classes: int) -> float:
    """The rounding of a probability: logit - max, some 8 in size, rounded by 2^-24 of itself; then exp, sum and
    quotient."""
    return 2.0**-24 * (8 + math.sqrt(1 + classes / 6))


# --- rungs, per_row: softmax with a thread or a warp a row


def kernel_constants(problem: SoftmaxProblem) -> dict[str, Constant]:
    return {"Element": element(problem.dtype)}


@dataclass(frozen=True)
class PerRow(row_rungs.PerRow[SoftmaxProblem]):
    operation = "softmax"

    def supports(self, problem: SoftmaxProblem) -> str | None:
        return columns.refusal_of_dense(self.name, problem.inner)

    def constants(self, problem: SoftmaxProblem) -> dict[str, Constant]:
        return kernel_constants(problem)


# Predictions are for 10,000 rows of 1,000 classes in fp16: 20 MB in, 20 MB out, 9.4 us at the rate of a copy.
NAIVE = PerRow("naive", "one thread a row, in three passes", None, None, row_threads=1, threads=(64, 32, 128))

WARP_PER_ROW = PerRow(
    "warp_per_row",
    "a warp a row: largest and sum in one pass, merged by shuffles, then a pass that writes",
    below="naive",
    # naive: 157 blocks on 132 multiprocessors, 2 warps each with one load of L1 or L2 at a time, 3,000 times some
    # 200 clocks, in two rounds: 0.7 ms. A warp a row: 10 M elements, two exponentials each: 25 us.
    predicted_gain=28.0,
    row_threads=32,
    threads=(256, 128, 512),
)


# --- rungs, block_per_row: softmax with a row in the registers of as many warps as it takes


@dataclass(frozen=True)
class BlockConfig(Config):
    warps: int
    """Warps of a row."""
    packs: int
    """Accesses that hold a thread's part of the row in registers; 0 if it is read twice instead."""
    rows: int
    """Rows of a block."""


MOST_VALUES = 32
"""Values of a thread at most, in registers: 1,024 threads have 64 each."""


def held_configs(classes: int, batch: int, dtype: str, card: Card) -> tuple[BlockConfig, ...]:
    """Ways to hold a row in registers: for many rows as few warps each as can, best a single one; for few rows as many
    as find work."""
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
        constants = {
            **kernel_constants(problem),
            "VECTOR": widest_vector(problem.dtype, problem.classes),
            "WARPS": config.warps,
            "PACKS": config.packs,
            "ROWS": config.rows,
        }
        program = Program.of("softmax/block_per_row.cu", "softmax_block_per_row", constants)
        grid = ceil_div(problem.batch, config.rows)
        return row_rungs.launch(problem, program, grid, 32 * config.warps * config.rows)


# Predictions are for 10,000 rows of 1,000 classes in fp16: 20 MB in, 20 MB out, 9.4 us at the rate of a copy.
BLOCK_PER_ROW = BlockPerRow(
    "block_per_row",
    "16 bytes a load and the row in the registers of as many warps as it takes: read once, each exponential once",
    below="warp_per_row",
    # 11 us, near the copy, against 25.
    predicted_gain=2.2,
)


# --- rungs, columns: softmax of rows that lie side by side


@dataclass(frozen=True)
class Columns(Rung[SoftmaxProblem, columns.ColumnsConfig]):
    def supports(self, problem: SoftmaxProblem) -> str | None:
        return columns.refusal(self.name, problem.rows, problem.classes, problem.inner)

    def configs(self, problem: SoftmaxProblem) -> tuple[columns.ColumnsConfig, ...]:
        p = problem
        return columns.configs(p.rows, p.classes, p.inner, p.dtype, self.card)

    def recipe(self, problem: SoftmaxProblem, config: columns.ColumnsConfig) -> Recipe:
        p = problem
        constants = {**kernel_constants(p), **config.constants(p.classes)}
        call = KernelCall(
            Program.of("softmax/columns.cu", "softmax_columns", constants),
            (config.grid(p.rows), 1, 1),
            (32 * config.parts, 1, 1),
            (Buffer("x"), Buffer("y"), p.rows, p.classes, p.inner),
            overlap=True,
        )
        return Recipe((call,))


# Predictions are for 64 channels of 64 x 64 pixels, batch 64, fp16: 34 MB in, 34 MB out, 16 us at the rate of a copy.
COLUMNS = Columns(
    "columns",
    "neighbouring rows a lane, whose classes the warps of a block share and hold in registers: read once",
    below=None,
    predicted_gain=None,
)


# --- rungs, part_of_warp: softmax with a short row in the registers of a part of a warp


MOST_VALUES_PART_OF_WARP = 16
"""Values of a lane at most: several rows of a warp are under way at once, so it need not hold many."""
_THREADS = 128


@dataclass(frozen=True)
class LanesConfig(Config):
    lanes: int
    """Lanes of a row."""
    packs: int
    """Accesses that hold a lane's part of the row."""


def lanes_configs(classes: int, dtype: str) -> tuple[LanesConfig, ...]:
    """Ways to hold a short row in registers: by the fewest lanes that can, then by more."""
    width = widest_vector(dtype, classes)
    whole = classes // width
    found = (LanesConfig(lanes, ceil_div(whole, lanes)) for lanes in (1, 2, 4, 8, 16))
    return tuple(
        one for one in found if one.packs * width <= MOST_VALUES_PART_OF_WARP and one.lanes < 2 * whole
    )


def refusal_of_long(rung: str, classes: int, dtype: str) -> str | None:
    """Why a rung does not take rows of so many classes; None if it does."""
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
        constants = {
            **kernel_constants(problem),
            "VECTOR": widest_vector(problem.dtype, problem.classes),
            "LANES": config.lanes,
            "PACKS": config.packs,
            "THREADS": _THREADS,
        }
        program = Program.of("softmax/part_of_warp.cu", "softmax_part_of_warp", constants)
        return row_rungs.launch(problem, program, ceil_div(problem.batch, _THREADS // config.lanes), _THREADS)


# Predictions are for 10,000 rows of 1,000 classes in fp16, which this rung does not take; for a million rows of 64,
# 134 MB in, 134 MB out, 63 us at the rate of a copy: 68 us.
PART_OF_WARP = PartOfWarp(
    "part_of_warp",
    "a short row in the registers of a part of a warp, so that no lane is idle",
    below="block_per_row",
    # of 64 classes 8 lanes of 32 are at work there: 230 us
    predicted_gain=3.4,
)


# --- problems to measure and to test


PROBLEMS = (
    *(SoftmaxProblem(batch, 1000) for batch in (1, 32, 256, 10_000)),
    SoftmaxProblem(262_144, 64),
    SoftmaxProblem(64, 64, inner=4096),
)
"""Chances of classes, and of an image's channels in NHWC and in NCHW."""

SMALL_PROBLEMS = (
    SoftmaxProblem(5, 1000),
    SoftmaxProblem(3, 33),
    SoftmaxProblem(1, 2310),
    SoftmaxProblem(2, 33_002),
    SoftmaxProblem(600, 24),
    SoftmaxProblem(4, 1),
    SoftmaxProblem(2, 67, inner=40),
    SoftmaxProblem(1, 5, inner=9),
)
"""Small problems that between them have rows of one warp, of several, and too wide for registers; widths that no vector
divides; and rows that lie side by side."""


# --- the reference


def random_inputs(problem: SoftmaxProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates: much wider, and a few large probabilities would hide errors in all the others."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(_sizes(problem), generator=generator, device=device)
    return {"x": x.to(STORAGE[problem.dtype])}


def empty_output(problem: SoftmaxProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(_sizes(problem), dtype=STORAGE[problem.dtype], device=device)


def exact(problem: SoftmaxProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The probabilities in float64."""
    return torch.softmax(inputs["x"].double(), 1)


def peer(problem: SoftmaxProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.softmax(inputs["x"], 1)


def _sizes(problem: SoftmaxProblem) -> tuple[int, ...]:
    if problem.inner == 1:
        return problem.batch, problem.classes
    return problem.batch, problem.classes, problem.inner


# --- the operation


class Softmax(Operation[SoftmaxProblem]):
    name = "softmax"
    problem = SoftmaxProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("softmax", (NAIVE, WARP_PER_ROW, BLOCK_PER_ROW, PART_OF_WARP, COLUMNS))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: SoftmaxProblem) -> tuple[str, ...]:
        return ("columns", "part_of_warp", "block_per_row")


SOFTMAX = Softmax()


# --- the PyTorch operator


def softmax(x: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """The softmax along the last dimension, in x's dtype; the sums are fp32. `rung` names one rung of the ladder."""
    return OPERATOR(x, rung)


def _plan(x: torch.Tensor, rung: str | None = None) -> CallPlan:
    rows.check_matrix("softmax", x)
    problem = SoftmaxProblem(rows.rows_of(x), x.shape[-1], dtype_of("softmax", x))
    return rows.plan(SOFTMAX, problem, rung, ("x",), torch.empty(x.shape, dtype=x.dtype, device=x.device))


def _fake(x: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    rows.check_matrix("softmax", x)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (output,) = ctx.saved_tensors
    return torch.ops.aten._softmax_backward_data(gradient, output, -1, output.dtype), None


OPERATOR = define_planned(
    "softmax(Tensor x, str? rung=None) -> Tensor", _plan, _fake, setup=_setup, backward=_backward
)
