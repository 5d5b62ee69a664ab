"""Connectionist temporal classification: the loss of sequences whose alignment with their labels is unknown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import ThreadsConfig, ThreadsRung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define, define_planned
from escalade.ops.shared import rows

# --- the problem

DTYPES = ("fp32",)
_LABEL_BYTES = 8


@dataclass(frozen=True)
class CtcLossProblem(Named):
    """loss[n] = -log P(target n | x), and y = its gradient by x; all fp32, targets and lengths int64.

    x and y are log-probabilities [steps][batch][classes], targets [batch][labels]. Each sequence has its own numbers of
    steps and labels. The gradient is PyTorch's: that by x in front of a log-softmax.
    """

    NAME: ClassVar = NamePattern(
        "ctc-loss", "{steps}x{classes}_l{labels}_b{batch}[_blank{blank}]{zero_infinity?_finite}"
    )

    batch: int
    steps: int
    classes: int
    labels: int
    blank: int = 0
    zero_infinity: bool = False
    dtype: str = "fp32"
    layout: str = "flat"

    def __post_init__(self) -> None:
        sizes = {"steps": self.steps, "classes": self.classes, "labels": self.labels}
        rows.check_fields("ctc_loss", self, DTYPES, sizes)
        if not 0 <= self.blank < self.classes:
            raise UnsupportedError(f"blank is {self.blank}: it must be one of the {self.classes} classes")

    @property
    def states(self) -> int:
        return 2 * self.labels + 1

    @property
    def flops(self) -> int:
        """Per step and state in both directions 15; per element an exponential and a difference."""
        return self.batch * self.steps * (30 * self.states + 2 * self.classes)

    @property
    def bytes(self) -> int:
        return self.batch * (8 * self.steps * self.classes + _LABEL_BYTES * (self.labels + 2) + 4)

    @property
    def rounding(self) -> float:
        """Probabilities are exponentials of sums of one logarithm per step."""
        return 2.0**-24 * math.sqrt(self.steps) * (1 + self.steps * math.log(self.classes + 1))


# --- the rungs


@dataclass(frozen=True)
class Naive(ThreadsRung[CtcLossProblem]):
    threads = (64, 32, 128, 256)

    def recipe(self, problem: CtcLossProblem, config: ThreadsConfig) -> Recipe:
        program = Program.of(f"ctc_loss/{self.name}.cu", problem=problem)
        inputs = (Buffer(name) for name in ("x", "targets", "input_lengths", "target_lengths"))
        call = kernel_call(
            program, problem.batch, config.threads, *inputs, Buffer("y"), Buffer("loss"), Buffer("alphas"),
            Buffer("betas"), problem.steps, problem.batch, problem.classes, problem.labels,
        )  # fmt: skip
        row = 4 * problem.batch * problem.states
        return Recipe((call,), (Workspace("alphas", problem.steps * row), Workspace("betas", 2 * row)))


NAIVE = Naive("naive", "one CTA per sequence, one thread per state", below=None, predicted_gain=None)

# --- the reference


def random_inputs(problem: CtcLossProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Sequences of all lengths, the first as long as possible."""
    p = problem
    lengths = {}
    for name, most, least in (("input_lengths", p.steps, min(p.steps, 2)), ("target_lengths", p.labels, 0)):
        found = (least + draw.uniform(p.batch) * (most - least + 1)).long().clamp_(max=most)
        lengths[name] = torch.where(torch.arange(p.batch, device=found.device) == 0, most, found)
    if not p.zero_infinity:  # a label and a blank per step are always possible
        lengths["target_lengths"] = torch.minimum(lengths["target_lengths"], lengths["input_lengths"] // 2)
    targets = (draw.uniform(p.batch, p.labels) * max(p.classes - 1, 1)).long().clamp_(max=p.classes - 1)
    targets = torch.where((targets >= p.blank) & (p.classes > 1), targets + 1, targets).clamp_(
        max=p.classes - 1
    )
    x = draw.uniform(p.steps, p.batch, p.classes) * 2
    return {"x": x.log_softmax(-1), "targets": targets, **lengths}


def empty_output(problem: CtcLossProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.steps, problem.batch, problem.classes), device=device)


