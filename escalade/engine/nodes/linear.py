"""The linear layer over the last dimension with bias, residual and activation; and with an image's mean in front."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import TENSOR_CORE_DTYPES
from escalade.engine.graph.graph import Batch, Graph, Node, Shape
from escalade.engine.nodes.adaptive_avg_pool2d import AdaptiveAvgPool2d
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import (
    ROWS_OF_LAST,
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    activation_of,
    finish,
    spread,
    unpermuted,
)
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.matrices import layer_in_step, product_in_step
from escalade.engine.nodes.permute import CHANNELS_LAST
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.signature import FLAG, RESULT, ROWS, Attributes, Role, Signature, Sizes
from escalade.ops.conv2d import CONV2D
from escalade.ops.linear import LINEAR, LinearProblem
from escalade.ops.linear.rungs.pooled import one_launch_pays
from escalade.ops.linear.rungs.tensor_core import as_convolution

_MANY_ROWS, _MANY_PRODUCTS = 128, 2**30
"""Rows that fill a tile of Hopper's own tensor-core instructions, and products for which that is worth its tensor
maps."""


class Linear(Operator):
    """y = x · weightᵀ + bias [+ residual], then ReLU or another expression."""

    name = "linear"
    signature = Signature(
        {
            "x": ROWS,
            "weight": Role((2, 2), constant=True),
            "bias": Role((1, 1), constant=True, optional=True),
        },
        {"relu": FLAG},
    )
    takes_expressions = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"linear": self._recognise, "addmm": layer_in_step, "mm": product_in_step}

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        """Products of matrices not before: the model's own matrix would be kept beside the transposed one."""
        return {**self.captured, "matmul": self._matmul, "mm": self._matmul, "addmm": self._addmm}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        inputs = {"x": call.value("input"), "weight": call.value("weight"), "bias": call.value("bias")}
        weight, bias = inputs["weight"], inputs["bias"]
        if weight not in graph.constants or (bias or weight) not in graph.constants:
            return None
        return self.instead_of(node, inputs, relu=False)

    def _matmul(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """x @ matrix is a linear layer whose weight is the matrix transposed."""
        x, matrix = call.value("self"), call.value("other") or call.value("mat2")
        return self._product(node, x, matrix, None, graph)

    def _addmm(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        bias = call.value("self")
        if call("beta", 1) != 1 or call("alpha", 1) != 1 or bias not in graph.constants:
            return None
        if graph.shape_of(bias) != node.shape[-1:]:
            return None
        return self._product(node, call.value("mat1"), call.value("mat2"), bias, graph)

    def _product(
        self, node: Node, x: str | None, matrix: str | None, bias: str | None, graph: Graph
    ) -> Recognised:
        if x is None or x in graph.constants or matrix not in graph.constants:
            return None
        weight = graph.constants[matrix]
        if not node.is_floating or weight.dim() != 2 or len(graph.shape_of(x)) < 2:
            return None
        name = graph.add_constant(f"{node.name}_weight", weight.t().contiguous())
        return self.instead_of(node, {"x": x, "weight": name, "bias": bias}, relu=False)

    def fuse_for_batch(self, graph: Graph, dtype: str) -> None:
        fuse_pooled(graph, dtype)

    def takes_residual(self, node: Node) -> bool:
        """Rows of several dimensions, which are pixels of a 1×1 convolution, do; not before their number is known, for
        until then layers may become one step with those in front."""
        return len(node.shape) > 2 and not any(isinstance(size, Batch) for size in node.shape)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"].mean((2, 3)) if node.attributes.get("pooled") else inputs["x"]
        return finish(node, F.linear(x, inputs["weight"], inputs.get("bias")), inputs)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        outputs, features = sizes["weight"]
        rows = sizes["x"][:-1]
        return {"x": (*rows, features), "bias": (outputs,), RESULT: (*rows, outputs)}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return super().layouts(node, given) if node.attributes.get("pooled") else ROWS_OF_LAST

    def before_permute(self, node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
        """A layer over an image's channels is a 1×1 convolution."""
        if order != CHANNELS_LAST:
            return None
        outputs, features = graph.constants[node.inputs["weight"]].shape
        weight = graph.constants[node.inputs["weight"]].view(outputs, features, 1, 1)
        name = graph.add_constant(f"{node.name}_weight", weight)
        return Conv2d.instead_of(
            unpermuted(node, order), {**node.inputs, "weight": name},
            stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, relu=node.attributes["relu"],
        )  # fmt: skip

    def lower(self, node: Node, forms: Forms) -> Lowered:
        outputs, features = forms.sizes(node.inputs["weight"])
        rows = prod(forms.value(node.name).shape) // outputs
        pixels = prod(forms.value(node.inputs["x"]).shape[2:]) if node.attributes.get("pooled") else 1
        problem = LinearProblem(
            rows, features, outputs, "bias" in node.inputs, dtype=forms.dtype, pixels=pixels
        )
        applied = activation_of(node)
        if len(node.shape) > 2 or _is_large(problem):  # rows of more dimensions are pixels: there are many
            is_added = "residual" in node.inputs
            return Lowered(CONV2D, replace(as_convolution(problem), residual=is_added, **applied))
        return Lowered(LINEAR, replace(problem, **applied))

    def reading_channels(
        self, node: Node, order: tuple[int, ...], channels: int, graph: Graph
    ) -> Node | None:
        if len(graph.shape_of(node.inputs["x"])) != 2:
            return None
        weight = spread(graph.constants[node.inputs["weight"]], 1, order, channels)
        return node.with_inputs(weight=graph.add_constant(f"{node.name}_weight", weight))

    def scaled_axis(self, node: Node) -> int:
        return len(node.shape) - 1

    def feature_constants(self, node: Node) -> tuple[str, ...]:
        return ("weight",)


def _is_large(problem: LinearProblem) -> bool:
    """Whether the rungs of a 1×1 convolution, which know Hopper's own instructions, are for it."""
    products = problem.output_elements * problem.in_features
    is_one = problem.pixels == 1 and problem.dtype in TENSOR_CORE_DTYPES
    return is_one and problem.batch >= _MANY_ROWS and products >= _MANY_PRODUCTS


def fuse_pooled(graph: Graph, dtype: str) -> None:
    """adaptive_avg_pool2d to one pixel → reshape to rows → linear, at batch sizes for which one launch pays.

    The layer reads what the pool read, which lies in NHWC; it runs where it did.
    """
    for node in graph:
        if not AdaptiveAvgPool2d.is_mean_of_nhwc(node):
            continue
        image = graph.shape_of(node.inputs["x"])
        rows = graph.only_user(node.name)
        if not Reshape.matches(rows) or rows.shape != image[:2]:
            continue
        layer = graph.only_user(rows.name)
        if not Linear.matches(layer) or not _pays(graph, layer, image, dtype):
            continue
        sources = ", ".join(source for source in (node.source, layer.source) if source)
        pooled = layer.with_inputs(x=node.inputs["x"]).with_attributes(pooled=True)
        graph.nodes[layer.name] = replace(pooled, source=sources)
        del graph.nodes[node.name], graph.nodes[rows.name]


def _pays(graph: Graph, layer: Node, image: Shape, dtype: str) -> bool:
    batch, _, height, width = image
    assert isinstance(batch, int) and isinstance(height, int) and isinstance(width, int)
    outputs, features = graph.constants[layer.inputs["weight"]].shape
    stored = "fp16" if dtype == "fp8" else dtype
    problem = LinearProblem(
        batch,
        features,
        outputs,
        "bias" in layer.inputs,
        dtype=stored,
        pixels=height * width,
        **activation_of(layer),
    )
    return one_launch_pays(problem)
