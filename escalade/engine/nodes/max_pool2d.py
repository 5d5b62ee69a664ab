"""The largest value of each window of an image."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.signature import (
    FLAG,
    IMAGE,
    RESULT,
    Attributes,
    Signature,
    SizeError,
    Sizes,
    pair,
    positive,
)
from escalade.ops.max_pool2d import MAX_POOL2D, MaxPool2dProblem


class MaxPool2d(Operator):
    """The largest value of each window, windows side by side or overlapping."""

    name = "max_pool2d"
    signature = Signature(
        {"x": IMAGE}, {"kernel": pair(1), "stride": pair(1), "padding": pair(0), "ceil_mode": FLAG}
    )

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"max_pool2d": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        if len(node.shape) != 4 or call.pair("dilation", 1) != (1, 1):
            return None
        kernel = call.pair("kernel_size", 1)
        return self.instead_of(
            node, {"x": call.value("self")},
            kernel=kernel, stride=call.pair("stride", kernel), padding=call.pair("padding", 0),
            ceil_mode=bool(call("ceil_mode", False)),
        )  # fmt: skip

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return F.max_pool2d(inputs["x"], a["kernel"], a["stride"], a["padding"], ceil_mode=a["ceil_mode"])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        batch, channels, *image = sizes["x"]
        result = []
        for size, window, stride, padding in zip(
            image, *(attributes[key] for key in ("kernel", "stride", "padding")), strict=True
        ):
            if 2 * padding > window:
                raise SizeError(f"a padding of {padding} is more than half of a window of {window}")
            room = size + 2 * padding - window
            steps = -(-room // stride) if attributes["ceil_mode"] else room // stride
            begins_outside = attributes["ceil_mode"] and steps * stride >= size + padding
            result.append(steps + (0 if begins_outside else 1))
        return {RESULT: (batch, channels, *positive(result))}

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        batch, channels, height, width = forms.value(node.inputs["x"]).shape
        problem = MaxPool2dProblem(
            batch, channels, height, width, a["kernel"], a["stride"], a["padding"], a["ceil_mode"],
            forms.stored, "nhwc",
        )  # fmt: skip
        return Lowered(MAX_POOL2D, problem)
