"""The gradient of an image that was brought to another size."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.upsample2d import MODE_OF, needed_factors
from escalade.ops.upsample2d import Upsample2dProblem
from escalade.ops.upsample2d.reference import gradient as of_input
from escalade.ops.upsample2d_backward import UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem


class Upsample2dBackward(Operator):
    """dx of y = upsample2d(x), from the gradient of y."""

    name = "upsample2d_backward"
    computes_in_fp32 = True
    values = ("gradient",)

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {f"{name}_backward": partial(self._recognise, mode) for name, mode in MODE_OF.items()}

    def _recognise(self, mode: str, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        gradient = call.value("grad_output")
        if gradient is None or not node.is_floating:
            return None
        corners = bool(call("align_corners", False))
        output = graph.shape_of(gradient)[2:]
        factors = needed_factors(node.shape[2:], output, corners, (call("scales_h"), call("scales_w")))
        return self.instead_of(
            node, {"gradient": gradient}, output=output, mode=mode, corners=corners, factors=factors
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return of_input(inputs["gradient"], torch.Size(node.shape), a["mode"], a["corners"], a["factors"])  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        batch, channels, height, width = forms.value(node.name).shape
        forward = Upsample2dProblem(
            batch, channels, height, width, a["output"], a["mode"], a["corners"], a["factors"], forms.stored, "nhwc"
        )  # fmt: skip
        return Lowered(UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem(forward))
