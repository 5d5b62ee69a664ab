"""The cross-entropy of logits and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, dtype_of, element, widest_vector
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung
from escalade.ops.calling.call import CallPlan, Packer, prepare
from escalade.ops.calling.library import define_planned, require_same_device
from escalade.ops.reduce import total
from escalade.ops.shared.losses import (
    REDUCTIONS,
    check_scale,
    empty_loss,
    gradient_of,
    loss_buffer,
    no_second_derivative,
)
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
    """loss = the mean or sum over rows of -log softmax(x)[target]; with `gradient` scale * d loss / d x as well.

    With a `smoothing` s the target has 1 - s of what is wanted, and s is spread over all classes. Rows whose target is
    `ignored` do not count. The loss is fp32, `scale` an fp32 number on the device, targets are int64; x and the
    gradient, [batch][classes], are of `dtype`. With a gradient that one is the buffer y, without it the loss is.
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
            raise UnsupportedError(f"a label smoothing of {self.smoothing}: it is between 0 and 1")

    @property
    def counts_first(self) -> bool:
        """Whether the rows that count have to be known before the first of them is done."""
        return self.reduction == "mean" and self.ignored is not None

    @property
    def elements(self) -> int:
        return self.batch * self.classes

    @property
    def flops(self) -> int:
        """A comparison, a difference, an exponential and an addition an element; a product and a difference more for a
        gradient."""
        return self.elements * (6 if self.gradient else 4)

    @property
    def bytes(self) -> int:
        passes = 2 if self.gradient else 1
        return passes * self.elements * ELEMENT_BYTES[self.dtype] + self.batch * TARGET_BYTES

    @property
    def rounding(self) -> float:
        return softmax_rounding(self.classes)


# --- rungs, rows: a warp, several or a part of one a row, a partial sum a block: the rungs of cross_entropy


_PARTIALS, _COUNTED, _TARGET = Buffer("partials"), Buffer("counted", optional=True), Buffer("target")
_PARTIAL_BYTES = 4
_COUNT_THREADS = 256
_PART_THREADS = 128
_COUNT_BLOCKS = 32
"""Blocks that count rows at most: a lane of a warp then reads one's count each."""

_COUNTED_HERE = 512
"""Rows up to which each warp looks at all targets, 16 a lane: less than a launch takes."""


@dataclass(frozen=True)
class Rows(Rung[CrossEntropyProblem, BlockConfig]):
    wide: bool
    """Whether an access has up to 16 bytes and a row stays in registers, or a warp reads its elements one by one."""

    def supports(self, problem: CrossEntropyProblem) -> str | None:
        return None

    def configs(self, problem: CrossEntropyProblem) -> tuple[BlockConfig, ...]:
        if not self.wide:
            return tuple(BlockConfig(1, 0, rows) for rows in (8, 4, 16))
        return held_configs(problem.classes, problem.batch, problem.dtype, self.card)

    def recipe(self, problem: CrossEntropyProblem, config: BlockConfig) -> Recipe:
        vector = widest_vector(problem.dtype, problem.classes) if self.wide else 1
        held: dict[str, Constant] = {
            "VECTOR": vector, "WARPS": config.warps, "PACKS": config.packs, "ROWS": config.rows,
        }  # fmt: skip
        threads = 32 * config.warps * config.rows
        return _launches(problem, "rows", held, config.rows, threads)


@dataclass(frozen=True)
class PartOfWarp(Rung[CrossEntropyProblem, LanesConfig]):
    def supports(self, problem: CrossEntropyProblem) -> str | None:
        return refusal_of_long(self.name, problem.classes, problem.dtype)

    def configs(self, problem: CrossEntropyProblem) -> tuple[LanesConfig, ...]:
        return lanes_configs(problem.classes, problem.dtype)

    def recipe(self, problem: CrossEntropyProblem, config: LanesConfig) -> Recipe:
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


# --- problems to measure and to test


PROBLEMS = (
    *(
        CrossEntropyProblem(batch, 1000, smoothing=0.1, ignored=-100, gradient=gradient)
        for batch in (256, 65_536)
        for gradient in (False, True)
    ),
    *(CrossEntropyProblem(1 << 20, classes, ignored=-100, gradient=True) for classes in (2, 21)),
)
"""A batch of ImageNet's, as many rows as the pixels or words of one, and the pixels of images by few classes."""

