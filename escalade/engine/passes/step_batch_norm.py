"""Training steps: fusion of pointwise functions into BatchNorm and GroupNorm, of their backward passes into the
gradients of these, and of BatchNorm's statistics into the convolution before it."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeGuard

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import RELU, activation_of, with_activation
from escalade.engine.nodes.batch_norm import (
    RESIDUAL_GRADIENT,
    VARIANCE,
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
)
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.conv3d import Conv3d, is_input_gradient
from escalade.engine.nodes.elementwise import Add, Relu
from escalade.engine.nodes.norms import GroupNorm, GroupNormBackward
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.side_outputs import SideOutput, readers_of, side_outputs_of, with_producer
from escalade.engine.passes.casts import fuse_casts_of
from escalade.engine.passes.estimates import Estimates, assumed_forms
from escalade.engine.passes.gradient_patterns import are_alike, relu_backward_operands, sort_nodes
from escalade.ops.expressions import IDENTITY, Expression

_RELU_GRADIENT = Expression.parse("where(x <= 0, 0, gradient)")
WORTHWHILE = 0.9
"""A fusion must take less than this fraction of the unfused estimate: estimates are off by about as much."""


def fuse_batch_norm_epilogues(graph: Graph) -> None:
    """Fuse an addition and a pointwise function into the normalization before them; into a GroupNorm no addition."""
    for node in graph:
        if BatchNormTraining.matches(node) or GroupNorm.matches(node):
            _fuse_reader(node, graph)
    sort_nodes(graph)


def _fuse_reader(node: Node, graph: Graph) -> None:
    """Fuse the only reader of a normalization's result into it, if possible."""
    readers = readers_of(node, graph)
    if not _is_plain(node) or len(readers) != 1 or node.name in graph.outputs:
        return
    epilogue = _epilogue(node, readers[0], graph)
    if epilogue is not None:
        residual, expression = epilogue
        fused = with_activation(node.with_inputs(residual=residual) if residual else node, expression)
        graph.nodes[node.name] = replace(fused, dtype=readers[0].dtype)
        graph.remove(readers[0], instead=node.name)


def _is_plain(node: Node) -> bool:
    return activation_of(node).is_identity and "residual" not in node.inputs


def _epilogue(node: Node, reader: Node, graph: Graph) -> tuple[str | None, Expression] | None:
    """Return the value that a reader adds to a result, if any, and the expression that it then applies."""
    writes_any = GroupNorm.matches(node) and graph.dtype_of(reader.name) in NAMES
    if reader.shape != node.shape or (reader.dtype != node.dtype and not writes_any):
        return None
    if Add.matches(reader):
        if GroupNorm.matches(node):
            return None
        residual = next((name for name in reader.inputs.values() if name != node.name), None)
        if residual is None or residual in graph.constants:
            return None
        if graph.dtype_of(residual) != graph.dtype_of(node.name):
            return None
        return residual, activation_of(reader)
    if len(reader.inputs) != 1:
        return None
    if Relu.matches(reader):
        return None, Relu().expression(reader)
    if Pointwise.matches(reader):
        expression = Pointwise().expression(reader)
        return (None, expression) if expression != IDENTITY else None
    return None


