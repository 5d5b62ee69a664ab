"""Normalisation of images, or values of another rank, by the statistics of its own groups of channels."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import (
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    activate,
    activation_of,
)
from escalade.engine.nodes.batch_norm import BatchNorm
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.signature import (
    COUNT,
    EPSILON,
    FLAG,
    OPTIONAL_VECTOR,
    RESULT,
    Attributes,
    Role,
    Signature,
    SizeError,
    Sizes,
)
from escalade.ops.group_norm import GROUP_NORM, GroupNormProblem

_CHANNELWISE = ("weight", "bias")


class GroupNorm(Operator):
    """Each image's groups of channels with mean 0 and variance 1, times weight, plus bias, then any expression."""

    name = "group_norm"
    signature = Signature(
        {"x": Role((2, 15)), **dict.fromkeys(_CHANNELWISE, OPTIONAL_VECTOR)},
        {"groups": COUNT, "epsilon": EPSILON, "relu": FLAG},
    )
    takes_expressions = True
    takes_any_rank = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {
            "group_norm": self._groups,
            "native_group_norm": self._groups,
            "instance_norm": self._instances,
        }

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        return self.captured

    def _groups(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        return self._recognise(node, call, graph, call("num_groups", call("group")))

    def _instances(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """A group for each channel; by the statistics of training it is a batch norm."""
        if not call("use_input_stats", True):
            return BatchNorm().captured["batch_norm"](node, call, graph)
        if call.value("running_mean") is not None:
            return None  # which it changes
        return self._recognise(node, call, graph, node.shape[1] if len(node.shape) > 1 else None)

    def _recognise(self, node: Node, call: AtenCall, graph: Graph, groups: object) -> Recognised:
        if len(node.shape) < 2 or not isinstance(groups, int) or node.attributes.get("result", 0) != 0:
            return None
        constants = {role: call.value(role) for role in _CHANNELWISE}
        if any(name not in graph.constants for name in constants.values() if name is not None):
            return None
        return self.instead_of(
            node,
            {"x": call.value("input"), **constants},
            groups=groups,
            epsilon=call("eps", 1e-5),
            relu=False,
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        y = torch.group_norm(inputs["x"], a["groups"], inputs.get("weight"), inputs.get("bias"), a["epsilon"])
        return activate(node, y)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x = sizes["x"]
        if x[1] % attributes["groups"]:
            raise SizeError(f"{attributes['groups']} groups do not divide {x[1]} channels")
        return {**dict.fromkeys(sizes, x[1:2]), "x": x, RESULT: x}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def scaled_axis(self, node: Node) -> int:
        return 1

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Values of any rank are images of channels whose pixels are all that follows."""
        a, form = node.attributes, forms.value(node.name)
        if 0 in form.shape:
            return None
        batch, channels, *pixels = form.shape
        height, width = pixels if len(pixels) == 2 else (1, prod(pixels))
        problem = GroupNormProblem(
            batch, channels, height, width, a["groups"], "weight" in node.inputs, "bias" in node.inputs,
            epsilon=a["epsilon"], **activation_of(node), dtype=forms.stored,
            layout="nhwc" if form.layout == "nhwc" or height * width == 1 else "nchw",
        )  # fmt: skip
        return Lowered(GROUP_NORM, problem, in_place="x")
