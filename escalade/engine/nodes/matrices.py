"""Products of matrices in a training step: linear layers and their gradients are those of 1×1 convolutions.

Rows are images of one pixel, so nothing moves; and what convolutions take on their way out, linear layers do too.
"""

from __future__ import annotations

from typing import Any

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.conv2d_input_gradient import Conv2dInputGradient
from escalade.engine.nodes.conv2d_weight_gradient import Conv2dWeightGradient
from escalade.engine.nodes.permute import Permute
from escalade.engine.nodes.reshape import Reshape
from escalade.ops.base.dtypes import VECTOR_BYTES

_NARROW_BYTES = {"float16": 2, "bfloat16": 2}
"""The types in which kernels for Hopper read weights and gradients as they lie, with the bytes of an element."""
_WINDOW: dict[str, Any] = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


def layer_in_step(node: Node, call: AtenCall, graph: Graph) -> Recognised:
    """bias + x @ weightᵀ."""
    bias = call.value("self")
    if (
        bias is None
        or call("beta", 1) != 1
        or call("alpha", 1) != 1
        or graph.shape_of(bias) != node.shape[1:]
    ):
        return None
    return _product(node, call.value("mat1"), call.value("mat2"), graph, bias)


def product_in_step(node: Node, call: AtenCall, graph: Graph) -> Recognised:
    """x @ weightᵀ, or one of its gradients."""
    return _product(node, call.value("self"), call.value("mat2"), graph)


def _product(
    node: Node, first: str | None, second: str | None, graph: Graph, bias: str | None = None
) -> Recognised:
    if not graph.typed or first is None or second is None or not _is_aligned(node, first, graph):
        return None
    (a, a_turned), (b, b_turned) = _as_it_lies(first, graph), _as_it_lies(second, graph)
    if {a, b} & graph.constants.keys() or (a_turned and b_turned) or (bias is not None and not b_turned):
        return None
    if len({graph.dtype_of(name) for name in (a, b, bias or a)}) > 1:
        return None
    if a_turned:
        kind: type[Operator] = Conv2dWeightGradient
        inputs, more = {"x": b, "gradient": a}, {"bias": False}
    elif b_turned:
        kind, inputs, more = Conv2d, {"x": a, "weight": b}, {"relu": False}
    else:
        kind, inputs, more = Conv2dInputGradient, {"gradient": a, "weight": b}, {}
    images = {role: _image(value, graph) for role, value in inputs.items()}
    if bias is not None:
        images["bias"] = bias
    image = kind.node(
        graph.fresh(f"{node.name}_image"), images, {**_WINDOW, **more}, (*node.shape, 1, 1), node.dtype
    )
    graph.append(image)
    return Reshape.instead_of(node, {"x": image.name})


def _is_aligned(node: Node, first: str, graph: Graph) -> bool:
    """Whether rows of all matrices are read 16 bytes at once."""
    size = _NARROW_BYTES.get(node.dtype)
    sizes = (*node.shape, *graph.shape_of(first))
    rows = node.shape[0] if _as_it_lies(first, graph)[1] is False else graph.shape_of(first)[1]
    return size is not None and all(
        isinstance(one, int) and (one == rows or one * size % VECTOR_BYTES == 0) for one in sizes
    )


def _as_it_lies(value: str, graph: Graph) -> tuple[str, bool]:
    """The matrix that a value is, and whether it is that transposed."""
    turned = False
    while Permute.matches(node := graph.nodes.get(value)):
        value, turned = node.inputs["x"], not turned
    return value, turned


def _image(rows: str, graph: Graph) -> str:
    """Rows as images of one pixel."""
    shape = (*graph.shape_of(rows), 1, 1)
    node = graph.nodes.get(rows)
    if Reshape.matches(node) and graph.shape_of(node.inputs["x"]) == shape:
        return node.inputs["x"]
    dtype = str(graph.dtype_of(rows)).removeprefix("torch.")
    image = Reshape.node(graph.fresh(f"{rows}_pixels"), {"x": rows}, {}, shape, dtype)
    graph.append(image)
    return image.name
