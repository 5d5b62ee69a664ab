"""Interfaces of the programs that run a plan, and PyTorch operators with several results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import call_of
from escalade.engine.nodes.evaluate import compute, require_result
from escalade.engine.plan.plan import Plan

Tensors = Sequence[torch.Tensor]
OutTensors = Tensors | None
"""The caller's tensors for results, each with the shape and dtype of its result."""


class PlanProgram(Protocol):
    """A plan on memory of its own: fill `inputs`, `run`, read `outputs`."""

    plan: Plan

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def outputs(self) -> tuple[torch.Tensor, ...]: ...
    def run(self) -> None: ...
    def repack(self) -> None:
        """Derive everything that is packed from constants again, after those were written to."""


class BufferedProgram(PlanProgram, Protocol):
    """A program that also runs on the tensors of a call, with buffers that only one call can use at a time."""

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        """Run on these inputs and return the results in the model's dtypes: new tensors, or `out`."""

    def call_isolated(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        """Like `call`, without any memory that other calls write: for capture in the caller's CUDA graph, whose replays
        may overlap other calls."""

    def clone(self) -> BufferedProgram:
        """Return a program that shares the weights but no buffers, so that both can run at once."""

    def record_stream(self, stream: torch.cuda.Stream) -> None: ...


def copy_into(out: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy results into `out`, skipping those that were written there already, and return `out`."""
    for tensor, result in zip(out, results, strict=True):
        if tensor is not result:
            # PyTorch refuses writes to an inference tensor outside inference mode.
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                tensor.copy_(result)
    return list(out)


class MultiOutputCalls:
    """Runs a PyTorch operator once for all of its results, each of which is a graph node."""

    def __init__(self, plan: Plan, home: torch.device, everything: bool = False) -> None:
        """Compute the plan's PyTorch steps, or `everything`, on the device `home`."""
        self._home = home
        self._typed = plan.graph.typed
        self._others: dict[str, list[Node]] = {}
        """The remaining nodes of each call, by the name of its first node."""
        self._ready: dict[str, torch.Tensor | None] = {}
        calls: dict[Hashable, list[Node]] = {}
        for step in plan.steps:
            call = call_of(step.node)
            if call is not None and (everything or step.in_pytorch):
                calls.setdefault(call, []).append(step.node)
        for first, *others in calls.values():
            self._others[first.name] = others

    def compute(self, node: Node, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a node's result; the call's other results are kept until their nodes are computed."""
        others = self._others.get(node.name)
        if node.name in self._ready:
            return self._checked(self._ready.pop(node.name), node)
        if not others:
            return compute(node, _widened(node, inputs) if self._typed else inputs, self._home)
        results = operator_of(node).results(node, inputs)
        for other in others:
            self._ready[other.name] = results[other.attributes["result"]]
        return self._checked(results[node.attributes["result"]], node)

    def _checked(self, result: torch.Tensor | None, node: Node) -> torch.Tensor:
        if result is None:
            raise OperatorError(
                f"PyTorch's {operator_of(node).title(node)} returned None for result {node.attributes['result']}, "
                "which was a tensor when the model was captured"
            )
        if not self._typed:  # a graph that may be from a file
            require_result(node, result, self._home)
        return result


def _widened(node: Node, inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Cast inputs narrower than the result to the result's dtype, for operators that absorb casts.

    `silu(x.float())` of a half is one node, `silu(x)`, with a float32 result. Kernels compute it in fp32; PyTorch would
    compute it in the type of its input.
    """
    if not node.is_floating or not operator_of(node).mixes_types:
        return inputs
    own = getattr(torch, node.dtype)
    return {
        role: value.to(own) if value.is_floating_point() and value.itemsize < own.itemsize else value
        for role, value in inputs.items()
    }
