"""Losses that are sums of element-wise functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Buffer, Int64, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, full_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import kernel_call
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung, first_that
from escalade.ops.calling.call import Packer
from escalade.ops.expressions import Expression
from escalade.ops.shared.losses import REDUCTIONS, define_loss, empty_loss, loss_buffer
from escalade.ops.shared.pointwise import LAYOUTS, PacksConfig, check, packer_like

# --- the problem


INPUTS = ("x", "target")


@dataclass(frozen=True)
class PointwiseLossProblem(Named):
    """loss = mean or sum of term(x, target) over all elements; with `gradient` also scale * d loss / d x.

    `expression` is the term and its derivative by x. The loss is fp32, and `scale` an fp32 number on the device; x and
    the gradient have the `dtype`, and so does the target unless `target` is set. Buffer y is the gradient if there is
    one, otherwise the loss.
    """

    NAME: ClassVar = NamePattern(
        "loss",
        r"{reduction}_{elements}\[{expression:text}\]{gradient?_gradient}[_target{target}]",
    )

    elements: int
    expression: str
    reduction: str = "mean"
    gradient: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    target: str = ""
    """The target's dtype; empty for `dtype`."""
    batch: int = 1
    """Always 1; records of all operations have a batch."""

    def __post_init__(self) -> None:
        program = Expression.parse(self.expression)
        object.__setattr__(self, "expression", program.text)
        check("pointwise_loss", self.elements, self.batch, self.dtype, self.layout)
        require("pointwise_loss", "layout", self.layout, LAYOUTS)
        require("pointwise_loss", "dtype", self.dtype, DTYPES)
        require("pointwise_loss", "target", self.target_dtype, DTYPES)
        require("pointwise_loss", "reduction", self.reduction, REDUCTIONS)
        if self.elements < 1:
            raise UnsupportedError("a loss of no elements: pointwise_loss needs at least one")
        if not set(program.inputs) <= set(INPUTS) or len(program.results) != 2:
            raise UnsupportedError(
                f"{program.text!r} as a loss: it must have two results computed from x and target, an element's loss "
                "and its derivative by x, such as square(x - target), 2 * (x - target)"
            )

    @property
    def target_dtype(self) -> str:
        return self.target or self.dtype

    @property
    def program(self) -> Expression:
        """The term, and its derivative if needed."""
        whole = Expression.parse(self.expression)
        return whole if self.gradient else Expression.of(whole.calls, whole.results[:1])

    @property
    def factor(self) -> float:
        """Factor of the sum."""
        return 1 / self.elements if self.reduction == "mean" else 1.0

    @property
    def flops(self) -> int:
        return self.elements * (1 + len(self.program.calls))

    @property
    def bytes(self) -> int:
        own = ELEMENT_BYTES[self.dtype] * (2 if self.gradient else 1)
        return self.elements * (own + ELEMENT_BYTES[self.target_dtype])

    @property
    def rounding(self) -> float:
        """One rounding per function; threads, warps and CTAs each sum few numbers."""
        return 2.0**-24 * (8 + len(self.program.calls))


# --- rungs


_PARTIALS, _TICKETS = Buffer("partials"), Buffer("tickets")
_PARTIAL_BYTES, _TICKET_BYTES = 4, 4


@dataclass(frozen=True)
class Packs(Rung[PointwiseLossProblem, PacksConfig]):
    wide: bool
    """True for 16-byte accesses, False for single elements."""

    def configs(self, problem: PointwiseLossProblem) -> tuple[PacksConfig, ...]:
        """Default to the most packs per thread that leave enough CTAs."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1)]
        busy = self.card.busy_blocks
        return first_that(lambda config: self._blocks(problem, config) >= busy, every, PacksConfig(packs=1))

    def recipe(self, problem: PointwiseLossProblem, config: PacksConfig) -> Recipe:
        count, program = self._blocks(problem, config), problem.program
        generated: dict[str, Constant] = {
            **program.constants(problem.dtype), "INPUTS": Macro(", ".join(program.inputs))
        }  # fmt: skip
        call = kernel_call(
            Program.of(
                "pointwise_loss/packs.cu", constants=generated,
                problem=problem, config=config, vector=self._vector(problem),
            ),
            count,
            config.threads,
            Buffer("x"), Buffer("target"), Buffer("scale", optional=True),
            Buffer("y" if problem.gradient else "", optional=True), _PARTIALS, _TICKETS,
            Buffer(loss_buffer(problem)), Int64(problem.elements), problem.factor,
        )  # fmt: skip
        tickets = Workspace(_TICKETS.name, _TICKET_BYTES, zeroed=True)
        return Recipe((call,), (Workspace(_PARTIALS.name, count * _PARTIAL_BYTES), tickets))

    def _vector(self, problem: PointwiseLossProblem) -> int:
        """Return the elements per access, at most 16 bytes of either tensor."""
        return min(full_vector(problem.dtype), full_vector(problem.target_dtype)) if self.wide else 1

    def _blocks(self, problem: PointwiseLossProblem, config: PacksConfig) -> int:
        return blocks(problem.elements // self._vector(problem), config.threads * config.packs)


# Predictions are for the error of 2^25 elements in fp16 without a gradient: 134 MB, 32 us at copy rate. With 2-byte
# accesses the 2,048 threads of an SM have 32 KiB of four packs of both tensors in flight, which memory answers in 0.7
# us: enough, but four times the instructions.
RUNGS: tuple[Rung[PointwiseLossProblem], ...] = (
    Packs("single", "one element per access, several in flight per thread", None, None, wide=False),
    Packs("vectorised", "16 bytes per access", "single", 1.8, wide=True),
)


# --- problems


MSE = "d = x - target; d * d, 2 * d"
"""Squared differences."""
_LOGISTIC = "relu(x) - x * target + log1p(exp(-abs(x))), sigmoid(x) - target"
"""Binary cross-entropy of logits."""


# --- the reference


def random_inputs(problem: PointwiseLossProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Normal x, targets between 0 and 1, and the scale of the gradient if there is one."""
    storage = STORAGE[problem.dtype]
    inputs = {
        "x": draw.normal(problem.elements).to(storage),
        "target": draw.uniform(problem.elements).to(STORAGE[problem.target_dtype]),
    }
    # Large enough that the gradients of a mean are not subnormal in fp16.
    scale = torch.tensor(
        [0.75 * (problem.elements if problem.reduction == "mean" else 1)], device=draw.device
    )
    return {**inputs, "scale": scale} if problem.gradient else inputs


