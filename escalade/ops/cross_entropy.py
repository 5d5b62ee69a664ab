"""Cross-entropy of logits and classes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung
from escalade.ops.calling.call import Packer
from escalade.ops.reduce import total
from escalade.ops.shared.losses import REDUCTIONS, define_loss, empty_loss, gradient_of, loss_buffer
from escalade.ops.shared.rows import LAYOUTS, check_fields
from escalade.ops.softmax import (
    BlockConfig,
    LanesConfig,
    held_configs,
    lanes_configs,
    refusal_of_long,
    softmax_rounding,
)

# --- the problem


TARGET_BYTES = 8


@dataclass(frozen=True)
class CrossEntropyProblem(Named):
    """loss = mean or sum over rows of -log softmax(x)[target]; with `gradient` also scale * d loss / d x.

    With `smoothing` s the target has weight 1 - s, and s is spread over all classes. Rows whose target is `ignored` do
    not count. The loss is fp32, `scale` an fp32 number on the device, targets are int64; x and the gradient,
    [batch][classes], have the `dtype`. Buffer y is the gradient if there is one, otherwise the loss.
    """

    NAME: ClassVar = NamePattern(
        "cross-entropy",
        "{reduction}_{classes}_b{batch}[_smooth{smoothing}][_ignore{ignored}]{gradient?_gradient}",
    )

    batch: int
    classes: int
    reduction: str = "mean"
    smoothing: float = 0.0
    ignored: int | None = None
    gradient: bool = False
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        check_fields("cross_entropy", self, DTYPES, {"classes": self.classes})
        require("cross_entropy", "reduction", self.reduction, REDUCTIONS)
        if not 0 <= self.smoothing <= 1:
            raise UnsupportedError(f"label smoothing is {self.smoothing}: it must be between 0 and 1")

    @property
    def counts_first(self) -> bool:
        """True if the number of rows that count must be known before the first row is computed."""
        return self.reduction == "mean" and self.ignored is not None

    @property
    def elements(self) -> int:
        return self.batch * self.classes

    @property
    def flops(self) -> int:
        """Per element: comparison, difference, exponential, addition; a product and a difference for a gradient."""
        return self.elements * (6 if self.gradient else 4)

    @property
    def bytes(self) -> int:
        passes = 2 if self.gradient else 1
        return passes * self.elements * ELEMENT_BYTES[self.dtype] + self.batch * TARGET_BYTES

    @property
    def rounding(self) -> float:
        return softmax_rounding(self.classes)


# --- rungs


_PARTIALS, _COUNTED, _TARGET = Buffer("partials"), Buffer("counted", optional=True), Buffer("target")
_PARTIAL_BYTES = 4
_COUNT_THREADS = 256
_PART_THREADS = 128
_COUNT_BLOCKS = 32  # most CTAs that count rows: each lane of a warp then reads one count
_COUNTED_HERE = 512
"""Most rows whose targets each warp counts itself, 16 per lane: faster than a launch."""


@dataclass(frozen=True)
class Rows(Rung[CrossEntropyProblem, BlockConfig]):
    wide: bool
    """True for accesses of up to 16 bytes and the row in registers; False for single elements, one warp per row."""

    def configs(self, problem: CrossEntropyProblem) -> tuple[BlockConfig, ...]:
        if not self.wide:
            return tuple(BlockConfig(1, 0, rows) for rows in (8, 4, 16))
        return held_configs(problem.classes, problem.batch, problem.dtype, self.card)

    def recipe(self, problem: CrossEntropyProblem, config: BlockConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.classes) if self.wide else 1
        scope = {"config": config, "vector": vector}
        return _launches(problem, "rows", scope, config.rows, 32 * config.warps * config.rows)


@dataclass(frozen=True)
class PartOfWarp(Rung[CrossEntropyProblem, LanesConfig]):
    def supports(self, problem: CrossEntropyProblem) -> str | None:
        return refusal_of_long(self.name, problem.classes, problem.dtype)

    def configs(self, problem: CrossEntropyProblem) -> tuple[LanesConfig, ...]:
        return lanes_configs(problem.classes, problem.dtype)

    def recipe(self, problem: CrossEntropyProblem, config: LanesConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.classes)
        scope = {"config": config, "vector": vector, "threads": _PART_THREADS}
        return _launches(problem, "rows_part_of_warp", scope, _PART_THREADS // config.lanes, _PART_THREADS)


def _launches(
    problem: CrossEntropyProblem, stem: str, scope: dict[str, Any], rows: int, threads: int
) -> Recipe:
    """Return the launch of a kernel with `rows` rows per CTA, the sum over CTAs after it, and before it the count of
    rows if that is needed."""
    p, counts_here = problem, problem.batch <= _COUNTED_HERE
    grid, counters = ceil_div(p.batch, rows), _counters(p)
    call = kernel_call(
        Program.of(f"cross_entropy/{stem}.cu", problem=p, counts_here=counts_here, **scope),
        grid,
        threads,
        Buffer("x"), _TARGET, Buffer("scale", optional=True), _COUNTED,
        Buffer("y" if p.gradient else "", optional=True), _PARTIALS, p.batch, p.classes, counters,
        Int64(p.ignored or 0), p.smoothing / p.classes, 1.0 - p.smoothing,
    )  # fmt: skip
    sums = total(_PARTIALS, grid, Buffer(loss_buffer(problem)))
    workspaces = [Workspace(_PARTIALS.name, grid * _PARTIAL_BYTES)]
    if not problem.counts_first or counts_here:
        return Recipe((call, *sums.steps), tuple(workspaces))
    workspaces.append(Workspace(_COUNTED.name, counters * _PARTIAL_BYTES))
    return Recipe((_count(problem, counters), call, *sums.steps), tuple(workspaces))


def _counters(problem: CrossEntropyProblem) -> int:
    return min(_COUNT_BLOCKS, ceil_div(problem.batch, _COUNT_THREADS))


def _count(problem: CrossEntropyProblem, counters: int) -> KernelCall:
    share = ceil_div(problem.batch, counters)
    return kernel_call(
        Program.of("cross_entropy/rows_count.cu", threads=_COUNT_THREADS),
        counters,
        _COUNT_THREADS,
        _TARGET, _COUNTED, problem.batch, share, Int64(problem.ignored or 0),
    )  # fmt: skip


# Predictions are for 65,536 rows of 1,000 classes in fp16 with a gradient: 131 MB in, 131 MB out, 62 us at copy rate.
RUNGS: tuple[Rung[CrossEntropyProblem], ...] = (
    Rows(
        "warp_per_row", "one warp per row, one element per access, read again for the gradient", None, None, wide=False
    ),
    Rows(
        "block_per_row",
        "16-byte loads, and the row in the registers of as many warps as it needs: one read and one exponential each",
        below="warp_per_row",
        # 75 us, near the copy. One warp per row: 66 M elements, two exponentials each and 2-byte accesses, 170 us.
        predicted_gain=2.2,
        wide=True,
    ),
    # Not for 1,000 classes. For a million rows of 16, the classes of an image's pixels, in fp16: 42 MB in, 34 MB out,
    # 18 us at copy rate.
    PartOfWarp(
        "part_of_warp",
        "a short row in the registers of part of a warp, so that no lane is idle",
        below="block_per_row",
        # 25 us. One warp per row has 2 of 32 lanes busy: a million warps of 150 instructions each, 150 us.
        predicted_gain=6.0,
    ),
)  # fmt: skip


# --- the reference


_NEVER = -1  # a target that no row has


def random_inputs(problem: CrossEntropyProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Standard normal logits, and targets of which every third is ignored, if any may be."""
    p = problem
    x = draw.normal(p.batch, p.classes)
    target = draw.integers(p.classes, p.batch)
    if p.ignored is not None:
        target[1::3] = p.ignored
    inputs = {"x": x.to(STORAGE[p.dtype]), "target": target}
    # Large enough that the gradients of a mean are not subnormal in fp16.
    scale = torch.tensor([0.75 * (p.batch if p.reduction == "mean" else 1)], device=draw.device)
    return {**inputs, "scale": scale} if p.gradient else inputs