def fuse_batch_norm_statistics(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Compute the statistics of a batch normalization in the convolution before it, where the estimates favor it.

    The normalization then reads x once instead of twice.
    """
    forms = None
    for node in list(graph):
        layer = graph.nodes.get(node.inputs["x"]) if BatchNormTraining.matches(node) else None
        if (
            not (Conv2d.matches(layer) or Conv3d.matches(layer))
            or "epsilon" in layer.attributes
            or "pool" in layer.attributes
        ):
            continue
        a = node.attributes
        roles = ("running_mean", "running_variance")
        fused = layer.with_inputs(**{role: node.inputs[role] for role in roles})
        fused = fused.with_attributes(epsilon=a["epsilon"], momentum=a["momentum"])
        variance = SideOutput.of(
            fused, graph.fresh(f"{node.name}_variance"), VARIANCE, (node.shape[1],), "float32"
        )
        outputs = {one.attributes["buffer"]: one for one in side_outputs_of(node, graph)}
        if "mean" not in outputs:
            continue
        inputs = {role: name for role, name in node.inputs.items() if role not in roles}
        inputs |= {"mean": outputs["mean"].name, "variance": variance.name}
        kept = {name: value for name, value in a.items() if name not in ("momentum", "source")}
        normalize = BatchNorm.instead_of(node, inputs, **kept)
        forms = forms or assumed_forms(graph, dtype)
        if not estimates.favor((fused, normalize), (layer, node), forms.of(node)):
            continue
        graph.nodes |= {fused.name: fused, variance.name: variance, normalize.name: normalize}
        for one in outputs.values():
            graph.nodes[one.name] = with_producer(one, fused)
    sort_nodes(graph)


def fuse_batch_norm_gradients(graph: Graph) -> None:
    """Fuse the backward pass of ReLU, or of another function, into the gradients of the normalization before it.

    The normalization then applies that function itself, and its own result is never written.
    """
    for node in graph:
        is_group_norm = GroupNormBackward.matches(node) and not node.attributes["function"]
        if not is_group_norm and not (BatchNormBackward.matches(node) and node.attributes["mask"] == "none"):
            continue
        before = graph.nodes.get(node.inputs["gradient"])
        if before is None or before.name in graph.outputs:
            continue
        operands = relu_backward_operands(before, graph, alike=not is_group_norm)
        if operands is None:
            _fuse_function(node, before, graph)
        elif is_group_norm:
            _fuse_group_norm_relu(node, before, *operands, graph)
        else:
            _fuse_relu(node, before, *operands, graph)
    sort_nodes(graph)


def fuse_batch_norm_sums(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Compute the sums for a normalization's gradients, and its ReLU's mask, with the gradient of its result.

    The gradients then read it once instead of twice, and the ReLU's output not at all.
    """
    forms = None
    for node in list(graph):
        is_free = BatchNormBackward.matches(node) and not node.attributes["function"]
        gradient = graph.nodes.get(node.inputs["gradient"]) if is_free else None
        if not is_input_gradient(gradient) or {"mask", "norm_x"} & gradient.inputs.keys():
            continue
        if _other_readers(gradient, node, graph) or gradient.name in graph.outputs:
            continue
        roles = ("x", "output", "mean", "rstd", "weight", "bias")
        own = {f"norm_{role}": node.inputs[role] for role in roles if role in node.inputs}
        summed = gradient.with_inputs(**own).with_attributes(norm=node.attributes["mask"])
        outputs = {one.attributes["buffer"]: one for one in side_outputs_of(node, graph)}
        if not {"weight_gradient", "bias_gradient"} <= outputs.keys():
            continue
        sums = {role: outputs[role].name for role in ("weight_gradient", "bias_gradient")}
        rest = node.with_inputs(output=None, bias=None, **sums)
        rest = rest.with_attributes(mask="none", residual=False, summed=True)
        forms = forms or assumed_forms(graph, dtype)
        if not estimates.favor((summed, rest), (gradient, node), forms.of(node), WORTHWHILE):
            continue
        # The convolution now writes its gradient already masked, which is the residual's gradient.
        if RESIDUAL_GRADIENT in outputs:
            graph.remove(outputs[RESIDUAL_GRADIENT], instead=gradient.name)
        graph.nodes |= {summed.name: summed, rest.name: rest}
        for role, name in sums.items():
            graph.nodes[name] = with_producer(outputs[role], summed)
    sort_nodes(graph)


def _fuse_relu(node: Node, before: Node, gradient: str, output: str, graph: Graph) -> None:
    """Mask by the ReLU's output, or by x if its output depends on x alone; write the masked gradient if it is read."""
    others = _other_readers(before, node, graph)
    bias = None if others else _bias_for_mask(output, node, graph)
    operand = {"output": output} if bias is None else {"bias": bias}
    fused = node.with_inputs(gradient=gradient, **operand)
    fused = fused.with_attributes(mask="output" if bias is None else "x", residual=bool(others))
    _replace(graph, fused)
    if others:
        side_output = SideOutput.of(fused, before.name, RESIDUAL_GRADIENT, before.shape, before.dtype)
        graph.nodes[before.name] = side_output
    else:
        del graph.nodes[before.name]


def _fuse_group_norm_relu(node: Node, before: Node, gradient: str, output: str, graph: Graph) -> None:
    """Recompute a ReLU's operand from x, for its mask."""
    forward = graph.nodes.get(output)
    if not _is_forward_of(forward, node, graph) or activation_of(forward) != RELU:
        return
    if _other_readers(before, node, graph) or not _can_read(node, forward, gradient, graph):
        return
    fused = node.with_inputs(gradient=gradient, bias=forward.inputs.get("bias"))
    _replace(graph, fused.with_attributes(function=_RELU_GRADIENT.text))
    del graph.nodes[before.name]
    fuse_casts_of(graph, graph.nodes[forward.name])


def _fuse_function(node: Node, before: Node, graph: Graph) -> None:
    """Recompute the operand of a function from x, if only the function and its backward pass read it."""
    if not Pointwise.matches(before) or len(before.inputs) != 2 or _other_readers(before, node, graph):
        return
    expression = Pointwise().expression(before)
    for role, other in (tuple(before.inputs), tuple(before.inputs)[::-1]):
        forward, gradient = graph.nodes.get(before.inputs[role]), before.inputs[other]
        if not _is_forward_of(forward, node, graph) or not _is_plain(forward):
            continue
        if not _can_read(node, forward, gradient, graph):
            continue
        function = expression.rename({role: "x", other: "gradient"})
        if set(function.inputs) != {"x", "gradient"} or len(readers_of(forward, graph)) != 2:
            return
        fused = node.with_inputs(gradient=gradient, bias=forward.inputs.get("bias"))
        mask = {"mask": "x"} if BatchNormBackward.matches(node) else {}
        _replace(graph, fused.with_attributes(**mask, function=function.text))
        del graph.nodes[before.name]
        _fuse_reader(forward, graph)
        return


def _other_readers(value: Node, node: Node, graph: Graph) -> list[Node]:
    """Return the readers of a value besides a node and its side outputs."""
    own = {node.name, *(one.name for one in side_outputs_of(node, graph))}
    return [one for one in readers_of(value, graph) if one.name not in own]


def _can_read(node: Node, forward: Node, gradient: str, graph: Graph) -> bool:
    """Return True if a normalization's gradients can read the gradient of what follows its forward node."""
    if BatchNormBackward.matches(node):
        return are_alike((forward.name, gradient, node.name), graph)
    is_alike = graph.shape_of(gradient) == node.shape and graph.dtype_of(gradient) in NAMES
    return is_alike and gradient not in graph.constants


def _is_forward_of(forward: Node | None, node: Node, graph: Graph) -> TypeGuard[Node]:
    if GroupNorm.matches(forward):
        return node.inputs["mean"] in (one.name for one in side_outputs_of(forward, graph))
    if not BatchNormTraining.matches(forward):
        return False
    return all(forward.inputs[role] == node.inputs[role] for role in ("x", "weight"))


def _bias_for_mask(output: str, node: Node, graph: Graph) -> str | None:
    """Return the bias with which the mask can be recomputed from x, if a ReLU's output is relu(norm(x))."""
    forward = graph.nodes.get(output)
    if not _is_forward_of(forward, node, graph) or "residual" in forward.inputs:
        return None
    return forward.inputs["bias"] if activation_of(forward) == RELU else None


def _replace(graph: Graph, node: Node) -> None:
    """Replace the node of the same name, and its side outputs."""
    for one in side_outputs_of(node, graph):
        graph.nodes[one.name] = with_producer(one, node)
    graph.nodes[node.name] = node
