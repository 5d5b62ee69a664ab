"""Which operation of Escalade's does a node, and which problem it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from escalade.engine.graph.forms import NAMES, Form
from escalade.engine.graph.graph import Node
from escalade.ops.adaptive_avg_pool2d import AdaptiveAvgPool2dProblem
from escalade.ops.add import AddProblem
from escalade.ops.base.problem import Problem
from escalade.ops.batch_norm import BatchNormProblem
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.convert import ConvertProblem
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.linear import LinearProblem
from escalade.ops.max_pool2d import MaxPool2dProblem
from escalade.ops.mlp.problem import MlpProblem
from escalade.ops.quantise import QuantiseProblem
from escalade.ops.relu import ReluProblem
from escalade.ops.softmax import SoftmaxProblem
from escalade.ops.stem import StemProblem

STORED, NHWC, FP32, FP8 = "stored", "nhwc", "fp32", "fp8"
"""Forms of a constant: the plan's type, the same in NHWC order, fp32, or e4m3 in NHWC order."""


@dataclass(frozen=True)
class Lowered:
    operation: str
    problem: Problem
    constants: Mapping[str, str] = field(default_factory=dict)
    """The form of each constant input, by role; `STORED` unless said."""
    in_place: str | None = None
    """The role of an input whose memory the result may take."""


class Forms:
    """What lowering asks about a plan: its dtype, the form of each value, the sizes of each constant."""

    def __init__(self, dtype: str, values: Mapping[str, Form], constants: Mapping[str, torch.Tensor]) -> None:
        self.dtype = "fp16" if dtype == "fp8" else dtype
        """Of whatever is not marked as FP8."""
        self._values = values
        self._constants = constants

    def value(self, name: str) -> Form:
        return self._values[name]

    def is_constant(self, name: str) -> bool:
        return name in self._constants

    def constant(self, name: str) -> tuple[int, ...]:
        return tuple(self._constants[name].shape)

    @property
    def stored(self) -> str:
        """The dtype's name where nothing is multiplied."""
        return "fp32" if self.dtype == "tf32" else self.dtype


def lower(node: Node, forms: Forms) -> Lowered | None:
    """None: no operation of Escalade's does it, so PyTorch will."""
    make = _LOWER.get(node.op) if node.is_floating else None
    return make(node, forms) if make else None


def _conv2d(node: Node, forms: Forms) -> Lowered:
    batch, channels, height, width = forms.value(node.inputs["x"]).shape
    filters, _, filter_height, filter_width = forms.constant(node.inputs["weight"])
    a = node.attributes
    shortcut: dict[str, Any] = {}
    if "shortcut" in node.inputs:
        _, more_channels, *size = forms.value(node.inputs["shortcut"]).shape
        shortcut = {
            "shortcut_channels": more_channels,
            "shortcut_stride": a["shortcut_stride"],
            "shortcut_size": tuple(size),
        }
    problem = Conv2dProblem(
        batch, channels, height, width, filters, filter_height, filter_width, a["stride"], a["padding"],
        a["dilation"], a["groups"], "fp8" if a.get("fp8") else forms.dtype, "nhwc", "bias" in node.inputs,
        "residual" in node.inputs, a["relu"], output="fp16" if a.get("fp8") and not a["store"] else "", **shortcut,
    )  # fmt: skip
    if a.get("fp8"):
        scaled = dict.fromkeys(("bias", "scale", "scales"), FP32)
        return Lowered("conv2d", problem, {"weight": FP8, "shortcut_weight": FP8, **scaled})
    return Lowered("conv2d", problem, {"weight": NHWC, "shortcut_weight": NHWC})


def _stem(node: Node, forms: Forms) -> Lowered:
    image = forms.value(node.inputs["x"])
    batch, channels, height, width = image.shape
    filters, _, filter_height, filter_width = forms.constant(node.inputs["weight"])
    a = node.attributes
    problem = StemProblem(
        batch, channels, height, width, filters, filter_height, filter_width, a["stride"], a["padding"],
        source=NAMES[image.dtype], source_layout=image.layout, normalise="scale" in node.inputs, relu=a["relu"],
        pool=a["pool"], dtype=forms.dtype, layout="nhwc",
    )  # fmt: skip
    return Lowered("stem", problem, {"scale": FP32, "shift": FP32})


def _few_channels(node: Node, forms: Forms) -> Lowered:
    image = forms.value(node.inputs["x"])
    batch, channels, height, width = image.shape
    filters, _, filter_height, filter_width = forms.constant(node.inputs["weight"])
    a = node.attributes
    problem = FewChannelsProblem(
        batch, channels, height, width, filters, filter_height, filter_width, a["padding"], "bias" in node.inputs,
        a["relu"], a["pool"], a["ceil_mode"], forms.dtype, "nhwc", NAMES[image.dtype],
    )  # fmt: skip
    return Lowered("few_channels", problem)