def _computed(
    problem: CtcLossProblem, inputs: Tensors, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PyTorch's loss and its gradient."""
    x, others = inputs["x"].to(dtype), (inputs["targets"], inputs["input_lengths"], inputs["target_lengths"])
    loss, alpha = torch.ops.aten._ctc_loss.Tensor(x, *others, problem.blank, problem.zero_infinity)
    gradient = torch.ops.aten._ctc_loss_backward.Tensor(
        torch.ones_like(loss), x, *others, loss, alpha, problem.blank, problem.zero_infinity
    )
    return torch.where(loss.isinf(), 0, loss) if problem.zero_infinity else loss, gradient


def exact(problem: CtcLossProblem, inputs: Tensors) -> torch.Tensor:
    return _computed(problem, inputs, torch.float64)[1]


def peer(problem: CtcLossProblem, inputs: Tensors) -> torch.Tensor:
    return _computed(problem, inputs, torch.float32)[1]


# --- the operation


class CtcLossOperation(Operation[CtcLossProblem]):
    name = "ctc_loss"
    problem = CtcLossProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("ctc_loss", (NAIVE,))
    problems = (CtcLossProblem(64, 32, 37, 10), CtcLossProblem(32, 500, 29, 80))
    """Lines of text from images, and sentences from sound."""
    small_problems = (
        CtcLossProblem(3, 9, 7, 4),
        CtcLossProblem(4, 12, 70, 3, blank=69),
        CtcLossProblem(5, 6, 3, 5, zero_infinity=True),
        CtcLossProblem(1, 1, 2, 1),
        CtcLossProblem(2, 90, 4, 40, blank=1),
    )
    """Small problems: more classes than threads, more states, other blanks, targets that do not fit."""
    dtypes = DTYPES
    layouts = rows.LAYOUTS
    order = ("naive",)

    def extra_outputs(self, problem: CtcLossProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return {"loss": torch.empty(problem.batch, device=device)}

    def extra_references(self, problem: CtcLossProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return {"loss": _computed(problem, inputs, torch.float64)[0]}


CTC_LOSS = CtcLossOperation()

# --- the PyTorch operator


def ctc_loss(
    x: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Return `F.ctc_loss(..., reduction="none")` of log-probabilities [steps][batch][classes] in fp32.

    Targets are padded, [batch][labels], in int64 as all lengths, on the device of x. No length is read by the host, so
    a CUDA graph may contain it. A label that is no class makes its loss NaN; longer lengths than the tensors' count as
    theirs. The gradient is computed with the loss.
    """
    _, loss = OPERATOR(x, targets, input_lengths, target_lengths, blank, zero_infinity, rung)
    return loss


def _plan(
    x: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
    rung: str | None = None,
) -> CallPlan:
    steps, batch, classes = x.shape
    return CallPlan(
        CTC_LOSS,
        lambda: {"y": rows.empty_like(x), "loss": x.new_empty(batch)},
        lambda: CtcLossProblem(batch, steps, classes, targets.shape[1], blank, zero_infinity),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(output[0])


def _backward(ctx: Any, _: torch.Tensor, gradient: torch.Tensor) -> tuple[Any, ...]:
    (own,) = ctx.saved_tensors
    return own * gradient[:, None], None, None, None, None, None, None


OPERATOR = define_planned(
    "ctc_loss", _plan,
    "x: T N C of float32, targets: N S of int64, input_lengths: N of int64, target_lengths: N of int64",
    returns="(Tensor, Tensor)", setup=_setup, backward=_backward,
)  # fmt: skip


def ctc_loss_in_step(
    x: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Compute PyTorch's operator of these arguments without reading lengths on the host: as part of a training step."""
    if x.dtype is torch.float64:
        return torch.ops.aten.ctc_loss.Tensor(
            x, targets, input_lengths, target_lengths, blank, reduction, zero_infinity
        )
    is_batched = x.dim() > 2
    values = x.float() if is_batched else x.float().unsqueeze(1)
    inputs, lengths = (_as_tensor(x, one) for one in (input_lengths, target_lengths))
    if targets.dim() == 1 and is_batched:  # all targets one after another
        begins = (lengths.cumsum(0) - lengths)[:, None]
        most = max(targets.numel() - 1, 0)
        targets = targets[(begins + torch.arange(most + 1, device=x.device)).clamp(max=most)]
    targets = targets.to(x.device, torch.int64).reshape(values.shape[1], -1)
    _, loss = _anywhere(values, targets, inputs, lengths, blank, zero_infinity)
    if reduction == _MEAN:
        return (loss / lengths.clamp(min=1)).mean().to(x.dtype)
    loss = loss.sum() if reduction == _SUM else loss if is_batched else loss.squeeze(0)
    return loss.to(x.dtype)


def _as_tensor(x: torch.Tensor, lengths: Any) -> torch.Tensor:
    """Return lengths, a tensor or numbers, on the device of x. Constants are made by operators, which are traced."""
    if isinstance(lengths, torch.Tensor):
        return lengths.to(x.device, torch.int64).reshape(-1)
    if len({*lengths}) == 1:
        return x.new_full((len(lengths),), lengths[0], dtype=torch.int64)
    return torch.cat([x.new_full((1,), length, dtype=torch.int64) for length in lengths])


_MEAN, _SUM = 1, 2


def _run_anywhere(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """Run the kernel on a GPU, and PyTorch on a CPU, which need not have a compiler."""
    if x.is_cuda:
        found: tuple[torch.Tensor, ...] = OPERATOR(x, *rest)
        return found
    targets, inputs, lengths, blank, zero_infinity = rest
    problem = CtcLossProblem(x.shape[1], x.shape[0], x.shape[2], targets.shape[1], blank, zero_infinity)
    given = {"x": x, "targets": targets, "input_lengths": inputs, "target_lengths": lengths}
    loss, gradient = _computed(problem, given, x.dtype)
    return gradient, loss


def _fake_anywhere(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    return rows.empty_like(x), x.new_empty(x.shape[1])


_anywhere = define(
    "ctc_loss_anywhere(Tensor x, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,"
    " bool zero_infinity) -> (Tensor, Tensor)",
    _run_anywhere,
    _fake_anywhere,
    setup=_setup,
    backward=lambda *gradients: _backward(*gradients)[:-1],
)
