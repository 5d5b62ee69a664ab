"""Conversions between dtypes and layouts, image normalization, and quantization."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES, Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import results_of
from escalade.engine.nodes.base import AtenCall, Layouts, Match, Operator, Tensors, match_aten
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.signature import (
    ANY,
    IMAGE,
    RESULT,
    VECTOR,
    Attribute,
    Attributes,
    Role,
    Signature,
    SizeError,
    Sizes,
    is_whole,
)
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.convert import CONVERT, ConvertProblem
from escalade.ops.quantise import QUANTISE, QuantiseProblem

_ROW_PITCH = {"x": "stored_channels"}
"""Rows of a strided x are parts of larger rows of stored channels."""


class Convert(Operator):
    """An image in another dtype and layout, normalized and padded; or any value in the dtype that the model returns.

    Created by the layout pass.
    """

    name = "convert"
    mixes_types = True
    image_dtypes = None

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        """Normalize and pad; the caller converts dtype and layout."""
        if _is_flat(node):
            return inputs["x"]
        x = normalized(inputs)
        more = node.shape[1] - x.shape[1]  # type: ignore[operator]
        return F.pad(x, (0, 0, 0, 0, 0, more)) if more else x

    def may_alias(self, node: Node) -> bool:
        return True

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if _is_flat(node):
            return _lower_cast(source, target.dtype)
        batch, channels, height, width = source.shape
        problem = ConvertProblem(
            batch, min(channels, target.shape[1]), height, width, NAMES[source.dtype], source.layout,
            NAMES[target.dtype], target.layout, target.shape[1], "scale" in node.inputs, channels,
        )  # fmt: skip
        pitches = {} if source.layout == "nchw" else _ROW_PITCH  # pixels of NCHW are contiguous
        return Lowered(CONVERT, problem, {"scale": FP32, "shift": FP32}, pitches=pitches)

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts(None, node.attributes["layout"])

    def is_alias(self, node: Node, forms: Forms) -> bool:
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if "scale" in node.inputs or source.dtype != target.dtype or source.shape != target.shape:
            return False
        is_one_channel_or_pixel = len(source.shape) == 4 and (
            source.shape[1] == 1 or math.prod(source.shape[2:]) == 1
        )
        return source.layout == target.layout or is_one_channel_or_pixel


def is_converted(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if a kernel converts between these dtypes."""
    return all(NAMES.get(dtype) in DTYPES for dtype in (source, target))


def _is_flat(node: Node) -> bool:
    """Return True if elements stay in place, in whichever shape."""
    return bool(node.attributes["layout"] == "flat")


def _lower_cast(form: Form, target: torch.dtype) -> Lowered | None:
    """Return a cast of contiguous rows; None if no kernel converts the dtypes."""
    if not is_converted(form.dtype, target) or not form.elements:
        return None
    problem = ConvertProblem(form.rows, form.row, 1, 1, NAMES[form.dtype], "nhwc", NAMES[target], "nhwc")
    return Lowered(CONVERT, problem, pitches=_ROW_PITCH)


class Normalize(Operator):
    """y = x * scale + shift per channel of an input image, for `compile(..., normalize=)`.

    Fused into the layer that reads the image, or into its conversion.
    """

    name = "normalise"
    signature = Signature({"x": IMAGE, "scale": VECTOR, "shift": VECTOR}, {})

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return normalized(inputs)


def normalized(inputs: Tensors) -> torch.Tensor:
    """Apply scale and shift to the image x, if there are any."""
    if "scale" not in inputs:
        return inputs["x"]
    scale, shift = (inputs[role].view(1, -1, 1, 1) for role in ("scale", "shift"))
    return inputs["x"] * scale + shift


class Quantize(Operator):
    """y = x * factor, stored in the quantized dtype `store`; created by the quantization pass."""

    name = "quantise"

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return inputs["x"] * inputs["factor"]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.inputs["x"])
        problem = QuantiseProblem(math.prod(form.shape), NAMES[form.dtype], output=node.attributes["store"])
        return Lowered(QUANTISE, problem, {"factor": FP32})


