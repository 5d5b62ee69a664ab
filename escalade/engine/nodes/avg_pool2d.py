"""The mean of each window of an image."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.adaptive_avg_pool2d import AdaptiveAvgPool2d
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors, with_channels
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.sequences import of_sequences
from escalade.engine.nodes.signature import FLAG, IMAGE, INDEX, RESULT, Attributes, Signature, Sizes
from escalade.engine.nodes.windows import WINDOWS, pooled, windows_of
from escalade.ops.avg_pool2d import AVG_POOL2D, AvgPool2dProblem
from escalade.ops.expressions import Expression
from escalade.ops.shared import prologue


class AvgPool2d(Operator):
    """The sum of each window, divided by its pixels, with those of the padding or without, or by a number."""

    name = "avg_pool2d"
    computes_in_fp32 = True
    signature = Signature({"x": IMAGE}, {**WINDOWS, "count_padding": FLAG, "divisor": INDEX})
    values = (*Operator.values, "gate")

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"avg_pool2d": self._recognise, "avg_pool1d": of_sequences(self._recognise, "self")}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x, divisor = call.value("self"), call("divisor_override")
        if x is None or len(node.shape) != 4 or (divisor is not None and divisor < 1):
            return None
        found = windows_of(call)
        if found["kernel"] == graph.shape_of(x)[2:] and found["padding"] == (0, 0) and divisor is None:
            return AdaptiveAvgPool2d.instead_of(node, {"x": x}, output=(1, 1))  # the mean over the image
        return self.instead_of(
            node, {"x": x}, **found, count_padding=bool(call("count_include_pad", True)), divisor=divisor or 0
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        x = prologue.apply(a.get("prologue", ""), inputs)["x"]
        return F.avg_pool2d(
            x, a["kernel"], a["stride"], a["padding"], a["ceil_mode"], a["count_padding"],
            a["divisor"] or None,
        )  # fmt: skip

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        return {RESULT: pooled(sizes["x"], attributes, attributes["kernel"])}

    def padded(self, node: Node, zeros: tuple[int, int]) -> Node | None:
        """Zeros that were pixels of the image count as such."""
        a = node.attributes
        padding = a["padding"][0] + zeros[0], a["padding"][1] + zeros[1]
        if a["ceil_mode"] or (a["padding"] != (0, 0) and not a["count_padding"]):
            return None
        fits = all(2 * pad <= kernel for pad, kernel in zip(padding, a["kernel"], strict=True))
        return node.with_attributes(padding=padding, count_padding=True) if fits else None

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        return with_channels(node, channels)

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a, form = node.attributes, forms.value(node.inputs["x"])
        batch, channels, height, width = form.shape
        problem = AvgPool2dProblem(
            batch, channels, height, width, a["kernel"], a["stride"], a["padding"], a["ceil_mode"],
            forms.stored, form.layout, count_padding=a["count_padding"], divisor=a["divisor"],
            prologue=a.get("prologue", ""),
        )  # fmt: skip
        return Lowered(AVG_POOL2D, problem, dict.fromkeys(("gain", "shift"), FP32))

    def is_mean_of_pixels(self, node: Node) -> bool:
        a = node.attributes
        return not a["divisor"] and (a["padding"] == (0, 0) or not a["count_padding"]) and "prologue" not in a

    def preparing(
        self, node: Node, expression: Expression, operands: Mapping[str, str], graph: Graph
    ) -> Node | None:
        """Where windows overlap, pixels are prepared more than once; where there is padding, not all are."""
        if "prologue" in node.attributes:
            return None
        return node.with_inputs(**operands).with_attributes(prologue=expression.text)
