"""A plan on the CPU: PyTorch does every node, at the plan's precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from escalade.engine.graph.forms import Form
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.nodes.evaluate import compute
from escalade.engine.nodes.lowering import OWN
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import Rooms, settled
from escalade.engine.plan.step import ConstantForm
from escalade.ops.base.dtypes import E4M3, to_e4m3

_HOST = torch.device("cpu")


class ReferenceProgram:
    """A plan with PyTorch doing every node: what an engine on the CPU runs.

    Values are rounded to the plan's type after every node, sums are fp32's.
    """

    def __init__(self, plan: Plan, constants: Constants) -> None:
        self.plan = plan
        self._constants = {entry: _wide(constants.get(entry, plan.graph)) for entry in plan.constants}
        self.inputs = self._inputs()
        self.outputs = tuple(self._room(name) for name in plan.graph.outputs)

    def run(self) -> None:
        settled(self.outputs, self._results(self.inputs))

    def _results(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """In the plan's types; it shares nothing that is written with another run."""
        graph = self.plan.graph
        with own_arithmetic(self.plan.dtype, _HOST):
            values = {
                given.name: tensor.float() if getattr(torch, given.dtype).is_floating_point else tensor
                for given, tensor in zip(graph.inputs, inputs, strict=True)
            }
            for step in self.plan.steps:
                read = {
                    role: self._constants[step.constant(role)] if name in graph.constants else values[name]
                    for role, name in step.node.inputs.items()
                }
                result = compute(step.node, read, _HOST)
                values[step.node.name] = _wide(_rounded(result, self.plan.forms[step.node.name]))
            return [
                self._constants[ConstantForm(name, OWN)] if name in graph.constants else values[name]
                for name in graph.outputs
            ]

    def over(
        self,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        rooms: Rooms = None,
    ) -> list[torch.Tensor]:
        inputs = self._inputs()
        for given, tensor in zip(inputs, tensors, strict=True):
            given.copy_(tensor.detach())
        results = self._results(inputs)
        if rooms is not None:
            return settled(rooms, results)
        names = self.plan.graph.outputs
        made = settled(
            [self._room(name) for name in names], results
        )  # PyTorch may have them in another layout
        return [
            result.to(dtype, copy=name in self.plan.graph.constants)
            for name, result, dtype in zip(names, made, types, strict=True)
        ]

    apart = over

    def another(self) -> ReferenceProgram:
        """Is this one, which shares nothing between its runs over the tensors of calls."""
        return self

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._room(given.name) for given in self.plan.graph.inputs)

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Does nothing: nothing here is on a GPU."""

    def _room(self, name: str) -> torch.Tensor:
        if name in self.plan.graph.constants:
            return self._constants[ConstantForm(name, OWN)]
        form = replace(self.plan.forms[name], pitch=0)  # nothing lies within another here
        return form.view(torch.zeros(max(form.bytes, 1), dtype=torch.uint8, device=_HOST), 0)


def _rounded(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    return to_e4m3(tensor) if form.dtype == E4M3 else tensor.to(form.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of 16-bit products in 16 bits are not what a GPU does."""
    is_narrow = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.float() if is_narrow else tensor
