"""The gradients of batch normalisation in training, also behind a ReLU or another function of single elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import RELU, Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.batch_norm_training import BatchNormTraining
from escalade.engine.nodes.gradients import are_wide, masked_by, put_in_order
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.side_outputs import Further, furthers_of, readers_of
from escalade.ops.batch_norm_backward import BATCH_NORM_BACKWARD, BatchNormBackwardProblem, gradients, masked

_INPUTS = {"weight": "weight", "mean": "save_mean", "rstd": "save_invstd"}
"""The values by channel, with PyTorch's names for them."""
_FURTHER = ("weight_gradient", "bias_gradient")
"""The results behind the first, in PyTorch's order."""
_RESIDUAL = "residual_gradient"


class BatchNormBackward(Operator):
    """dx of y = relu((x - mean) * rstd * weight + bias + residual), and beside it the gradients of weight and bias.

    Behind a ReLU, `mask` says how its mask is found: by its `output`, or by x, for which there is `bias`. With
    `residual` there is the gradient in front of the ReLU too. Behind another function, `function` says what it leaves
    of a gradient, by x.
    """

    name = "batch_norm_backward"
    values = ("gradient", "x", "output")
    mixes_types = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"native_batch_norm_backward": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """Takes images whose statistics are kept in fp32, in the graph of a training step."""
        given = {role: call.value(name) for role, name in _INPUTS.items()}
        gradient, x = call.value("grad_out"), call.value("input")
        result, source = node.attributes.get("result"), node.attributes.get("call")
        if source is None or gradient is None or x is None or not call("train"):
            return None
        if len(graph.shape_of(x)) != 4 or not are_wide(given.values(), graph):
            return None
        if result == 0:
            inputs = {"gradient": gradient, "x": x, **given}
            return self.instead_of(node, inputs, mask="none", residual=False, function="", source=source)
        maker = next((one for one in graph if self.matches(one) and one.attributes["source"] == source), None)
        if maker is None or result is None:
            return None
        return Further.of(maker, node.name, _FURTHER[result - 1], node.shape, node.dtype)

    def fuse_step(self, graph: Graph) -> None:
        """Takes the backward pass of a ReLU in front of it, or that of another function of what was normalised: then
        the normalisation applies that function itself, and what it was applied to is written nowhere."""
        for node in graph:
            if not self.matches(node) or node.attributes["mask"] != "none":
                continue
            before = graph.nodes.get(node.inputs["gradient"])
            if before is None or before.name in graph.outputs:
                continue
            found = masked_by(before, graph)
            if found is None:
                _take_function(node, before, graph)
                continue
            gradient, output = found
            own = {node.name, *(one.name for one in furthers_of(node, graph))}
            others = [one for one in readers_of(before, graph) if one.name not in own]
            bias = None if others else _bias_by(output, node, graph)
            fused = node.with_inputs(
                gradient=gradient, **({"output": output} if bias is None else {"bias": bias})
            ).with_attributes(mask="output" if bias is None else "x", residual=bool(others))
            _replace(graph, fused)
            if others:
                graph.nodes[before.name] = Further.of(
                    fused, before.name, _RESIDUAL, before.shape, before.dtype
                )
            else:
                del graph.nodes[before.name]
        put_in_order(graph)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        problem = _problem(node, tuple(inputs["x"].shape), "fp32")
        return gradients(problem, inputs)[0].to(inputs["gradient"].dtype)

    def further(self, node: Node, inputs: Tensors) -> Tensors:
        problem = _problem(node, tuple(inputs["x"].shape), "fp32")
        _, *by_channel = gradients(problem, inputs)
        found = {name: one.float() for name, one in zip(_FURTHER, by_channel, strict=True)}
        return {**found, _RESIDUAL: masked(problem, inputs)}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        own = forms.value(node.name)
        roles = [role for role in self.values if role in node.inputs]
        if any(forms.value(node.inputs[role]).dtype != own.dtype for role in roles):
            return None
        return Lowered(BATCH_NORM_BACKWARD, _problem(node, own.shape, forms.stored))


def _problem(node: Node, shape: tuple[int, ...], dtype: str) -> BatchNormBackwardProblem:
    batch, channels, height, width = shape
    a = node.attributes
    return BatchNormBackwardProblem(
        batch, channels, height, width, a["mask"], a["residual"], dtype, "nhwc", a["function"]
    )


def _take_function(node: Node, before: Node, graph: Graph) -> None:
    """Has the gradients of a normalisation find by x what the function behind it was applied to, if nobody but that
    function and this, its backward pass, reads it."""
    own = {node.name, *(one.name for one in furthers_of(node, graph))}
    if not Pointwise.matches(before) or len(before.inputs) != 2:
        return
    if any(one.name not in own for one in readers_of(before, graph)):
        return
    expression = Pointwise().expression(before)
    for role, other in (tuple(before.inputs), tuple(before.inputs)[::-1]):
        forward, gradient = graph.nodes.get(before.inputs[role]), before.inputs[other]
        if not _is_normalised(forward, node) or not _are_alike((forward.name, gradient, node.name), graph):
            continue
        function = expression.rename({role: "x", other: "gradient"})
        if set(function.inputs) != {"x", "gradient"} or len(readers_of(forward, graph)) != 2:
            return
        bias = forward.inputs["bias"]
        fused = node.with_inputs(gradient=gradient, bias=bias)
        _replace(graph, fused.with_attributes(mask="x", function=function.text))
        del graph.nodes[before.name]
        BatchNormTraining().take_reader(forward, graph)
        return


def _is_normalised(forward: Node | None, node: Node) -> TypeGuard[Node]:
    """Whether a value is the normalisation whose gradients a node has, and nothing else."""
    if not BatchNormTraining.matches(forward) or not BatchNormTraining().is_plain(forward):
        return False
    return all(forward.inputs[role] == node.inputs[role] for role in ("x", "weight"))


def _are_alike(values: Sequence[str], graph: Graph) -> bool:
    """Whether these are values of the same type and sizes, none of them a constant."""
    kinds = {(graph.dtype_of(name), graph.shape_of(name)) for name in values}
    return len(kinds) == 1 and graph.constants.keys().isdisjoint(values)


def _bias_by(output: str, node: Node, graph: Graph) -> str | None:
    """The bias by which the mask is found again from x, if a ReLU's output is nothing but that of the normalisation."""
    forward = graph.nodes.get(output)
    if not BatchNormTraining.matches(forward) or "residual" in forward.inputs:
        return None
    same = all(forward.inputs[role] == node.inputs[role] for role in ("x", "weight"))
    return forward.inputs["bias"] if same and BatchNormTraining().applied(forward) == RELU else None


def _replace(graph: Graph, maker: Node) -> None:
    """Puts a node in the place of one of the same name, and its further results too."""
    for one in furthers_of(maker, graph):
        graph.nodes[one.name] = Further.of(maker, one.name, one.attributes["buffer"], one.shape, one.dtype)
    graph.nodes[maker.name] = maker
