"""A tensor's dimensions in another order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.signature import ANY, RESULT, Attribute, Attributes, Signature, Sizes

Order = tuple[int, ...]
CHANNELS_LAST: Order = (0, 2, 3, 1)
"""The order that makes rows of channels of an image."""
CHANNELS_FIRST: Order = (0, 3, 1, 2)
"""The order that makes an image of rows of channels."""


def _is_order(value: Any) -> bool:
    return (
        type(value) is tuple
        and all(type(one) is int for one in value)
        and sorted(value) == [*range(len(value))]
    )


class Permute(Operator):
    """Dimension i of the result is dimension order[i] of x; nothing moves where the bytes are the same."""

    name = "permute"
    signature = Signature({"x": ANY}, {"order": Attribute("every dimension once", _is_order)}, floating=False)

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {
            "permute": self._permute,
            **dict.fromkeys(("transpose", "swapaxes", "swapdims"), self._transpose),
            **dict.fromkeys(("t", "numpy_T", "mT", "adjoint"), self._turned),
        }

    def _permute(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        rank = len(node.shape)
        return self._instead(node, call.value("self"), tuple(dim % rank for dim in call("dims", ())), graph)

    def _transpose(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        rank = len(node.shape)
        order = [*range(rank)]
        if rank:
            names = ("dim0", "dim1") if call("dim0") is not None else ("axis0", "axis1")
            first, second = (call(name) % rank for name in names)
            order[first], order[second] = order[second], order[first]
        return self._instead(node, call.value("self"), tuple(order), graph)

    def _turned(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        if len(node.shape) != 2:
            return None
        return self._instead(node, call.value("self"), (1, 0), graph)

    def _instead(self, node: Node, x: str | None, order: Order, graph: Graph) -> Recognised:
        """Two permutations in a row are one, or none."""
        assert x is not None
        before = graph.nodes.get(x)
        if self.matches(before):
            x, order = before.inputs["x"], tuple(before.attributes["order"][dim] for dim in order)
        return x if order == tuple(range(len(order))) else self.instead_of(node, {"x": x}, order=order)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return inputs["x"].permute(node.attributes["order"])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        order = attributes["order"]
        if len(order) != len(sizes["x"]):
            return {"x": sizes["x"], RESULT: ()}  # which is not what the result has
        return {RESULT: tuple(sizes["x"][dim] for dim in order)}

    def may_share(self, node: Node) -> bool:
        return True

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        if given.get("x") == "nchw" and node.attributes["order"] == CHANNELS_FIRST:
            return Layouts(None, "nhwc")
        return Layouts(None, "nchw")

    def is_alias(self, node: Node, forms: Forms) -> bool:
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if source.dtype != target.dtype:
            return False
        moved = source.meta_tensor().permute(node.attributes["order"])
        steps = zip(moved.shape, moved.stride(), target.meta_tensor().stride(), strict=True)
        return all(size == 1 or before == after for size, before, after in steps)
