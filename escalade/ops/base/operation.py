"""An operation: what tests, `verify`, the ladder table and the docs ask of each of them alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic

import torch

from escalade.ops.base.ladder import Ladder
from escalade.ops.base.problem import P

Tensors = Mapping[str, torch.Tensor]


class Operation(ABC, Generic[P]):
    """An operation: its ladder, its problems, its one reference, and how PyTorch does it."""

    name: str
    ladder: Ladder[P]
    problems: tuple[P, ...]
    """The problems that `escalade ladder` measures."""
    small_problems: tuple[P, ...]
    """Problems small enough for the twin, that between them reach every branch of the kernels."""
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

    @abstractmethod
    def parse(self, name: str) -> P:
        """The problem of a name such as `problem.name` gives."""

    @abstractmethod
    def inputs(self, problem: P, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        """Fresh random inputs, by buffer name."""

    @abstractmethod
    def output(self, problem: P, device: torch.device) -> torch.Tensor:
        """Room for the result (buffer `y`)."""

    @abstractmethod
    def reference(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """The result in float64."""

    def further_outputs(self, problem: P, device: torch.device) -> dict[str, torch.Tensor]:
        """Room for what it computes besides `y`, by buffer name."""
        return {}

    def further_references(self, problem: P, inputs: Tensors) -> dict[str, torch.Tensor]:
        """The further results in float64."""
        return {}

    @abstractmethod
    def peer(self, problem: P, inputs: Tensors) -> torch.Tensor:
        """PyTorch's own result in the problem's dtype: what errors are compared with."""
