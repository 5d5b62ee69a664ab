"""The k likeliest classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Config, Rung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import rows
from escalade.ops.shared.rows import LAYOUTS, PerRow, check_fields, launch_rows
from escalade.ops.softmax import softmax_rounding

# --- the problem


MOST_K = 32
MOST_CLASSES = 2**24 - 1
"""Largest number of classes: up to here fp32 represents every class index exactly."""
STEP = 1 / 16
"""Difference between successive logits of the random inputs."""


@dataclass(frozen=True)
class TopKProblem(Named):
    """y[row] = the k largest of softmax(x[row]) in descending order, then their k classes.

    x is [batch][classes], y is [batch][2 * k] in fp32 for every dtype. Classes are ranked by logit: NaN first, as in
    torch.topk, and the lower class among equal ones.
    """

    NAME: ClassVar = NamePattern("top_k", "{classes}_k{k}_b{batch}")

    batch: int
    classes: int
    k: int
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        check_fields("top_k", self, DTYPES, {"classes": self.classes, "k": self.k})
        if self.k > min(MOST_K, self.classes):
            raise UnsupportedError(
                f"k is {self.k}: top_k supports up to {MOST_K}, and at most the number of classes ({self.classes})"
            )
        if self.classes > MOST_CLASSES:
            raise UnsupportedError(
                f"{self.classes} classes: top_k stores class indices in fp32 and supports {MOST_CLASSES} at most"
            )

    @property
    def flops(self) -> int:
        """Per element: comparison with the maximum and with the k-th, subtraction, exponential, addition."""
        return 5 * self.batch * self.classes

    @property
    def bytes(self) -> int:
        return self.batch * (self.classes * ELEMENT_BYTES[self.dtype] + 2 * self.k * 4)

    @property
    def rounding(self) -> float:
        """Error relative to all of y, of which only the probabilities are inexact.

        It is a probability's error, scaled down by the magnitude of the class indices. So a probability that is off by
        a thousandth is out of bounds, and so is a wrong class. The inputs' logits are STEP apart, so probabilities are
        a geometric sequence.
        """
        shares = [math.exp(-STEP * i) for i in range(min(self.classes, 512))]
        probabilities = math.sqrt(sum((share / sum(shares)) ** 2 for share in shares[: self.k]))
        classes = math.sqrt(self.k / 3) * self.classes / 2
        return softmax_rounding(self.classes) * probabilities / math.hypot(classes, probabilities)


# --- rungs


# Predictions are for k = 5 and 10,000 rows of 1,000 classes in fp16: 20 MB, 4.7 us at copy rate.
NAIVE = PerRow[TopKProblem](
    "naive", "one thread per row, in two passes", None, None, "top_k", row_threads=1, threads=(64, 32, 128)
)

WARP_PER_ROW = PerRow[TopKProblem](
    "warp_per_row",
    "one warp per row, in one pass: each lane keeps its best, and shuffles find the best of the lanes' first",
    below="naive",
    # naive: 2,000 sequential loads of some 200 clocks, and 1,000 divergent visits to the list, 60 clocks each: 0.5 ms
    # in two waves. One warp per row: 19 rows per scheduler, 32 steps of some 100 instructions: 40 us.
    predicted_gain=12.0,
    operation="top_k",
    row_threads=32,
    threads=(256, 128, 512),
)


@dataclass(frozen=True)
class BlockConfig(Config):
    warps: int
    """Warps per row."""
    in_flight: int
    """Loads in flight per thread."""
    rows: int
    """Rows per CTA."""


@dataclass(frozen=True)
class BlockPerRow(Rung[TopKProblem, BlockConfig]):
    def configs(self, problem: TopKProblem) -> tuple[BlockConfig, ...]:
        """For many rows prefer one warp each if about four loads per lane cover it; for few rows as many warps as have
        work."""
        packs = problem.classes // widest_vector(problem.dtype, problem.classes)
        each = 32 if problem.batch <= self.card.busy_blocks else 32 * 8
        offered = []
        for warps in sorted((1, 2, 4, 8, 16), key=lambda warps: abs(ceil_div(packs, each) - warps)):
            in_flight = min(4, ceil_div(packs, 32 * warps))
            offered.append(BlockConfig(warps, in_flight, 4 if warps == 1 else 1))
        return tuple(offered)

    def recipe(self, problem: TopKProblem, config: BlockConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.classes)
        program = Program.of("top_k/block_per_row.cu", problem=problem, config=config, vector=vector)
        grid = ceil_div(problem.batch, config.rows)
        return launch_rows(problem, program, grid, 32 * config.warps * config.rows)


BLOCK_PER_ROW = BlockPerRow(
    "block_per_row",
    "up to 16-byte loads, one rescaling of sums per load, and as many warps per row as it has work for, their lists "
    "merged in shared memory",
    below="warp_per_row",
    # One exponential per element instead of two and an eighth of the loads; the lists cost the same: 28 us.
    predicted_gain=1.4,
)


# --- the reference


def random_inputs(problem: TopKProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Logits STEP apart in a random order: exact in every dtype, and distinct among the best.

    Otherwise rounding errors would decide between classes. From the 512th on they are all equal.
    """
    keys = draw.uniform(problem.batch, problem.classes)
    places = keys.argsort(-1).clamp_(max=511)
    return {"x": (16 - STEP * places).to(STORAGE[problem.dtype])}


