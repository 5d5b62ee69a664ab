"""An image with more around it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors, with_channels
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.sequences import of_sequences
from escalade.engine.nodes.signature import (
    IMAGE,
    RESULT,
    Attribute,
    Attributes,
    Signature,
    SizeError,
    Sizes,
    is_real,
    is_whole,
)
from escalade.ops.pad2d import MODES, PAD2D, Pad2dProblem, padded, refusal

_CAPTURED = {
    "constant_pad_nd": "constant",
    "reflection_pad1d": "reflect",
    "reflection_pad2d": "reflect",
    "replication_pad1d": "replicate",
    "replication_pad2d": "replicate",
    "_pad_circular": "circular",
}
_MOST = 2**24


def _are_pads(value: Any) -> bool:
    return type(value) is tuple and len(value) == 4 and all(is_whole(one, -_MOST, _MOST) for one in value)


class Pad2d(Operator):
    """Rows and columns around an image: a constant, its mirror image, its border, or its other side."""

    name = "pad2d"
    signature = Signature(
        {"x": IMAGE},
        {
            "pads": Attribute("four whole numbers", _are_pads),
            "mode": Attribute(f"one of {', '.join(MODES)}", lambda value: type(value) is str and value in MODES),
            "value": Attribute("a number", is_real),
        },
    )  # fmt: skip

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {
            "pad": self._recognise,
            **{name: partial(self._known, mode) for name, mode in _CAPTURED.items()},
        }

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        return self._known(call("mode", "constant"), node, call, graph)

    def _known(self, mode: str, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        known = partial(self._of_images, mode)
        if len(node.shape) == 3 and len(call("pad") or call("padding")) == 2:
            return of_sequences(known, "self")(node, call, graph)
        return known(node, call, graph)

    def _of_images(self, mode: str, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x, given, value = call.value("self"), call("pad") or call("padding"), call("value", 0.0)
        if (
            x is None
            or len(node.shape) != 4
            or not node.is_floating
            or not is_real(value)
            or mode not in MODES
        ):
            return None
        if not isinstance(given, tuple) or any(given[4:]) or not all(type(one) is int for one in given):
            return None
        left, right, top, bottom = (*given, 0, 0, 0, 0)[:4]
        constant = float(value) if mode == "constant" else 0.0
        pads = (top, bottom, left, right)
        height, width = graph.shape_of(x)[2:]
        if not (type(height) is type(width) is int) or refusal((height, width), pads, mode):
            return None
        return self.instead_of(node, {"x": x}, pads=pads, mode=mode, value=constant) if any(pads) else x

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return padded(inputs["x"], a["pads"], a["mode"], a["value"])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        batch, channels, height, width = sizes["x"]
        pads = attributes["pads"]
        sentence = refusal((height, width), pads, attributes["mode"])
        if sentence:
            raise SizeError(sentence)
        if attributes["value"] and attributes["mode"] != "constant":
            raise SizeError(f"mode {attributes['mode']} has no constant, such as {attributes['value']}")
        return {RESULT: (batch, channels, height + pads[0] + pads[1], width + pads[2] + pads[3])}

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        return with_channels(node, channels)

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        form = forms.value(node.inputs["x"])
        batch, channels, height, width = form.shape
        problem = Pad2dProblem(
            batch, channels, height, width, a["pads"], a["mode"], a["value"], forms.stored, form.layout
        )
        return Lowered(PAD2D, problem)

    def zeros_around(self, node: Node) -> tuple[int, int] | None:
        a = node.attributes
        top, bottom, left, right = a["pads"]
        is_one = a["mode"] == "constant" and a["value"] == 0 and top == bottom >= 0 and left == right >= 0
        return (top, left) if is_one else None