_CODE = Attribute("a whole number from -32768 to 65535", lambda value: is_whole(value, -(2**15), 2**16 - 1))
_LIBRARY = "quantized_decomposed::"
"""Namespace of the operators that PyTorch's quantization tools insert."""
_PARAMETERS = ("scale", "zero_point")


class FakeQuantize(Operator):
    """x rounded to multiples of `scale`, with codes from `lowest` to `highest`, where `zero_point` encodes 0.

    Matches fake quantization, and a quantization whose result is dequantized. Quantized dtypes take the value's range
    from it (`passes/carried_ranges`); in other dtypes PyTorch computes it.
    """

    name = "fake_quantize"
    preferred_layout = None
    values = ("x",)
    signature = Signature(
        {"x": ANY, **dict.fromkeys(_PARAMETERS, Role((0, 1), constant=True))},
        {"lowest": _CODE, "highest": _CODE},
    )

    @match_aten("fake_quantize_per_tensor_affine")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self._made(node, call.value("self"), call, graph)

    @match_aten(f"{_LIBRARY}dequantize_per_tensor", f"{_LIBRARY}dequantize_per_channel")
    def _match_dequantization(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        if graph.constants.keys() >= {*node.inputs.values()}:
            return _computed(node, graph)
        before = graph.nodes.get(call.value("input") or "")
        if before is None or before.calls != f"{_LIBRARY}quantize_per_tensor":
            return None
        earlier = AtenCall(before)
        if any(_parameter(earlier, name) != _parameter(call, name) for name in _PARAMETERS):
            return None
        return self._made(node, earlier.value("input"), call, graph)

    def _made(self, node: Node, x: str | None, call: AtenCall, graph: Graph) -> Match:
        given = {role: _parameter(call, role) for role in _PARAMETERS}
        known = [value for value in given.values() if isinstance(value, str)]
        if graph.typed or any(name not in graph.constants for name in known):
            return None  # a scale that the model computes, or that training changes
        if any(graph.constants[name].numel() != 1 for name in known):
            return None
        constants = {role: _as_float(graph, f"{node.name}_{role}", value) for role, value in given.items()}
        codes = {"lowest": call("quant_min"), "highest": call("quant_max")}
        return self.instead_of(node, {"x": x, **constants}, **codes)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        scale, zero = (inputs[role].to(x.dtype).view(()) for role in _PARAMETERS)
        codes = torch.round(x * (1 / scale)) + zero
        return (codes.clamp(node.attributes["lowest"], node.attributes["highest"]) - zero) * scale

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        if any(math.prod(sizes[role]) != 1 for role in _PARAMETERS):
            raise SizeError("scale and zero point must have one element")
        return {"x": sizes["x"], RESULT: sizes["x"]}

    def pytorch_constants(self, node: Node) -> Mapping[str, str]:
        return dict.fromkeys(_PARAMETERS, FP32)

    @staticmethod
    def largest(node: Node, constants: Tensors) -> float:
        """Return the largest magnitude that the codes represent."""
        scale, zero = (float(constants[node.inputs[role]]) for role in _PARAMETERS)
        lowest, highest = (node.attributes[name] - zero for name in ("lowest", "highest"))
        # A signed code has one more negative number, which a symmetric range does not cover.
        return scale * (highest if -lowest == highest + 1 else max(-lowest, highest))


def _parameter(call: AtenCall, name: str) -> str | float:
    """Return a scale or zero point: the name of a tensor, or a number."""
    found: str | float = call.value(name) or call(name, 0)
    return found


def _as_float(graph: Graph, name: str, value: str | float) -> str:
    """Return the name of a floating-point constant with this value."""
    if not isinstance(value, str):
        return graph.add_constant(name, torch.tensor([float(value)]))
    is_float = graph.dtype_of(value).is_floating_point
    return value if is_float else graph.derive_constant(name, value, torch.Tensor.float)


def _computed(node: Node, graph: Graph) -> str:
    """Return the name of a new constant with the dequantized values of constant codes."""
    inputs = {role: graph.constants[name] for role, name in node.inputs.items()}
    read = {graph.weight_names[name] for name in node.inputs.values() if name in graph.weight_names}
    graph.fixed_weights |= read
    a = node.attributes
    return graph.add_constant(node.name, results_of(a["target"], a["arguments"], inputs)[0])
