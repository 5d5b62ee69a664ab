"""Channels of an image as more pixels, and pixels as more channels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.signature import (
    COUNT,
    FLAG,
    IMAGE,
    RESULT,
    Attributes,
    Signature,
    SizeError,
    Sizes,
)
from escalade.ops.pixel_shuffle import PIXEL_SHUFFLE, PixelShuffleProblem, shuffled


class PixelShuffle(Operator):
    """factor * factor channels as a square of pixels, or with `down` such a square as channels."""

    name = "pixel_shuffle"
    signature = Signature({"x": IMAGE}, {"factor": COUNT, "down": FLAG})

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"pixel_shuffle": self._up, "pixel_unshuffle": self._down}

    def _up(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        return self._recognise(node, call, call("upscale_factor"), down=False)

    def _down(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        return self._recognise(node, call, call("downscale_factor"), down=True)

    def _recognise(self, node: Node, call: AtenCall, factor: int, *, down: bool) -> Recognised:
        if len(node.shape) != 4 or not node.is_floating:
            return None
        return self.instead_of(node, {"x": call.value("self")}, factor=factor, down=down)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return shuffled(inputs["x"], node.attributes["factor"], node.attributes["down"])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        batch, channels, height, width = sizes["x"]
        factor, down = attributes["factor"], attributes["down"]
        if (height % factor or width % factor) if down else channels % factor**2:
            raise SizeError(f"a factor of {factor} does not divide {list(sizes['x'])}")
        if down:
            return {RESULT: (batch, channels * factor**2, height // factor, width // factor)}
        return {RESULT: (batch, channels // factor**2, height * factor, width * factor)}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        form = forms.value(node.inputs["x"])
        batch, channels, height, width = form.shape
        problem = PixelShuffleProblem(
            batch, channels, height, width, a["factor"], a["down"], forms.stored, form.layout
        )
        return Lowered(PIXEL_SHUFFLE, problem)
