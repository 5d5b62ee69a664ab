"""BatchNorm: with running statistics in inference, with batch statistics in training, and its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import (
    CAPTURE,
    FOLDED,
    AtenCall,
    Match,
    Operator,
    Tensors,
    activate,
    match_aten,
)
from escalade.engine.nodes.lowering import FP32, Forms, Lowered, image_problem, problem_from
from escalade.engine.nodes.side_outputs import match_side_output
from escalade.engine.nodes.signature import (
    EPSILON,
    FLAG,
    VECTOR,
    Role,
    Signature,
)
from escalade.ops.batch_norm import BATCH_NORM, BatchNormProblem
from escalade.ops.batch_norm_backward import (
    BATCH_NORM_BACKWARD,
    BatchNormBackwardProblem,
    gradients,
    masked,
    recomputed,
)
from escalade.ops.batch_norm_training import BATCH_NORM_TRAINING, BatchNormTrainingProblem
from escalade.ops.batch_statistics import BatchStatisticsProblem, for_training

_Problem = TypeVar("_Problem")
STATISTICS = {"weight": "weight", "bias": "bias", "mean": "running_mean", "variance": "running_var"}
"""PyTorch's names of the constants in inference, by role."""
_TRAINING_INPUTS = {
    "weight": "weight",
    "bias": "bias",
    "running_mean": "running_mean",
    "running_variance": "running_var",
}
_TRAINING_OUTPUTS = ("mean", "rstd", "moved_mean", "moved_variance")
"""Buffers of the side outputs, in PyTorch's order."""
_GRADIENT_INPUTS = {"weight": "weight", "mean": "save_mean", "rstd": "save_invstd"}
_GRADIENT_OUTPUTS = ("weight_gradient", "bias_gradient")
VARIANCE = "variance"
"""Buffer of the variance, a side output of the convolution that computes the statistics."""
RESIDUAL_GRADIENT = "residual_gradient"
"""Buffer of the masked gradient."""
RECOMPUTED = "recomputed"
"""Buffer of the forward pass's result, computed again."""


class BatchNorm(Operator):
    """y = (x - mean) / sqrt(variance + epsilon) * weight + bias [+ residual], then ReLU or another expression."""

    name = "batch_norm"
    preferred_layout = None
    signature = Signature(
        {"x": Role((2, 5)), **dict.fromkeys(STATISTICS, VECTOR)}, {"epsilon": EPSILON, "relu": FLAG}
    )
    takes_expressions = True
    takes_any_rank = True
    mixes_types = True

    @match_aten("batch_norm", phases=(CAPTURE, FOLDED))
    @match_aten("_native_batch_norm_legit_no_training")
    def match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        if call("training", False) or call("train", False):
            return None
        constants = {role: call.value(name) for role, name in STATISTICS.items()}
        if constants["mean"] is None or constants["variance"] is None:
            return None  # normalized by batch statistics
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
        x = inputs["x"].to(inputs["weight"].dtype)  # in a training step it may be narrower
        y = torch.batch_norm(  # F.batch_norm of PyTorch 2.11 rejects an eps of zero
            x, inputs["weight"], inputs["bias"], inputs["mean"], inputs["variance"],
            False, 0.0, node.attributes["epsilon"], torch.backends.cudnn.enabled,
        )  # fmt: skip
        return activate(node, y, inputs.get("residual"))

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Return values of any rank as images; all dimensions after the channels are pixels."""
        form = forms.value(node.name)
        if 0 in form.shape:
            return None
        problem = image_problem(BatchNormProblem, node, form, forms.stored)
        return Lowered(BATCH_NORM, problem, dict.fromkeys(STATISTICS, FP32), "x")


class BatchNormTraining(Operator):
    """y = (x - mean) * rstd * weight + bias [+ residual], then ReLU or another expression, with batch statistics.

    Side outputs are these statistics, and the running statistics moved towards them.
    """

    name = "batch_norm_training"
    mixes_types = True

    @match_aten("_native_batch_norm_legit_functional")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match images with fp32 statistics in the graph of a training step."""
        statistics = {role: call.value(name) for role, name in _TRAINING_INPUTS.items()}
        x, result, source = call.value("input"), node.attributes.get("result"), node.attributes.get("call")
        if source is None or result is None or x is None or not call("training"):
            return None
        if len(graph.shape_of(x)) != 4 or not _are_fp32(statistics, graph):
            return None
        if result:
            return match_side_output(self, node, _TRAINING_OUTPUTS, graph)
        return self.instead_of(
            node, {"x": x, **statistics}, epsilon=call("eps"), momentum=call("momentum"), relu=False, source=source
        )  # fmt: skip

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        wide = x if x.dtype == torch.float64 else x.float()
        weight, bias = (inputs[role].to(wide.dtype) for role in ("weight", "bias"))
        y = F.batch_norm(wide, None, None, weight, bias, training=True, eps=node.attributes["epsilon"])
        return activate(node, y, inputs.get("residual"))

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        return training_statistics(
            inputs["x"], inputs, node.attributes["epsilon"], node.attributes["momentum"]
        )

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.name)
        if not _have_dtype(node, ("x", "residual"), form.dtype, forms):
            return None
        problem = _problem(BatchNormTrainingProblem, node, form.shape, forms.stored)
        return Lowered(BATCH_NORM_TRAINING, problem)