def empty_output(problem: TopKProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, 2 * problem.k), dtype=torch.float32, device=device)


def exact(problem: TopKProblem, inputs: Tensors) -> torch.Tensor:
    """A stable sort of the logits: NaN first, equal ones in the order of classes."""
    x = inputs["x"].double()
    classes = x.sort(dim=-1, descending=True, stable=True).indices[..., : problem.k]
    return torch.cat((torch.softmax(x, -1).gather(-1, classes), classes.double()), -1)


def peer(problem: TopKProblem, inputs: Tensors) -> torch.Tensor:
    """torch.topk of an fp32 softmax. It breaks ties arbitrarily, but the best inputs have none."""
    probabilities, classes = torch.softmax(inputs["x"], -1, dtype=torch.float32).topk(problem.k, -1)
    return torch.cat((probabilities, classes.float()), -1)


# --- the operation


class TopKOperation(Operation[TopKProblem]):
    name = "top_k"
    problem = TopKProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("top_k", (NAIVE, WARP_PER_ROW, BLOCK_PER_ROW))
    problems = tuple(TopKProblem(batch, 1000, 5) for batch in (1, 32, 256, 10_000))
    small_problems = (
        TopKProblem(5, 1000, 5),
        TopKProblem(3, 33, 4),
        TopKProblem(2, 2310, 32),
        TopKProblem(600, 24, 1),
        TopKProblem(3, 7, 7),
        TopKProblem(1, 1, 1),
    )
    """Small problems: one warp per row and several, k equal to the number of classes, widths that no vector divides,
    lists that are not filled."""
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: TopKProblem) -> tuple[str, ...]:
        return ("block_per_row",)


TOP_K = TopKOperation()


# --- the PyTorch operator


def top_k(x: torch.Tensor, k: int, *, rung: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of softmax(x) along the last dimension, descending in fp32, and their classes.

    Classes are ranked by logit: NaN first, and the lower class among equal ones. `torch.ops.escalade.top_k` returns
    both in one tensor. `rung` names a rung of the ladder instead of the chosen one.
    """
    both = OPERATOR(x, k, rung)
    return both[..., :k], both[..., k:].long()


def _plan(x: torch.Tensor, k: int, rung: str | None = None) -> CallPlan:
    if not 1 <= k <= MOST_K:
        raise UnsupportedError(f"k is {k}: top_k supports 1 to {MOST_K}")
    return CallPlan(
        TOP_K,
        lambda: rows.empty_like(x, 2 * k, torch.float32),
        lambda: TopKProblem(*rows.sizes(x), k, NAMES[x.dtype]),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.k = inputs[:2]
    ctx.save_for_backward(x, output[..., ctx.k :].long())


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    """Differentiate the probabilities through PyTorch's softmax; class indices are piecewise constant."""
    x, classes = ctx.saved_tensors
    probabilities = torch.softmax(x, -1, dtype=torch.float32)
    wanted = torch.zeros_like(probabilities).scatter(-1, classes, gradient[..., : ctx.k])
    return torch.ops.aten._softmax_backward_data(wanted, probabilities, -1, x.dtype), None, None


OPERATOR = define_planned("top_k", _plan, "x: ... C", setup=_setup, backward=_backward)
