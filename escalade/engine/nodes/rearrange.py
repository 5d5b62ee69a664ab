"""Rearrangements of images: padding, pixel shuffles and channel shuffles."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import AtenCall, Match, Operator, Tensors, match_aten
from escalade.engine.nodes.lowering import Forms, Lowered, image_problem
from escalade.engine.nodes.signature import (
    COUNT,
    FLAG,
    IMAGE,
    RESULT,
    Attribute,
    Attributes,
    Signature,
    SizeError,
    Sizes,
    is_real,
    is_tuple,
    is_whole,
    one_of,
)
from escalade.engine.nodes.views import on_sequences
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.convert import CONVERT, ConvertProblem, reach
from escalade.ops.pad2d import GRADIENTS, MODES, PAD2D, Pad2dProblem, padded, refusal
from escalade.ops.pixel_shuffle import PIXEL_SHUFFLE, PixelShuffleProblem, shuffled

_PADDING_MODES = {
    "constant_pad_nd": "constant",
    "reflection_pad1d": "reflect",
    "reflection_pad2d": "reflect",
    "replication_pad1d": "replicate",
    "replication_pad2d": "replicate",
    "_pad_circular": "circular",
    "reflection_pad1d_backward": "reflect_gradient",
    "reflection_pad2d_backward": "reflect_gradient",
    "replication_pad1d_backward": "replicate_gradient",
    "replication_pad2d_backward": "replicate_gradient",
}
"""Modes by the names of PyTorch's operators."""
_MAX_PAD = 2**24


def _are_pads(value: Any) -> bool:
    return is_tuple(value, 4, lambda pad: is_whole(pad, -_MAX_PAD, _MAX_PAD))


class Pad2d(Operator):
    """Padded image: constant, reflected, replicated or circular; or the gradient of one, with negated pads."""

    name = "pad2d"
    preferred_layout = None
    signature = Signature(
        {"x": IMAGE},
        {
            "pads": Attribute("four whole numbers", _are_pads),
            "mode": one_of(*MODES, *GRADIENTS.values()),
            "value": Attribute("a number", is_real),
        },
    )

    @match_aten("pad", *_PADDING_MODES)
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        mode = _PADDING_MODES.get(node.calls) or call("mode", "constant")
        matcher = partial(self._match_image, mode)
        is_sequence = len(node.shape) == 3 and len(call("pad") or call("padding")) == 2
        x = "grad_output" if mode in GRADIENTS.values() else "self"
        return (on_sequences(matcher, x) if is_sequence else matcher)(node, call, graph)

    def _match_image(self, mode: str, node: Node, call: AtenCall, graph: Graph) -> Match:
        is_gradient = mode in GRADIENTS.values()
        x = call.value("grad_output" if is_gradient else "self")
        given, value = call("pad") or call("padding"), call("value", 0.0)
        if x is None or len(node.shape) != 4 or not node.is_floating or not is_real(value):
            return None
        if not (mode in MODES or is_gradient) or not isinstance(given, tuple) or any(given[4:]):
            return None
        if not all(type(pad) is int for pad in given):
            return None
        left, right, top, bottom = (-pad if is_gradient else pad for pad in (*given, 0, 0, 0, 0)[:4])
        pads = (top, bottom, left, right)
        height, width = graph.shape_of(x)[2:]
        if not (type(height) is type(width) is int) or refusal((height, width), pads, mode):
            return None
        constant = float(value) if mode == "constant" else 0.0
        return self.instead_of(node, {"x": x}, pads=pads, mode=mode, value=constant) if any(pads) else x

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return padded(inputs["x"], *(node.attributes[key] for key in ("pads", "mode", "value")))

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        batch, channels, height, width = sizes["x"]
        pads, mode, value = (attributes[key] for key in ("pads", "mode", "value"))
        message = refusal((height, width), pads, mode)
        if message:
            raise SizeError(message)
        if value and mode != "constant":
            raise SizeError(f"mode {mode} takes no constant, and value is {value}")
        return {RESULT: (batch, channels, height + pads[0] + pads[1], width + pads[2] + pads[3])}

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.inputs["x"])
        return Lowered(PAD2D, image_problem(Pad2dProblem, node, form, forms.stored))


class PixelShuffle(Operator):
    """factor * factor channels as a square of pixels, or with `down` such a square as channels."""

    name = "pixel_shuffle"
    preferred_layout = None
    signature = Signature({"x": IMAGE}, {"factor": COUNT, "down": FLAG})

    @match_aten("pixel_shuffle", "pixel_unshuffle")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        if len(node.shape) != 4 or not node.is_floating:
            return None
        up = call("upscale_factor")
        factor = call("downscale_factor") if up is None else up
        return self.instead_of(node, {"x": call.value("self")}, factor=factor, down=up is None)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return shuffled(inputs["x"], node.attributes["factor"], node.attributes["down"])

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.inputs["x"])
        return Lowered(PIXEL_SHUFFLE, image_problem(PixelShuffleProblem, node, form, forms.stored))


class Shuffle(Operator):
    """Interleaved channels: channel c of the result is channel c / ways + c % ways * step of x."""

    name = "shuffle"
    signature = Signature({"x": IMAGE}, {"ways": COUNT, "step": COUNT})

    @match_aten("channel_shuffle", "native_channel_shuffle")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x, groups = call.value("self"), call("groups", 1)
        channels = node.shape[1] if len(node.shape) == 4 else None
        if x is None or not isinstance(channels, int) or not node.is_floating:
            return None
        return x if groups == 1 else self.instead_of(node, {"x": x}, ways=groups, step=channels // groups)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        channel = torch.arange(node.shape[1], device=inputs["x"].device)  # type: ignore[arg-type]
        ways, step = node.attributes["ways"], node.attributes["step"]
        return inputs["x"].index_select(1, channel // ways + channel % ways * step)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x, result = sizes["x"], sizes[RESULT]
        ways, step = attributes["ways"], attributes["step"]
        if len(result) != 4 or not 0 < result[1] <= x[1]:
            raise SizeError(f"{list(result)} is not an image with channels of {list(x)}")
        if reach(result[1], ways, step) > x[1] or -(-result[1] // ways) > step:
            raise SizeError(f"{x[1]} channels are fewer than {result[1]} taken {ways} ways with step {step}")
        return {RESULT: (x[0], result[1], *x[2:])}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.name)
        dtype = NAMES.get(form.dtype)
        if dtype not in DTYPES or not form.elements:
            return None
        stored = forms.value(node.inputs["x"]).shape[1]
        source = {"source": dtype, "source_layout": "nhwc", "stored_channels": stored}
        problem = image_problem(ConvertProblem, node, form, dtype, layout="nhwc", **source)
        return Lowered(CONVERT, problem, pitches={"x": "stored_channels"})


def shuffle_order(channels: int, ways: int, step: int) -> tuple[int, ...]:
    """Return the channel of x that each channel of the result is."""
    return tuple(channel // ways + channel % ways * step for channel in range(channels))