def empty_output(problem: CrossEntropyProblem, device: torch.device) -> torch.Tensor:
    if problem.gradient:
        return torch.empty((problem.batch, problem.classes), dtype=STORAGE[problem.dtype], device=device)
    return torch.empty(1, device=device)


def exact(problem: CrossEntropyProblem, inputs: Tensors) -> torch.Tensor:
    return _asked(problem, inputs, torch.float64)


def peer(problem: CrossEntropyProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch's gradient or loss in fp32; a gradient is rounded to the problem's dtype."""
    found = _asked(problem, inputs, torch.float32)
    return found.to(STORAGE[problem.dtype]) if problem.gradient else found


def loss(problem: CrossEntropyProblem, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return PyTorch's loss in the dtype of x, one element."""
    found = F.cross_entropy(
        x, target, reduction=problem.reduction, label_smoothing=problem.smoothing,
        ignore_index=_NEVER if problem.ignored is None else problem.ignored,
    )  # fmt: skip
    return found.reshape(1)


def _asked(problem: CrossEntropyProblem, inputs: Tensors, dtype: torch.dtype) -> torch.Tensor:
    x = inputs["x"].to(dtype)
    if not problem.gradient:
        return loss(problem, x, inputs["target"])
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return gradient_of(loss(problem, x, inputs["target"]), x, inputs["scale"])


# --- the operation


class CrossEntropyOperation(Operation[CrossEntropyProblem]):
    name = "cross_entropy"
    problem = CrossEntropyProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("cross_entropy", RUNGS)
    problems = (
        *(
            CrossEntropyProblem(batch, 1000, smoothing=0.1, ignored=-100, gradient=gradient)
            for batch in (256, 65_536)
            for gradient in (False, True)
        ),
        *(CrossEntropyProblem(1 << 20, classes, ignored=-100, gradient=True) for classes in (2, 21)),
    )
    """A batch of ImageNet, as many rows as it has pixels or words, and pixels with few classes."""
    small_problems = (
        CrossEntropyProblem(5, 1000, ignored=-100, gradient=True),
        CrossEntropyProblem(70, 24, "sum", smoothing=0.1, gradient=True),
        CrossEntropyProblem(3, 33, smoothing=0.2, ignored=2),
        CrossEntropyProblem(600, 10, ignored=-1),
        CrossEntropyProblem(1, 33_002, gradient=True),
        CrossEntropyProblem(4, 1, "sum"),
        CrossEntropyProblem(130, 21, smoothing=0.1, ignored=-100, gradient=True),
    )
    """Small problems: rows of part of a warp, of one, of several, and too wide for registers; widths that no vector
    divides; ignored rows, few and many; both reductions."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("part_of_warp", "block_per_row")

    def extra_outputs(self, problem: CrossEntropyProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return empty_loss(problem, device)

    def extra_references(self, problem: CrossEntropyProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        if not problem.gradient:
            return {}
        return {"loss": loss(problem, inputs["x"].double(), inputs["target"])}


CROSS_ENTROPY = CrossEntropyOperation()


# --- the PyTorch operator


def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Cross-entropy of logits, `[rows][classes]` or `[images][classes][…]`, and int64 classes, as an fp32 number.
    Deterministic.

    Rows whose target is `ignore_index` do not count; with None all rows count, which saves a launch. A target that is
    not a class makes the loss NaN. The backward pass recomputes the gradient from x, in one pass. `rung` names a rung
    of the ladder.
    """
    return OPERATOR(x, target, reduction, ignore_index, label_smoothing, rung)


def cross_entropy_with_gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    *,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and `scale` times its gradient by x, in one pass. `scale` is an fp32 number on the device, by
    which the loss is multiplied before differentiation."""
    loss, gradient = _WITH_GRADIENT(x, target, scale, reduction, ignore_index, label_smoothing, rung)
    return loss, gradient


def _problem(
    x: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    *,
    gradient: bool,
) -> CrossEntropyProblem:
    return CrossEntropyProblem(
        target.numel(), x.shape[1], reduction, label_smoothing, ignore_index, gradient, NAMES[x.dtype]
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Make the classes of each row or pixel contiguous; images in NHWC need no copy."""
    return (x if x.dim() == 2 else x.movedim(1, -1)).contiguous()


def _packers(x: torch.Tensor) -> dict[str, Packer]:
    return {"x": _rows, "target": torch.Tensor.contiguous}


def _empty_gradient(x: torch.Tensor) -> torch.Tensor:
    rows = x.movedim(1, -1)
    return rows.new_empty(rows.shape).movedim(-1, 1)


def _of_nothing(problem: CrossEntropyProblem) -> float:
    """Return the loss of zero rows."""
    return math.nan if problem.reduction == "mean" else 0.0


OPERATOR, _WITH_GRADIENT = define_loss(
    CROSS_ENTROPY, _problem, "x: N C ..., target: N ... of int64", _packers, _empty_gradient, _of_nothing
)