def empty_output(problem: PointwiseLossProblem, device: torch.device) -> torch.Tensor:
    if problem.gradient:
        return torch.empty(problem.elements, dtype=STORAGE[problem.dtype], device=device)
    return torch.empty(1, device=device)


def exact(problem: PointwiseLossProblem, inputs: Tensors) -> torch.Tensor:
    compute = _gradient if problem.gradient else loss
    return compute(problem, inputs, torch.float64)


def peer(problem: PointwiseLossProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch's gradient in the problem's dtype, or its loss in fp32."""
    if problem.gradient:
        return _gradient(problem, inputs, STORAGE[problem.dtype])
    return loss(problem, inputs, torch.float32)


def loss(problem: PointwiseLossProblem, inputs: Tensors, dtype: torch.dtype) -> torch.Tensor:
    """Return the loss in a dtype, one element."""
    terms = _results(problem, inputs, dtype)[0]
    return (terms.mean() if problem.reduction == "mean" else terms.sum()).reshape(1)


def _gradient(problem: PointwiseLossProblem, inputs: Tensors, dtype: torch.dtype) -> torch.Tensor:
    return (_results(problem, inputs, dtype)[1] * (inputs["scale"].double() * problem.factor)).to(dtype)


def _results(problem: PointwiseLossProblem, inputs: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return problem.program.evaluate({name: inputs[name].to(dtype) for name in ("x", "target")})


# --- the operation


class PointwiseLossOperation(Operation[PointwiseLossProblem]):
    name = "pointwise_loss"
    problem = PointwiseLossProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("pointwise_loss", RUNGS)
    problems = tuple(
        PointwiseLossProblem(elements, MSE, gradient=gradient)
        for elements in (256 * 3 * 32 * 32, 2**25)
        for gradient in (False, True)
    )
    """The error of a batch of small images, and of a tensor that no cache holds."""
    small_problems = (
        PointwiseLossProblem(1, MSE),
        PointwiseLossProblem(9001, MSE, "sum"),
        PointwiseLossProblem(2053, MSE, gradient=True),
        PointwiseLossProblem(6000, MSE, gradient=True, dtype="fp16", target="fp32"),
        PointwiseLossProblem(515, _LOGISTIC, "sum", gradient=True),
    )
    """Small problems: several CTAs, part of one and of a pack, both reductions, and a target of another dtype."""
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: PointwiseLossProblem) -> tuple[str, ...]:
        return ("vectorised",)

    def extra_outputs(self, problem: PointwiseLossProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return empty_loss(problem, device)

    def extra_references(self, problem: PointwiseLossProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return {"loss": loss(problem, inputs, torch.float64)} if problem.gradient else {}


POINTWISE_LOSS = PointwiseLossOperation()


# --- the PyTorch operator


def pointwise_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    expression: str,
    reduction: str = "mean",
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """Mean or sum of an expression over the elements of x and target, as an fp32 number. Deterministic.

    The expression has two results, the loss of an element and its derivative by x, such as `square(x - target), 2 * (x
    - target)`. The backward pass recomputes both from x and target, in one pass. `rung` names a rung of the ladder.
    """
    return OPERATOR(x, target, expression, reduction, rung)


def pointwise_loss_with_gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    expression: str,
    reduction: str = "mean",
    *,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and `scale` times its gradient by x, in one pass. `scale` is an fp32 number on the device, by
    which the loss is multiplied before differentiation."""
    loss, gradient = _WITH_GRADIENT(x, target, scale, expression, reduction, rung)
    return loss, gradient


def mse_loss(
    x: torch.Tensor, target: torch.Tensor, reduction: str = "mean", *, rung: str | None = None
) -> torch.Tensor:
    """Mean or sum of squared differences, as an fp32 number. `rung` names a rung of pointwise_loss."""
    return pointwise_loss(x, target, MSE, reduction, rung=rung)


def _problem(
    x: torch.Tensor, target: torch.Tensor, expression: str, reduction: str = "mean", *, gradient: bool
) -> PointwiseLossProblem:
    return PointwiseLossProblem(x.numel(), expression, reduction, gradient, NAMES[x.dtype])


def _packers(x: torch.Tensor) -> dict[str, Packer]:
    """Make both tensors dense, in the memory order of x."""
    return dict.fromkeys(("x", "target"), packer_like(torch.empty_like(x, device="meta")))


OPERATOR, _WITH_GRADIENT = define_loss(POINTWISE_LOSS, _problem, "x: ..., target: ...", _packers)
