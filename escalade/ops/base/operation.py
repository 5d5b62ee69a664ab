"""An operation: what tests, `verify`, the ladder table and the docs ask of each of them alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.pitch import apart, pitch_of
from escalade.ops.base.problem import P, Problem, traffic

PYTORCH_REACHES = 0.1
"""The share of a card's rate of products that PyTorch is trusted with, for shapes that no fast kernel here takes: a
guess on the safe side, for one thread an output reaches a hundredth of it."""

Tensors = Mapping[str, torch.Tensor]
P_contra = TypeVar("P_contra", bound=Problem, contravariant=True)


class InPyTorch(Protocol[P_contra]):
    """An operation in PyTorch: what its `reference.py` holds, the module itself or an object like it."""

    def random_inputs(
        self, problem: P_contra, device: torch.device, seed: int
    ) -> dict[str, torch.Tensor]: ...
    def empty_output(self, problem: P_contra, device: torch.device) -> torch.Tensor: ...
    def exact(self, problem: P_contra, inputs: Tensors) -> torch.Tensor: ...
    def peer(self, problem: P_contra, inputs: Tensors) -> torch.Tensor: ...


@dataclass(frozen=True)
class Reference(Generic[P]):
    """An operation in PyTorch, as functions: inputs to test with, room for the result, the result in float64, and
    PyTorch's own in the problem's dtype."""

    random_inputs: Callable[[P, torch.device, int], dict[str, torch.Tensor]]
    empty_output: Callable[[P, torch.device], torch.Tensor]
    exact: Callable[[P, Tensors], torch.Tensor]
    peer: Callable[[P, Tensors], torch.Tensor]


class Operation(ABC, Generic[P]):
    """An operation: its ladder, its problems, its one reference, and how PyTorch does it."""

    name: str
    problem: type[P]
    in_pytorch: InPyTorch[P]
    """The module `reference.py` of its folder."""
    ladder: Ladder[P]
    problems: tuple[P, ...]
    """The problems that `escalade ladder` measures."""
    small_problems: tuple[P, ...]
    """Problems small enough for the twin, that between them reach every branch of the kernels."""
    crossover: tuple[P, ...] = ()
    """A sweep of problems that shows where one algorithm overtakes another, if the operation has one."""
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    weights_stay: ClassVar[bool] = False
    """Whether a ladder times what a network does call by call: without the steps that depend on nothing but weights."""
    weights_change: ClassVar[bool] = False
    """Whether weights are others with every call, as in training: those steps are part of every time then."""

    @abstractmethod
    def preferred(self, problem: P) -> tuple[str, ...]:
        """Names of rungs, the one expected to be fastest first: what is tried where no measurement is at hand."""

    def forms(self, rung: str, problem: P) -> tuple[P, ...]:
        """The problem, and other layouts of it that are worth a conversion for this rung."""
        return (problem,)

    def roundings(self, problem: P) -> int:
        """How many times PyTorch rounds values to the dtype on the way to a result, that of the result among them."""
        return 2

    def pytorch_us(self, problem: P, card: Card) -> float:
        """The microseconds, about, that PyTorch takes: to be compared with a rung that is a last resort, no other."""
        products = card.rates.fp32 if problem.dtype == "fp32" else card.tensor_core_rate(problem.dtype)
        working = problem.flops / (products * PYTORCH_REACHES)
        return self.roundings(problem) * card.rates.launch_us + max(working, card.passing(traffic(problem)))

    def parse(self, name: str) -> P:
        """The problem of a name such as `problem.name` gives, which has something to compute."""
        problem = self.problem.parse(name)
        self.require_work(problem)
        return problem

    def require_work(self, problem: P) -> None:
        """Refuses a problem that nothing is to be computed for: there is nothing to run, count or time."""
        if problem.batch < 1 or not self.output(problem, torch.device("meta")).numel():
            raise UnsupportedError(
                f"{problem.name}: that has no elements, and nothing to compute; problems have a batch of 1 or more and "
                "results of at least one element"
            )

    def inputs(self, problem: P, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        """Fresh random inputs, by buffer name."""
        inputs = self.in_pytorch.random_inputs(problem, device, seed)
        return {name: _laid(tensor, problem, name) for name, tensor in inputs.items()}

    def output(self, problem: P, device: torch.device) -> torch.Tensor:
        """Room for the result (buffer `y`)."""
        return _laid(self.in_pytorch.empty_output(problem, device), problem, "y")

    def reference(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """The result in float64."""
        return self.in_pytorch.exact(problem, inputs)

    def further_outputs(self, problem: P, device: torch.device) -> dict[str, torch.Tensor]:
        """Room for what it computes besides `y`, by buffer name."""
        return {}

    def further_references(self, problem: P, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The further results in float64, by buffer name."""
        return {}

    def peer(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """PyTorch's own result in the problem's dtype: what errors are compared with."""
        return self.in_pytorch.peer(problem, inputs)


def _laid(tensor: torch.Tensor, problem: Problem, name: str) -> torch.Tensor:
    """A buffer as the problem has it: in NHWC its pixels may lie apart."""
    pitch = pitch_of(problem, name) if problem.layout == "nhwc" else 0
    return apart(tensor, pitch)[0] if pitch else tensor