class BatchNormBackward(Operator):
    """dx of y = relu((x - mean) * rstd * weight + bias + residual); side outputs are gradients of weight and bias.

    If a ReLU is fused, `mask` tells how its mask is found: from its `output`, or recomputed from x and `bias`. With
    `residual`, the masked gradient is a side output too. `function` is the backward expression of another activation,
    whose operand is recomputed from x. With `summed`, the gradients of weight and bias are inputs instead. With
    `recompute`, the function of the forward pass, its result is a side output.
    """

    name = "batch_norm_backward"
    values = ("gradient", "x", "output")
    mixes_types = True

    def match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match images with fp32 statistics in the graph of a training step."""
        statistics = {role: call.value(name) for role, name in _GRADIENT_INPUTS.items()}
        gradient, x = call.value("grad_out"), call.value("input")
        result, source = node.attributes.get("result"), node.attributes.get("call")
        if source is None or result is None or gradient is None or x is None or not call("train"):
            return None
        if len(graph.shape_of(x)) != 4 or not _are_fp32(statistics, graph):
            return None
        if result:
            return match_side_output(self, node, _GRADIENT_OUTPUTS, graph)
        inputs = {"gradient": gradient, "x": x, **statistics}
        return self.instead_of(node, inputs, mask="none", residual=False, function="", source=source)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        problem = _problem(BatchNormBackwardProblem, node, tuple(inputs["x"].shape), "fp32")
        return gradients(problem, inputs)[0].to(inputs["gradient"].dtype)

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        problem = _problem(BatchNormBackwardProblem, node, tuple(inputs["x"].shape), "fp32")
        _, *by_channel = gradients(problem, inputs)
        found = {name: one.float() for name, one in zip(_GRADIENT_OUTPUTS, by_channel, strict=True)}
        if problem.recompute:
            found[RECOMPUTED] = recomputed(problem, inputs).to(inputs["x"].dtype)
        return {**found, RESIDUAL_GRADIENT: masked(problem, inputs)}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.name)
        if not _have_dtype(node, self.values, form.dtype, forms):
            return None
        problem = _problem(BatchNormBackwardProblem, node, form.shape, forms.stored)
        return Lowered(BATCH_NORM_BACKWARD, problem, in_place="gradient")


def training_statistics(
    x: torch.Tensor, inputs: Tensors, epsilon: float, momentum: float
) -> dict[str, torch.Tensor]:
    """Return what kernels compute for training from the statistics of x, by the names of their buffers."""
    batch, channels, height, width = x.shape
    problem = BatchStatisticsProblem(batch, channels, height, width, epsilon=epsilon, momentum=momentum)
    found = for_training(problem, {**inputs, "x": x})
    found[VARIANCE] = x.double().var((0, 2, 3), correction=0)
    return {name: value.float() for name, value in found.items()}


def _problem(kind: type[_Problem], node: Node, shape: tuple[int, ...], dtype: str) -> _Problem:
    batch, channels, height, width = shape
    sizes = {"batch": batch, "channels": channels, "height": height, "width": width}
    return problem_from(kind, node, **sizes, dtype=dtype, layout="nhwc")


def _are_fp32(values: Mapping[str, str | None], graph: Graph) -> bool:
    return all(name is not None and graph.dtype_of(name) is torch.float32 for name in values.values())


def _have_dtype(node: Node, roles: tuple[str, ...], dtype: torch.dtype, forms: Forms) -> bool:
    return all(forms.value(node.inputs[role]).dtype == dtype for role in roles if role in node.inputs)
