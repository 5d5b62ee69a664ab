"""First layers of image networks, fused with normalization and pool, which read the image as the caller passes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Operator, Tensors, activate
from escalade.engine.nodes.conv2d import filter_problem
from escalade.engine.nodes.convert import Convert, normalized
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.ops.few_channels import FEW_CHANNELS
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.stem import STEM, StemProblem

MAX_CHANNELS = 4  # of an image that a stem reads


class Stem(Operator):
    """[normalize →] conv2d (+ bias + activation) [→ max_pool2d] of an input image."""

    name = "stem"
    raw_image_channels = MAX_CHANNELS
    image_dtypes = None

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        y = F.conv2d(normalized(inputs), inputs["weight"], inputs["bias"], a["stride"], a["padding"])
        y = activate(node, y)
        return F.max_pool2d(y, *a["pool"]) if a["pool"] else y

    def lower(self, node: Node, forms: Forms) -> Lowered:
        image = forms.value(node.inputs["x"])
        problem = filter_problem(
            StemProblem, node, image.shape, forms.constant(node.inputs["weight"]),
            source=NAMES[image.dtype], source_layout=image.layout, normalise="scale" in node.inputs, dtype=forms.dtype,
            output=node.attributes.get("store") or "",
        )  # fmt: skip
        return Lowered(STEM, problem, {"scale": FP32, "shift": FP32})


class FewChannels(Operator):
    """conv2d (+ bias + activation) [→ max_pool2d] [→ ReLU] with stride 1, few channels and few filters.

    With `normalised`, the weights include the normalization of the image.
    """

    name = "few_channels"
    raw_image_channels = 1  # with one channel, all layouts are the same
    image_dtypes = (torch.float32, torch.uint8)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        y = F.conv2d(inputs["x"], inputs["weight"], inputs.get("bias"), padding=a["padding"])
        y = activate(node, y)
        return F.max_pool2d(y, a["pool"], ceil_mode=a["ceil_mode"]) if a["pool"] > 1 else y

    def lower(self, node: Node, forms: Forms) -> Lowered:
        image, filters = forms.value(node.inputs["x"]), forms.constant(node.inputs["weight"])
        problem = filter_problem(
            FewChannelsProblem, node, image.shape, filters, dtype=forms.dtype, source=NAMES[image.dtype]
        )
        return Lowered(FEW_CHANNELS, problem)


def normalizes_input(node: Node) -> bool:
    """Return True if a node normalizes its image, which may then be uint8."""
    if FewChannels.matches(node):
        return bool(node.attributes["normalised"])
    return (Stem.matches(node) or Convert.matches(node)) and "scale" in node.inputs
