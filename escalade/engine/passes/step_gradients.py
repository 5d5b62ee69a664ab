"""Training steps: fusion into the gradients of convolutions and max pools."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import activation_of
from escalade.engine.nodes.conv2d import (
    BIAS_DIMS,
    BIAS_GRADIENT,
    Conv2dInputGradient,
    Conv2dWeightGradient,
)
from escalade.engine.nodes.pools import INDICES, MaxPool2d, MaxPool2dBackward
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.side_outputs import SideOutput, insert_side_output
from escalade.engine.nodes.views import Reshape
from escalade.engine.passes.gradient_patterns import relu_backward_after, sort_nodes
from escalade.ops.max_pool2d import NOWHERE

_WINDOW = ("kernel", "stride", "padding", "ceil_mode", "dilation")


def mask_input_gradients(graph: Graph) -> None:
    """Fuse the backward pass of the ReLU before a convolution into the gradient of its input."""
    for node in graph:
        is_free = Conv2dInputGradient.matches(node) and not {"mask", "residual"} & node.inputs.keys()
        found = relu_backward_after(node, graph) if is_free else None
        if found is not None:
            relu, result = found
            graph.nodes[relu.name] = replace(node.with_inputs(mask=result), name=relu.name)
            del graph.nodes[node.name]


def fuse_bias_gradients(graph: Graph) -> None:
    """Fuse the gradient of a bias into that of the weight: the sum of the same gradient, which its kernels read."""
    changed = False
    for node in graph:
        if not Conv2dWeightGradient.matches(node) or node.attributes["bias"]:
            continue
        gradient = node.inputs["gradient"]
        image = graph.nodes.get(gradient)
        rows = graph.readers(image.inputs["x"]) if Reshape.matches(image) else []
        sums = (
            other for other in (*graph.readers(gradient), *rows) if _is_bias_gradient(other, gradient, graph)
        )
        bias = next(sums, None)
        if bias is None or bias.dtype != node.dtype:
            continue
        fused = node.with_attributes(bias=True)
        insert_side_output(
            graph, fused, SideOutput.of(fused, bias.name, BIAS_GRADIENT, bias.shape, bias.dtype)
        )
        changed = True
    if changed:
        sort_nodes(graph)


def _is_bias_gradient(node: Node, gradient: str, graph: Graph) -> bool:
    """Return True for the sum of a gradient over all dimensions but its channels, or over the rows it is a view of."""
    if not Reduce.matches(node):
        return False
    a, image = node.attributes, graph.nodes.get(gradient)
    is_of_rows = (
        Reshape.matches(image)
        and node.inputs["x"] == image.inputs["x"]
        and len(graph.shape_of(node.inputs["x"])) == 2
    )
    return (
        (is_of_rows or node.inputs["x"] == gradient)
        and (a["kind"], a["dims"]) == ("sum", (0,) if is_of_rows else BIAS_DIMS)
        and "before" not in a
        and activation_of(node).is_identity
    )


def fuse_max_pool_gradients(graph: Graph) -> None:
    """Fuse the backward pass of the ReLU before a max pool, and let the pool itself write its argmax indices."""
    for node in graph:
        if not MaxPool2dBackward.matches(node) or INDICES in node.inputs:
            continue
        found = relu_backward_after(node, graph)
        relu = found[0] if found is not None and found[1] == node.inputs["x"] else None
        fused = node.with_attributes(mask=relu is not None)
        pool = next((other for other in graph if _is_forward_of(other, node)), None)
        if pool is not None:
            indices = _write_indices(graph, pool, behind_relu=relu is not None)
            fused = fused.with_inputs(x=None, places=indices).with_attributes(mask=False)
        if relu is not None:
            graph.nodes[relu.name] = replace(fused, name=relu.name)
            del graph.nodes[node.name]
        else:
            graph.nodes[node.name] = fused


def _is_forward_of(pool: Node, backward: Node) -> bool:
    """Return True if a node is the pool whose gradient `backward` is, and can write its argmax indices."""
    if not MaxPool2d.matches(pool) or pool.inputs["x"] != backward.inputs["x"] or INDICES in pool.attributes:
        return False
    a, b = pool.attributes, backward.attributes
    height, width = a["kernel"]
    return height * width <= NOWHERE and all(a[key] == b[key] for key in _WINDOW)  # indices are uint8


def _write_indices(graph: Graph, pool: Node, *, behind_relu: bool) -> str:
    """Let a pool write its argmax indices; return their name."""
    fused = pool.with_attributes(**{INDICES: True, "behind_relu": behind_relu})
    indices = SideOutput.of(fused, graph.fresh(f"{pool.name}_{INDICES}"), INDICES, pool.shape, "uint8")
    insert_side_output(graph, fused, indices)
    return indices.name
