"""Run a plan on the CPU with PyTorch, at the plan's precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from escalade.engine.nodes.evaluate import compute, own_arithmetic
from escalade.engine.nodes.lowering import OWN
from escalade.engine.plan.constants import ConstantCache, write_tensor
from escalade.engine.plan.plan import ConstantForm, Plan
from escalade.engine.plan.program import OutTensors, Tensors, copy_into
from escalade.ops.base.dtypes import QUANTIZED, stored_as

_HOST = torch.device("cpu")


class ReferenceProgram:
    """A plan whose every node PyTorch computes: the program of an engine on the CPU, and its calls.

    Values are rounded to the plan's dtype after every node; sums are accumulated in fp32. Calls share no buffers.
    """

    def __init__(self, plan: Plan, constants: ConstantCache) -> None:
        self.plan = plan
        self._constant_cache = constants
        self._constants = self._widened_constants()
        own = plan.graph.constants
        self._steps = [
            (
                step,
                {role: self._constants[step.constant(role)] for role, name in inputs.items() if name in own},
            )
            for step in plan.steps
            for inputs in [step.node.inputs]
        ]
        """Each step with the constants that it reads, by role."""
        self.inputs = tuple(self._buffer(entry.name) for entry in plan.graph.inputs)
        self.outputs = tuple(self._buffer(name) for name in plan.graph.outputs)

    @property
    def program(self) -> ReferenceProgram:
        return self

    def run(self) -> None:
        copy_into(self.outputs, self._results(self.inputs))

    def _results(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results in the plan's dtypes. Writes nothing that another run reads."""
        graph = self.plan.graph
        with own_arithmetic(self.plan.dtype, _HOST):
            values = {
                entry.name: tensor.float() if getattr(torch, entry.dtype).is_floating_point else tensor
                for entry, tensor in zip(graph.inputs, inputs, strict=True)
            }
            for step, constants in self._steps:
                read = {
                    role: constants[role] if role in constants else values[name]
                    for role, name in step.node.inputs.items()
                }
                result = compute(step.node, read, _HOST)
                rounded = stored_as(result, self.plan.forms[step.node.name].dtype)
                is_quantized = bool(step.node.attributes.get("store"))
                values[step.node.name] = rounded.float() if is_quantized else _to_accumulator_dtype(rounded)
            return [
                self._constants[ConstantForm(name, OWN)] if name in graph.constants else values[name]
                for name in graph.outputs
            ]

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        inputs = list(map(torch.empty_like, self.inputs))
        for buffer, tensor in zip(inputs, tensors, strict=True):
            buffer.copy_(tensor.detach())
        results = self._results(inputs)
        if out is not None:
            return copy_into(out, results)
        names = self.plan.graph.outputs
        # PyTorch's results may have other strides than the plan's.
        own = copy_into(
            [
                output if name in self.plan.graph.constants else torch.empty_like(output)
                for name, output in zip(names, self.outputs, strict=True)
            ],
            results,
        )
        return [
            result.to(dtype, copy=name in self.plan.graph.constants)
            for name, result, dtype in zip(names, own, self.plan.output_dtypes, strict=True)
        ]

    def repack(self) -> None:
        for entry, tensor in self._widened_constants().items():
            write_tensor(self._constants[entry], tensor)

    def _widened_constants(self) -> dict[ConstantForm, torch.Tensor]:
        return {
            entry: tensor.float() if entry.form in QUANTIZED else _to_accumulator_dtype(tensor)
            for entry in self.plan.constants
            for tensor in [self._constant_cache.get(entry, self.plan.graph)]
        }

    def _buffer(self, name: str) -> torch.Tensor:
        if name in self.plan.graph.constants:
            return self._constants[ConstantForm(name, OWN)]
        form = replace(self.plan.forms[name], pitch=0)  # there are no subbuffers here
        return form.view(torch.zeros(max(form.bytes, 1), dtype=torch.uint8, device=_HOST), 0)


def _to_accumulator_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Widen to fp32: tensor cores accumulate 16-bit products in fp32, PyTorch's CPU kernels may not."""
    is_narrow = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.float() if is_narrow else tensor
