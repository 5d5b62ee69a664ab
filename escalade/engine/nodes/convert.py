"""A conversion from one type and layout to another, with normalising and padding on the way; made by the layout
pass."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Layouts, Operator, Tensors
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.normalise import normalised
from escalade.ops.convert import CONVERT, ConvertProblem


class Convert(Operator):
    """An image in the order and the type that its readers want."""

    name = "convert"

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        """Types and layouts are the caller's business; what is left is normalising and padding."""
        x = normalised(inputs)
        more = node.shape[1] - x.shape[1]  # type: ignore[operator]
        return F.pad(x, (0, 0, 0, 0, 0, more)) if more else x

    def lower(self, node: Node, forms: Forms) -> Lowered:
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        batch, channels, height, width = source.shape
        problem = ConvertProblem(
            batch, min(channels, target.shape[1]), height, width, NAMES[source.dtype], source.layout,
            NAMES[target.dtype], target.layout, target.shape[1], "scale" in node.inputs, channels,
        )  # fmt: skip
        return Lowered(CONVERT, problem, {"scale": FP32, "shift": FP32})

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts(None, node.attributes["layout"])

    def is_alias(self, node: Node, forms: Forms) -> bool:
        """Whether the conversion changes nothing in memory."""
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if "scale" in node.inputs or source.dtype != target.dtype or source.shape != target.shape:
            return False
        one_channel_or_pixel = source.shape[1] == 1 or math.prod(source.shape[2:]) == 1
        return source.layout == target.layout or one_channel_or_pixel

    def normalises(self, node: Node) -> bool:
        return "scale" in node.inputs

    def stored_type(self, node: Node, storage: torch.dtype, is_output: bool) -> torch.dtype:
        return getattr(torch, node.dtype) if is_output else super().stored_type(node, storage, is_output)
