"""Batch normalisation by the statistics of training: a factor and a term for each channel."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.affine import holdable
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import (
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    activation_of,
    finish,
    is_reordering,
    spread,
    with_channels,
)
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.signature import (
    EPSILON,
    FLAG,
    RESULT,
    VECTOR,
    Attributes,
    Role,
    Signature,
    Sizes,
)
from escalade.ops.batch_norm import BATCH_NORM, BatchNormProblem

_STATISTICS = {"weight": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}
"""The constants by role, with PyTorch's names for them."""


class BatchNorm(Operator):
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias [+ residual], then ReLU or another expression."""

    name = "batch_norm"
    signature = Signature(
        {"x": Role((2, 5)), **dict.fromkeys(_STATISTICS, VECTOR)}, {"epsilon": EPSILON, "relu": FLAG}
    )
    takes_expressions = True
    takes_any_rank = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {
            "batch_norm": self._recognise,
            "_native_batch_norm_legit_no_training": self._recognise,
        }

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        return {"batch_norm": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        if call("training", False) or call("train", False):
            return None
        constants = {role: call.value(name) for role, name in _STATISTICS.items()}
        if constants["mean"] is None or constants["variance"] is None:
            return None  # normalised by its own batch
        if any(name not in graph.constants for name in constants.values() if name is not None):
            return None
        mean = graph.constants[constants["mean"]]
        for role, fill in (("weight", torch.ones_like), ("bias", torch.zeros_like)):
            if constants[role] is None:
                constants[role] = graph.add_constant(f"{node.name}_{role}", fill(mean))
        return self.instead_of(node, {"x": call.value("input"), **constants}, epsilon=call("eps"), relu=False)

    def takes_residual(self, node: Node) -> bool:
        return True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        y = torch.batch_norm(  # F.batch_norm of PyTorch 2.11 refuses an eps of zero
            inputs["x"], inputs["weight"], inputs["bias"], inputs["mean"], inputs["variance"],
            False, 0.0, node.attributes["epsilon"], torch.backends.cudnn.enabled,
        )  # fmt: skip
        return finish(node, y, inputs)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x = sizes["x"]
        return {**dict.fromkeys(sizes, x[1:2]), "x": x, RESULT: x}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def scaled_axis(self, node: Node) -> int:
        return 1

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Values of any rank are images of channels whose pixels are all that follows."""
        form = forms.value(node.name)
        if 0 in form.shape:
            return None
        batch, channels, *pixels = form.shape
        height, width = pixels if len(pixels) == 2 else (1, prod(pixels))
        problem = BatchNormProblem(
            batch, channels, height, width, residual="residual" in node.inputs, **activation_of(node),
            dtype=forms.stored, layout="nhwc" if form.layout == "nhwc" else "nchw", epsilon=node.attributes["epsilon"],
        )  # fmt: skip
        return Lowered(BATCH_NORM, problem, dict.fromkeys(_STATISTICS, FP32), "x")

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        if len(node.shape) != 4 or "residual" in node.inputs or not is_reordering(order, channels):
            return None
        constants = {
            role: graph.add_constant(
                f"{node.name}_{role}", spread(graph.constants[node.inputs[role]], 0, order, channels)
            )
            for role in _STATISTICS
        }
        return with_channels(node, channels).with_inputs(**constants)

    def channel_scale(self, node: Node, graph: Graph, axis: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if axis != 1 or not self.applied(node).is_identity or "residual" in node.inputs:
            return None
        # On the CPU: to load the kernels that a GPU would need for it takes longer.
        given = [graph.constants[node.inputs[role]] for role in _STATISTICS]
        weight, bias, mean, variance = (tensor.cpu().double() for tensor in given)
        scale = weight / torch.sqrt(variance + node.attributes["epsilon"])
        found = holdable(scale, bias - mean * scale)
        return None if found is None else (found[0].to(given[0].device), found[1].to(given[0].device))
