"""Linear layers; in training steps, matrix products as 1×1 convolutions and their gradients.

Rows are images of one pixel, so nothing moves, and products get the fusions of convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import TENSOR_CORE_DTYPES
from escalade.engine.graph.graph import Batch, Graph, Node, dtype_name
from escalade.engine.nodes.base import (
    CAPTURE,
    FOLDED,
    AtenCall,
    Layouts,
    Match,
    Operator,
    Tensors,
    activate,
    activation_fields,
    match_aten,
)
from escalade.engine.nodes.conv2d import Conv2d, Conv2dInputGradient, Conv2dWeightGradient
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.signature import (
    FLAG,
    OPTIONAL_ROW,
    RESULT,
    ROWS,
    Attributes,
    Role,
    Signature,
    Sizes,
)
from escalade.engine.nodes.views import Permute, Reshape
from escalade.ops.conv2d import CONV2D
from escalade.ops.linear import LINEAR, LinearProblem, as_convolution
from escalade.ops.shared.quantized_input import dequantized

# Rows that fill a wgmma tile, and the number of products from which setting up tensor maps is worth it.
MANY_ROWS, MANY_PRODUCTS = 128, 2**30
_NARROW = ("float16", "bfloat16")
"""Dtypes in which Hopper kernels read weights and gradients without packing."""
_WINDOW: dict[str, Any] = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


class Linear(Operator):
    """y = x · weightᵀ + bias [+ residual], then ReLU or another expression.

    With `pooled`, x is an image, and the layer reads the mean of its pixels; with `quantized`, the image is stored in
    that dtype, divided by `scale`.
    """

    name = "linear"
    signature = Signature(
        {"x": ROWS, "weight": Role((2, 2), constant=True), "bias": OPTIONAL_ROW}, {"relu": FLAG}
    )
    takes_expressions = True

    @match_aten("linear", phases=(CAPTURE, FOLDED))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        inputs = {"x": call.value("input"), "weight": call.value("weight"), "bias": call.value("bias")}
        weight, bias = inputs["weight"], inputs["bias"]
        if weight not in graph.constants or (bias or weight) not in graph.constants:
            return None
        return self.instead_of(node, inputs, relu=False)

    # Products with a constant match after folding: in capture, the untransposed matrix would be kept as well.

    @match_aten("matmul", "mm", phases=(FOLDED,))
    def _match_matmul(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x, matrix = call.value("self"), call.value("other") or call.value("mat2")
        return self._product(node, x, matrix, None, graph)

    @match_aten("addmm", phases=(FOLDED,))
    def _match_addmm(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        bias = call.value("self")
        if call("beta", 1) != 1 or call("alpha", 1) != 1 or bias not in graph.constants:
            return None
        if graph.shape_of(bias) != node.shape[-1:]:
            return None
        return self._product(node, call.value("mat1"), call.value("mat2"), bias, graph)

    def _product(
        self, node: Node, x: str | None, matrix: str | None, bias: str | None, graph: Graph
    ) -> Match:
        if x is None or x in graph.constants or matrix not in graph.constants:
            return None
        weight = graph.constants[matrix]
        if not node.is_floating or weight.dim() != 2 or len(graph.shape_of(x)) < 2:
            return None
        name = graph.derive_constant(f"{node.name}_weight", matrix, lambda matrix: matrix.t().contiguous())
        return self.instead_of(node, {"x": x, "weight": name, "bias": bias}, relu=False)

    @match_aten("addmm")
    def _match_layer_in_step(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        bias = call.value("self")
        if bias is None or call("beta", 1) != 1 or call("alpha", 1) != 1:
            return None
        if graph.shape_of(bias) != node.shape[1:]:
            return None
        return _product_in_step(node, call.value("mat1"), call.value("mat2"), graph, bias)

    @match_aten("mm")
    def _match_product_in_step(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return _product_in_step(node, call.value("self"), call.value("mat2"), graph)

    def takes_residual(self, node: Node) -> bool:
        """Return True for rows of several dimensions, the pixels of a 1×1 convolution, at a fixed batch size.

        Before that, layers may still be fused with preceding ones.
        """
        return len(node.shape) > 2 and not any(isinstance(size, Batch) for size in node.shape)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = dequantized(inputs).mean((2, 3)) if node.attributes.get("pooled") else inputs["x"]
        return activate(node, F.linear(x, inputs["weight"], inputs.get("bias")), inputs.get("residual"))

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        outputs, features = sizes["weight"]
        rows = sizes["x"][:-1]
        return {"x": (*rows, features), RESULT: (*rows, outputs)}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        layout = "nhwc" if node.attributes.get("pooled") else "nchw"
        return Layouts(layout, layout)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        outputs, features = forms.sizes(node.inputs["weight"])
        rows = prod(forms.value(node.name).shape) // outputs
        pixels = prod(forms.value(node.inputs["x"]).shape[2:]) if node.attributes.get("pooled") else 1
        problem = LinearProblem(
            rows, features, outputs, "bias" in node.inputs, dtype=forms.dtype, pixels=pixels,
            x_dtype=node.attributes.get("quantized", ""),
        )  # fmt: skip
        activation = activation_fields(node)
        if len(node.shape) > 2 or _is_large(problem):  # rows of more dimensions are pixels: there are many
            has_residual = "residual" in node.inputs
            return Lowered(CONV2D, replace(as_convolution(problem), residual=has_residual, **activation))
        return Lowered(LINEAR, replace(problem, **activation), {"scale": FP32})


def _is_large(problem: LinearProblem) -> bool:
    """Return True if the rungs of 1×1 convolutions, which use wgmma, are faster."""
    products = problem.output_elements * problem.in_features
    has_rungs = problem.pixels == 1 and problem.dtype in TENSOR_CORE_DTYPES
    return has_rungs and problem.batch >= MANY_ROWS and products >= MANY_PRODUCTS


def _product_in_step(
    node: Node, first: str | None, second: str | None, graph: Graph, bias: str | None = None
) -> Match:
    """Match first @ second + bias, a layer or one of its gradients, by which operand is transposed."""
    if not graph.typed or first is None or second is None or node.dtype not in _NARROW:
        return None
    (a, is_a_transposed), (b, is_b_transposed) = _untransposed(first, graph), _untransposed(second, graph)
    if {a, b} & graph.constants.keys() or (is_a_transposed and is_b_transposed):
        return None
    if bias is not None and not is_b_transposed:
        return None
    if len({graph.dtype_of(name) for name in (a, b, bias or a)}) > 1:
        return None
    if is_a_transposed:
        kind: type[Operator] = Conv2dWeightGradient
        inputs, more = {"x": b, "gradient": a}, {"bias": False}
    elif is_b_transposed:
        kind, inputs, more = Conv2d, {"x": a, "weight": b}, {"relu": False}
    else:
        kind, inputs, more = Conv2dInputGradient, {"gradient": a, "weight": b}, {}
    images = {role: _as_image(value, graph) for role, value in inputs.items()}
    if bias is not None:
        images["bias"] = bias
    shape = (*node.shape, 1, 1)
    product = graph.add(kind.node(f"{node.name}_image", images, {**_WINDOW, **more}, shape, node.dtype))
    return Reshape.instead_of(node, {"x": product})


def _untransposed(value: str, graph: Graph) -> tuple[str, bool]:
    """Return the stored matrix of a value, and True if the value is its transpose."""
    is_transposed = False
    while Permute.matches(node := graph.nodes.get(value)):
        value, is_transposed = node.inputs["x"], not is_transposed
    return value, is_transposed


def _as_image(rows: str, graph: Graph) -> str:
    """Return rows as images of one pixel."""
    shape = (*graph.shape_of(rows), 1, 1)
    node = graph.nodes.get(rows)
    if Reshape.matches(node) and graph.shape_of(node.inputs["x"]) == shape:
        return node.inputs["x"]
    dtype = dtype_name(graph.dtype_of(rows))
    return graph.add(Reshape.node(f"{rows}_pixels", {"x": rows}, {}, shape, dtype))
