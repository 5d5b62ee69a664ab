"""What `compile(..., normalize=)` asks for: a scale and a shift of each channel of the image."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Operator, Tensors
from escalade.engine.nodes.signature import IMAGE, RESULT, VECTOR, Attributes, Signature, Sizes


class Normalise(Operator):
    """y = x * scale + shift, the first thing that happens to an image; whatever reads or converts it takes it."""

    name = "normalise"
    signature = Signature({"x": IMAGE, "scale": VECTOR, "shift": VECTOR}, {})
    is_image_scaling = True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return normalised(inputs)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x = sizes["x"]
        return {**dict.fromkeys(sizes, x[1:2]), "x": x, RESULT: x}


def normalised(inputs: Tensors) -> torch.Tensor:
    """The image x with its scale and shift, if it has them."""
    if "scale" not in inputs:
        return inputs["x"]
    scale, shift = (inputs[role].view(1, -1, 1, 1) for role in ("scale", "shift"))
    return inputs["x"] * scale + shift
