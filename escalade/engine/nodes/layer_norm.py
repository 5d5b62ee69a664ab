"""Layer normalisation over the last dimension, or over the channels of an image."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import (
    ROWS_OF_LAST,
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    unpermuted,
)
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.permute import CHANNELS_FIRST, CHANNELS_LAST
from escalade.engine.nodes.signature import EPSILON, RESULT, ROWS, VECTOR, Attributes, Signature, Sizes
from escalade.ops.layer_norm import LAYER_NORM, LayerNormProblem


class LayerNorm(Operator):
    """Each row with mean 0 and variance 1, times weight, plus bias; chains of linear layers take it."""

    name = "layer_norm"
    signature = Signature({"x": ROWS, "weight": VECTOR, "bias": VECTOR}, {"epsilon": EPSILON})

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"layer_norm": self._recognise, "native_layer_norm": self._recognise}

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        return self.captured

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """A norm without a weight or a bias gets those that change nothing."""
        sizes = call("normalized_shape", ())
        if len(sizes) != 1 or not isinstance(sizes[0], int) or node.attributes.get("result", 0) != 0:
            return None
        constants = {role: call.value(role) for role in ("weight", "bias")}
        if any(name not in graph.constants for name in constants.values() if name is not None):
            return None
        for role, fill in (("weight", torch.ones), ("bias", torch.zeros)):
            if constants[role] is None:
                constants[role] = graph.add_constant(f"{node.name}_{role}", fill(sizes))
        return self.instead_of(node, {"x": call.value("input"), **constants}, epsilon=call("eps", 1e-5))

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return super().layouts(node, given) if node.attributes.get("of_channels") else ROWS_OF_LAST

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
        return F.layer_norm(x, x.shape[-1:], inputs["weight"], inputs["bias"], node.attributes["epsilon"])

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.name)
        features = form.shape[1 if node.attributes.get("of_channels") else -1]
        problem = LayerNormProblem(
            prod(form.shape) // features, features, epsilon=node.attributes["epsilon"], dtype=forms.stored
        )
        return Lowered(LAYER_NORM, problem)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x = sizes["x"]
        return {**dict.fromkeys(sizes, x[-1:]), "x": x, RESULT: x}