SMALL_PROBLEMS = (
    CrossEntropyProblem(5, 1000, ignored=-100, gradient=True),
    CrossEntropyProblem(70, 24, "sum", smoothing=0.1, gradient=True),
    CrossEntropyProblem(3, 33, smoothing=0.2, ignored=2),
    CrossEntropyProblem(600, 10, ignored=-1),
    CrossEntropyProblem(1, 33_002, gradient=True),
    CrossEntropyProblem(4, 1, "sum"),
    CrossEntropyProblem(130, 21, smoothing=0.1, ignored=-100, gradient=True),
)
"""Small problems that between them have rows of a part of a warp, of one, of several, and too wide for registers;
widths that no vector divides; rows that do not count, few and many; both reductions."""


# --- the reference


_NEVER = -1
"""A target that no row has."""


def random_inputs(problem: CrossEntropyProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates, and targets of which every third does not count, if any may."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn((p.batch, p.classes), generator=generator, device=device)
    target = torch.randint(0, p.classes, (p.batch,), generator=generator, device=device)
    if p.ignored is not None:
        target[1::3] = p.ignored
    inputs = {"x": x.to(STORAGE[p.dtype]), "target": target}
    # Large enough that the gradients of a mean are no subnormal numbers in fp16.
    scale = torch.tensor([0.75 * (p.batch if p.reduction == "mean" else 1)], device=device)
    return {**inputs, "scale": scale} if p.gradient else inputs


def empty_output(problem: CrossEntropyProblem, device: torch.device) -> torch.Tensor:
    if problem.gradient:
        return torch.empty((problem.batch, problem.classes), dtype=STORAGE[problem.dtype], device=device)
    return torch.empty(1, device=device)


def exact(problem: CrossEntropyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradient, or without it the loss, in float64."""
    return _asked(problem, inputs, torch.float64)


def peer(problem: CrossEntropyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradient or the loss by PyTorch in fp32; a gradient is rounded to the problem's dtype."""
    found = _asked(problem, inputs, torch.float32)
    return found.to(STORAGE[problem.dtype]) if problem.gradient else found


def loss(problem: CrossEntropyProblem, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """PyTorch's loss in the dtype of x, one element."""
    found = F.cross_entropy(
        x, target, reduction=problem.reduction, label_smoothing=problem.smoothing,
        ignore_index=_NEVER if problem.ignored is None else problem.ignored,
    )  # fmt: skip
    return found.reshape(1)


def _asked(
    problem: CrossEntropyProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    x = inputs["x"].to(dtype)
    if not problem.gradient:
        return loss(problem, x, inputs["target"])
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return gradient_of(loss(problem, x, inputs["target"]), x, inputs["scale"])


# --- the operation


class CrossEntropy(Operation[CrossEntropyProblem]):
    name = "cross_entropy"
    problem = CrossEntropyProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("cross_entropy", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: CrossEntropyProblem) -> tuple[str, ...]:
        return ("part_of_warp", "block_per_row")

    def extra_outputs(self, problem: CrossEntropyProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return empty_loss(problem, device)

    def extra_references(self, problem: CrossEntropyProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        if not problem.gradient:
            return {}
        return {"loss": loss(problem, inputs["x"].double(), inputs["target"])}


CROSS_ENTROPY = CrossEntropy()


# --- the PyTorch operator


_SETTINGS = "str reduction='mean', int? ignore_index=-100, float label_smoothing=0.0, str? rung=None"


def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """The cross-entropy of logits, [rows][classes] or [images][classes][…], and classes, int64; an fp32 number, and
    always the same bits.

    Rows whose target is `ignore_index` do not count; with None all do, and no launch counts them first. A target that
    is no class makes the loss NaN. The backward pass computes the gradient anew from x, in one pass. `rung` names one
    rung.
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
    """The loss, and `scale` times its gradient by x, in one pass: `scale` is an fp32 number on the device, what a loss
    is multiplied by before its gradients are taken."""
    loss, gradient = _WITH_GRADIENT(x, target, scale, reduction, ignore_index, label_smoothing, rung)
    return loss, gradient


def _problem(
    x: torch.Tensor,
    target: torch.Tensor,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    gradient: bool,
) -> CrossEntropyProblem:
    dtype = dtype_of("cross_entropy", x)
    require_same_device(x, "target", target)
    if x.dim() < 2 or target.shape != x.shape[:1] + x.shape[2:] or target.dtype != torch.int64:
        raise UnsupportedError(
            f"x is {list(x.shape)} and target {list(target.shape)} of {target.dtype}; cross_entropy takes x of "
            "[rows][classes] or [images][classes][…], and a class for each row or pixel, of torch.int64"
        )
    return CrossEntropyProblem(
        target.numel(), x.shape[1], reduction, label_smoothing, ignore_index, gradient, dtype
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The classes of each row or pixel side by side; a view of images in NHWC."""
    return (x if x.dim() == 2 else x.movedim(1, -1)).contiguous()


_LAY: dict[str, Packer] = {"x": _rows, "target": torch.Tensor.contiguous}


def _of_nothing(problem: CrossEntropyProblem, loss: torch.Tensor) -> torch.Tensor:
    """The loss where there are no rows."""
    return loss.fill_(float("nan") if problem.reduction == "mean" else 0.0)


def _fake(
    x: torch.Tensor, target: torch.Tensor, reduction: str = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, rung: str | None = None,
) -> torch.Tensor:  # fmt: skip
    _problem(x, target, reduction, ignore_index, label_smoothing, gradient=False)
    return x.new_empty((), dtype=torch.float32)


def _plan(
    x: torch.Tensor, target: torch.Tensor, reduction: str, ignore_index: int | None, label_smoothing: float,
    rung: str | None,
) -> CallPlan:  # fmt: skip
    problem = _problem(x, target, reduction, ignore_index, label_smoothing, gradient=False)
    prepared = prepare(CROSS_ENTROPY, problem, x.device, rung)
    finish = None if problem.batch else partial(_of_nothing, problem)
    return CallPlan(prepared, {"y": torch.empty((), device="meta")}, _LAY, finish=finish)


def _fake_with_gradient(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, reduction: str = "mean",
    ignore_index: int | None = -100, label_smoothing: float = 0.0, rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _problem(x, target, reduction, ignore_index, label_smoothing, gradient=True)
    check_scale("cross_entropy", x, scale)
    rows = x.movedim(1, -1)
    return x.new_empty((), dtype=torch.float32), rows.new_empty(rows.shape).movedim(-1, 1)


def _plan_with_gradient(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, reduction: str, ignore_index: int | None,
    label_smoothing: float, rung: str | None,
) -> CallPlan:  # fmt: skip
    problem = _problem(x, target, reduction, ignore_index, label_smoothing, gradient=True)
    loss, gradient = _fake_with_gradient(x, target, scale, reduction, ignore_index, label_smoothing)
    prepared = prepare(CROSS_ENTROPY, problem, x.device, rung)
    finish = None if problem.batch else lambda made: (_of_nothing(problem, made[0]), made[1])
    return CallPlan(prepared, {"loss": loss, "y": gradient}, _LAY, results=("loss", "y"), finish=finish)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, target, *ctx.settings, _ = inputs
    ctx.save_for_backward(x, target)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, target = ctx.saved_tensors
    _, found = _WITH_GRADIENT(x, target, gradient, *ctx.settings, None)
    return found, None, None, None, None, None


OPERATOR = define_planned(
    f"cross_entropy(Tensor x, Tensor target, {_SETTINGS}) -> Tensor",
    _plan,
    _fake,
    setup=_setup,
    backward=_backward,
)
_SETUP_NONE, _BACKWARD_NONE = no_second_derivative("cross_entropy")
_WITH_GRADIENT = define_planned(
    f"cross_entropy_with_gradient(Tensor x, Tensor target, Tensor scale, {_SETTINGS}) -> (Tensor, Tensor)",
    _plan_with_gradient,
    _fake_with_gradient,
    setup=_SETUP_NONE,
    backward=_BACKWARD_NONE,
)
