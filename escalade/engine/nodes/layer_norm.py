"""Layer normalisation over the last dimension, or over the channels of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import (
    ROWS_OF_LAST,
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    activate,
    activation_of,
    unpermuted,
)
from escalade.engine.nodes.channels import channels_as_they_lie, side_by_side
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.permute import CHANNELS_FIRST, CHANNELS_LAST
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.signature import (
    EPSILON,
    FLAG,
    OPTIONAL_VECTOR,
    RESULT,
    ROWS,
    Attributes,
    Signature,
    Sizes,
)
from escalade.ops.group_norm import GROUP_NORM, GroupNormProblem
from escalade.ops.layer_norm import EPSILON as EPSILON_OF_LAYERS
from escalade.ops.layer_norm import LAYER_NORM, MOST_THREADS, MOST_VALUES, LayerNormProblem

_FEATUREWISE = ("weight", "bias")


class LayerNorm(Operator):
    """Each row with mean 0 and variance 1, or divided by its root mean square; times weight, plus bias, then any
    expression. Chains of linear layers take it."""

    name = "layer_norm"
    signature = Signature(
        {"x": ROWS, **dict.fromkeys(_FEATUREWISE, OPTIONAL_VECTOR)},
        {"epsilon": EPSILON, "rms": FLAG, "relu": FLAG},
    )
    takes_expressions = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm"), self._of_any_dimensions)

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        return dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm"), self._recognise)

    def _of_any_dimensions(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """Several dimensions are one row, whose features are theirs in order."""
        sizes = call("normalized_shape", ())
        if len(sizes) < 2 or not all(isinstance(size, int) for size in sizes):
            return self._recognise(node, call, graph)
        shape = (*node.shape[: -len(sizes)], prod(sizes))
        known = self._recognise(replace(node, shape=shape), call, graph)
        if not isinstance(known, Node):
            return None
        rows = Reshape.node(graph.fresh(f"{node.name}_rows"), {"x": known.inputs["x"]}, {}, shape, node.dtype)
        graph.append(rows)
        constants = {
            role: graph.add_constant(f"{node.name}_{role}", graph.constants[known.inputs[role]].flatten())
            for role in _FEATUREWISE
            if role in known.inputs
        }
        flat = replace(known.with_inputs(x=rows.name, **constants), name=graph.fresh(f"{node.name}_flat"))
        graph.append(flat)
        return Reshape.instead_of(node, {"x": flat.name})

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        sizes = call("normalized_shape", ())
        if prod(sizes) != node.shape[-1] or node.attributes.get("result", 0) != 0:
            return None
        constants = {role: call.value(role) for role in _FEATUREWISE}
        if any(name not in graph.constants for name in constants.values() if name is not None):
            return None
        rms = name_of(node.attributes["target"]) == "rms_norm"
        epsilon = call("eps", torch.finfo(getattr(torch, node.dtype)).eps if rms else EPSILON_OF_LAYERS)
        return self.instead_of(
            node, {"x": call.value("input"), **constants}, epsilon=epsilon, rms=rms, relu=False
        )

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return channels_as_they_lie(node, given) if node.attributes.get("of_channels") else ROWS_OF_LAST

    def before_permute(self, node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
        """Rows of channels of an image are its pixels."""
        return unpermuted(node, order).with_attributes(of_channels=True) if order == CHANNELS_LAST else None

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        if node.attributes.get("of_channels"):
            rows = self.compute(
                node.with_attributes(of_channels=False), {**inputs, "x": x.permute(CHANNELS_LAST)}
            )
            return rows.permute(CHANNELS_FIRST)
        weight, bias, epsilon = inputs.get("weight"), inputs.get("bias"), node.attributes["epsilon"]
        if node.attributes["rms"]:
            y = F.rms_norm(x, x.shape[-1:], weight, epsilon)
            return activate(node, y if bias is None else y + bias)
        return activate(node, F.layer_norm(x, x.shape[-1:], weight, bias, epsilon))

    def scaled_axis(self, node: Node) -> int:
        return 1 if node.attributes.get("of_channels") else len(node.shape) - 1

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.name)
        features = form.shape[1 if node.attributes.get("of_channels") else -1]
        rows, epsilon = prod(form.shape) // max(1, features), node.attributes["epsilon"]
        own = {**activation_of(node), "dtype": forms.stored}
        constants = "weight" in node.inputs, "bias" in node.inputs
        if features > MOST_THREADS * MOST_VALUES and not node.attributes["rms"]:  # which blocks have to share
            row = GroupNormProblem(rows, features, 1, 1, 1, *constants, epsilon=epsilon, layout="nchw", **own)
            return Lowered(GROUP_NORM, row)
        inner = side_by_side(node, form)
        problem = LayerNormProblem(
            rows // inner, features, *constants, node.attributes["rms"], epsilon, inner=inner, **own
        )
        return Lowered(LAYER_NORM, problem)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x = sizes["x"]
        return {**dict.fromkeys(sizes, x[-1:]), "x": x, RESULT: x}