def _convert(node: Node, forms: Forms) -> Lowered:
    source, target = forms.value(node.inputs["x"]), forms.value(node.name)
    batch, channels, height, width = source.shape
    problem = ConvertProblem(
        batch, min(channels, target.shape[1]), height, width, NAMES[source.dtype], source.layout,
        NAMES[target.dtype], target.layout, target.shape[1], "scale" in node.inputs, channels,
    )  # fmt: skip
    return Lowered("convert", problem, {"scale": FP32, "shift": FP32})


def _quantise(node: Node, forms: Forms) -> Lowered:
    form = forms.value(node.inputs["x"])
    return Lowered("quantise", QuantiseProblem(prod(form.shape), NAMES[form.dtype]), {"factor": FP32})


def _batch_norm(node: Node, forms: Forms) -> Lowered | None:
    form = forms.value(node.name)
    if form.layout != "nhwc":
        return None
    batch, channels, height, width = form.shape
    problem = BatchNormProblem(
        batch, channels, height, width, relu=node.attributes["relu"], residual="residual" in node.inputs,
        dtype=forms.stored, layout="nhwc", epsilon=node.attributes["epsilon"],
    )  # fmt: skip
    return Lowered("batch_norm", problem, dict.fromkeys(("weight", "bias", "mean", "variance"), FP32), "x")


def _relu(node: Node, forms: Forms) -> Lowered:
    problem = ReluProblem(prod(forms.value(node.name).shape), node.attributes["limit"], forms.stored)
    return Lowered("relu", problem, in_place="x")


def _add(node: Node, forms: Forms) -> Lowered | None:
    if any(forms.is_constant(node.inputs[role]) for role in ("x", "residual")):
        return None  # it lies in PyTorch's order
    layouts = {forms.value(node.inputs[role]).layout for role in ("x", "residual")}
    if layouts != {forms.value(node.name).layout}:
        return None
    problem = AddProblem(prod(forms.value(node.name).shape), node.attributes["relu"], forms.stored)
    return Lowered("add", problem, in_place="x")


def _max_pool2d(node: Node, forms: Forms) -> Lowered:
    a = node.attributes
    batch, channels, height, width = forms.value(node.inputs["x"]).shape
    problem = MaxPool2dProblem(
        batch, channels, height, width, a["kernel"], a["stride"], a["padding"], a["ceil_mode"],
        forms.stored, "nhwc",
    )  # fmt: skip
    return Lowered("max_pool2d", problem)


def _adaptive_avg_pool2d(node: Node, forms: Forms) -> Lowered:
    batch, channels, height, width = forms.value(node.inputs["x"]).shape
    problem = AdaptiveAvgPool2dProblem(
        batch, channels, height, width, node.attributes["output"], forms.stored, "nhwc"
    )
    return Lowered("adaptive_avg_pool2d", problem)


def _linear(node: Node, forms: Forms) -> Lowered | None:
    if forms.value(node.name).layout == "nhwc":  # its rows are not the pixels' channels
        return None
    outputs, features = forms.constant(node.inputs["weight"])
    rows = prod(forms.value(node.name).shape) // outputs
    pixels = prod(forms.value(node.inputs["x"]).shape[2:]) if node.attributes.get("pooled") else 1
    problem = LinearProblem(
        rows, features, outputs, "bias" in node.inputs, node.attributes["relu"], forms.dtype, pixels=pixels
    )
    return Lowered("linear", problem)


def _mlp(node: Node, forms: Forms) -> Lowered:
    layers = node.attributes["layers"]
    batch = prod(forms.value(node.inputs["x"]).shape) // layers[0].width_in
    return Lowered("mlp", MlpProblem(batch, layers, node.attributes["output"], forms.stored))


def _softmax(node: Node, forms: Forms) -> Lowered | None:
    form = forms.value(node.name)
    if form.layout == "nhwc":  # rows of pixels, which lie apart
        return None
    return Lowered("softmax", SoftmaxProblem(prod(form.shape[:-1]), form.shape[-1], forms.stored))


_LOWER: dict[str, Callable[[Node, Forms], Lowered | None]] = {
    "conv2d": _conv2d,
    "stem": _stem,
    "few_channels": _few_channels,
    "convert": _convert,
    "quantise": _quantise,
    "batch_norm": _batch_norm,
    "relu": _relu,
    "add": _add,
    "max_pool2d": _max_pool2d,
    "adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "linear": _linear,
    "mlp": _mlp,
    "softmax": _softmax,
}
