"""An image at another size, by its nearest pixels or between several."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors, with_channels
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.signature import (
    FLAG,
    IMAGE,
    RESULT,
    Attribute,
    Attributes,
    Signature,
    SizeError,
    Sizes,
    is_real,
    pair,
)
from escalade.ops.upsample2d import MODES, UPSAMPLE2D, Upsample2dProblem, fits
from escalade.ops.upsample2d.problem import step_of
from escalade.ops.upsample2d.reference import resized

MODE_OF = {
    "upsample_nearest2d": "nearest",
    "_upsample_nearest_exact2d": "nearest_exact",
    "upsample_bilinear2d": "bilinear",
    "upsample_bicubic2d": "bicubic",
}
"""The modes by the names of PyTorch's operators."""


def _are_factors(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and all(is_real(one) and one >= 0 for one in value)


class Upsample2d(Operator):
    """Images at another size, as PyTorch makes them in the modes of MODES."""

    name = "upsample2d"
    computes_in_fp32 = True
    signature = Signature(
        {"x": IMAGE},
        {
            "output": pair(1),
            "mode": Attribute(f"one of {', '.join(MODES)}", lambda value: type(value) is str and value in MODES),
            "corners": FLAG,
            "factors": Attribute("two numbers of at least 0", _are_factors),
        },
    )  # fmt: skip

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {name: partial(self._recognise, mode) for name, mode in MODE_OF.items()}

    def _recognise(self, mode: str, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x = call.value("input") or call.value("self")
        if x is None or not node.is_floating:
            return None
        given = call("scale_factors") or (call("scales_h"), call("scales_w"))
        corners = bool(call("align_corners", False))
        factors = needed_factors(graph.shape_of(x)[2:], node.shape[2:], corners, given)
        return self.instead_of(
            node, {"x": x}, output=node.shape[2:], mode=mode, corners=corners, factors=factors
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return resized(inputs["x"], a["output"], a["mode"], a["corners"], a["factors"])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        output, factors = attributes["output"], attributes["factors"]
        if not all(fits(*one) for one in zip(sizes["x"][2:], output, factors, strict=True)):
            raise SizeError(
                f"factors of {list(factors)} do not make {list(output)} of {list(sizes['x'][2:])}"
            )
        return {RESULT: (*sizes["x"][:2], *output)}

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        return with_channels(node, channels)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        batch, channels, height, width = forms.value(node.inputs["x"]).shape
        problem = Upsample2dProblem(
            batch, channels, height, width, a["output"], a["mode"], a["corners"], a["factors"], forms.stored, "nhwc"
        )  # fmt: skip
        return Lowered(UPSAMPLE2D, problem)


def needed_factors(
    sizes: Shape, outputs: Shape, corners: bool, given: Sequence[float | None]
) -> tuple[float, ...]:
    """The factors down and along by which places are found."""
    return tuple(
        _needed(size, output, corners, factor)  # type: ignore[arg-type]
        for size, output, factor in zip(sizes, outputs, given, strict=True)
    )


def _needed(size: int, outputs: int, corners: bool, factor: float | None) -> float:
    """A factor, or 0 where the sizes alone give the same places in fp32."""
    given, own = (struct.pack("f", step_of(size, outputs, corners, one)) for one in (factor or 0.0, 0.0))
    return 0.0 if given == own else float(factor or 0.0)
