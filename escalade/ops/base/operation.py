"""Operation: what tests, `verify`, ladder tables and docs need to know about each one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.pitch import pitch_of, with_pitch
from escalade.ops.base.problem import P, Problem, traffic

PYTORCH_EFFICIENCY = 0.1
"""Share of the card's multiply rate that PyTorch is assumed to reach on shapes without a fast kernel here. A cautious
guess: one thread per output reaches a hundredth."""

Tensors = Mapping[str, torch.Tensor]
P_contra = TypeVar("P_contra", bound=Problem, contravariant=True)


class ReferenceFunctions(Protocol[P_contra]):
    """PyTorch versions of an operation: a module `reference.py`, or a `Reference`."""

    def random_inputs(self, problem: P_contra, draw: Draw) -> dict[str, torch.Tensor]: ...
    def empty_output(self, problem: P_contra, device: torch.device) -> torch.Tensor: ...
    def exact(self, problem: P_contra, inputs: Tensors) -> torch.Tensor: ...
    def peer(self, problem: P_contra, inputs: Tensors) -> torch.Tensor: ...


@dataclass(frozen=True)
class Reference(Generic[P]):
    """An operation in PyTorch: test inputs, an empty result, the float64 result, and PyTorch's result in the problem's
    dtype."""

    random_inputs: Callable[[P, Draw], dict[str, torch.Tensor]]
    empty_output: Callable[[P, torch.device], torch.Tensor]
    exact: Callable[[P, Tensors], torch.Tensor]
    peer: Callable[[P, Tensors], torch.Tensor]


def in_float64(
    peer: Callable[[P, Tensors], torch.Tensor],
) -> Callable[[P, Tensors], torch.Tensor]:
    """Return the exact result of an operation whose peer computes in the dtype of its inputs."""
    return lambda problem, inputs: peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


def summed_in_fp32(
    compute: Callable[[P, Tensors], torch.Tensor],
) -> Callable[[P, Tensors], torch.Tensor]:
    """Return the peer of an operation that PyTorch sums in fp32 on a GPU; on a CPU it needs fp32 tensors to do so."""

    def peer(problem: P, inputs: Tensors) -> torch.Tensor:
        on_gpu = next(iter(inputs.values())).is_cuda
        given = inputs if on_gpu else {name: tensor.float() for name, tensor in inputs.items()}
        return compute(problem, given).to(STORAGE[problem.dtype])

    return peer


class Operation(Generic[P]):
    """An operation: its ladder, its problems and its reference."""

    name: str
    problem: type[P]
    in_pytorch: ReferenceFunctions[P]
    ladder: Ladder[P]
    problems: tuple[P, ...]
    """The problems that `escalade ladder` measures."""
    small_problems: tuple[P, ...]
    """Problems small enough for the twin that together reach every branch of the kernels."""
    crossover: tuple[P, ...] = ()
    """Problems that sweep the point where one algorithm overtakes another."""
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    order: tuple[str, ...]
    """Names of candidate rungs, expected fastest first, for problems without a measurement."""
    weights_are_constant: ClassVar[bool] = False
    """True if ladders time calls as in inference, without steps that depend only on the weights."""
    weights_change: ClassVar[bool] = False
    """True if every call has new weights, as in training, so that those steps are always timed."""

    def preferred(self, problem: P) -> tuple[str, ...]:
        """Return the candidate rungs of a problem, if they depend on it."""
        return self.order

    def tuned_as(self, problem: P) -> P:
        """Return the problem whose measured choice also serves this one, if it has none of its own."""
        return problem

    def forms(self, rung: str, problem: P) -> tuple[P, ...]:
        """Return the problem, and other layouts of it that are worth a conversion for this rung."""
        return (problem,)

    def roundings(self, problem: P) -> int:
        """Times that PyTorch rounds values to the dtype, including the result's."""
        return 2

    def left_to_pytorch(self, problem: P) -> str | None:
        """Return why a plan on a GPU leaves a problem to PyTorch where nothing was measured; None if it does not."""
        return None

    def pytorch_us(self, problem: P, card: Card) -> float:
        """Estimate PyTorch's microseconds, for comparison with a rung that is a last resort."""
        products = card.rates.fp32 if problem.dtype == "fp32" else card.tensor_core_rate(problem.dtype)
        working = problem.flops / (products * PYTORCH_EFFICIENCY)
        return self.roundings(problem) * card.rates.launch_us + max(
            working, card.transfer_us(traffic(problem))
        )

    def parse(self, name: str) -> P:
        """Return the problem of a name; raise if it has nothing to compute."""
        problem = self.problem.parse(name)
        self.require_work(problem)
        return problem

    def require_work(self, problem: P) -> None:
        """Raise if a problem has nothing to run, count or time."""
        if problem.batch < 1 or not self.output(problem, torch.device("meta")).numel():
            raise UnsupportedError(
                f"{problem.name} has no elements to compute; use a batch of at least 1 and a result with at least one "
                "element"
            )

    def inputs(self, problem: P, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        """Return random inputs by buffer name."""
        inputs = self.in_pytorch.random_inputs(problem, Draw(device, seed))
        return {name: _laid(tensor, problem, name) for name, tensor in inputs.items()}

    def output(self, problem: P, device: torch.device) -> torch.Tensor:
        """Return an empty result (buffer `y`)."""
        return _laid(self.in_pytorch.empty_output(problem, device), problem, "y")

    def reference(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """Return the result in float64."""
        return self.in_pytorch.exact(problem, inputs)

    def extra_outputs(self, problem: P, device: torch.device) -> dict[str, torch.Tensor]:
        """Return empty tensors for results other than `y`, by buffer name."""
        return {}

    def extra_references(self, problem: P, inputs: Tensors) -> dict[str, torch.Tensor]:
        """Return the other results in float64, by buffer name."""
        return {}

    def peer(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """Return PyTorch's result in the problem's dtype, whose error scales the tolerance."""
        return self.in_pytorch.peer(problem, inputs)


def _laid(tensor: torch.Tensor, problem: Problem, name: str) -> torch.Tensor:
    """Apply the problem's pitch, which only NHWC has."""
    pitch = pitch_of(problem, name) if problem.layout == "nhwc" else 0
    return with_pitch(tensor, pitch)[0] if pitch else tensor
