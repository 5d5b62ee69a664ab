"""The mean of each part of an image that is divided into so many rows and columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall, converts
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors, with_channels
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.sequences import of_sequences
from escalade.engine.nodes.signature import IMAGE, RESULT, Attributes, Signature, Sizes, pair
from escalade.ops.adaptive_avg_pool2d import ADAPTIVE_AVG_POOL2D, AdaptiveAvgPool2dProblem


class AdaptiveAvgPool2d(Operator):
    """Means over an image, in whichever words the model asks for them."""

    name = "adaptive_avg_pool2d"
    computes_in_fp32 = True
    signature = Signature({"x": IMAGE}, {"output": pair(1)})

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {
            "adaptive_avg_pool2d": self._recognise,
            "_adaptive_avg_pool2d": self._recognise,
            "adaptive_avg_pool1d": of_sequences(self._recognise, "self"),
            "mean": self._mean,
        }

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        if len(node.shape) != 4:
            return None
        return self.instead_of(node, {"x": call.value("self")}, output=node.shape[2:])

    def _mean(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """The mean over height and width is a pool to one pixel, which may be left out of the sizes."""
        x = call.value("self")
        dims = call("dim", ())
        dims = (dims,) if isinstance(dims, int) else tuple(dims)
        if (
            x is None
            or len(graph.shape_of(x)) != 4
            or {d % 4 for d in dims} != {2, 3}
            or converts(call, x, graph)
        ):
            return None
        shape = (*graph.shape_of(x)[:2], 1, 1)
        pooled = replace(self.instead_of(node, {"x": x}, output=(1, 1)), shape=shape)
        if call("keepdim", False):
            return pooled
        pooled = replace(pooled, name=graph.fresh(f"{node.name}_pool"))
        graph.append(pooled)
        return Reshape.instead_of(node, {"x": pooled.name})

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return F.adaptive_avg_pool2d(inputs["x"], node.attributes["output"])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        return {RESULT: (*sizes["x"][:2], *attributes["output"])}

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        return with_channels(node, channels)

    @classmethod
    def is_mean_of_nhwc(cls, node: Node) -> bool:
        """Whether a node is the mean over a whole image, which lies in NHWC."""
        a = node.attributes
        return cls.matches(node) and a["output"] == (1, 1) and a.get("layout", "nhwc") == "nhwc"

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.inputs["x"])
        batch, channels, height, width = form.shape
        problem = AdaptiveAvgPool2dProblem(
            batch, channels, height, width, node.attributes["output"], forms.stored, form.layout
        )
        return Lowered(ADAPTIVE_AVG_POOL2D, problem)
