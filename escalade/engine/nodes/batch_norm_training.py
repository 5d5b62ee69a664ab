"""Batch normalisation in training: by the statistics of the batch, which it gives as well."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.add import Add
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors, activation_of, finish
from escalade.engine.nodes.gradients import are_wide, put_in_order
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.relu import Relu
from escalade.engine.nodes.side_outputs import Further, readers_of
from escalade.ops.batch_norm_training import BATCH_NORM_TRAINING, BatchNormTrainingProblem
from escalade.ops.batch_statistics import for_training
from escalade.ops.expressions import IDENTITY, Expression

_INPUTS = {
    "weight": "weight", "bias": "bias", "running_mean": "running_mean", "running_variance": "running_var",
}  # fmt: skip
"""The values by channel, with PyTorch's names for them."""
_FURTHER = ("mean", "rstd", "moved_mean", "moved_variance")
"""The results behind the first, in PyTorch's order."""


class BatchNormTraining(Operator):
    """y = (x - mean) * rstd * weight + bias [+ residual], then ReLU or another expression, of the batch's own mean and
    deviation; beside it these, and the running statistics moved towards them."""

    name = "batch_norm_training"
    mixes_types = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"_native_batch_norm_legit_functional": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """Takes images whose statistics are kept in fp32, in the graph of a training step."""
        given = {role: call.value(name) for role, name in _INPUTS.items()}
        x, result, source = call.value("input"), node.attributes.get("result"), node.attributes.get("call")
        if source is None or x is None or len(graph.shape_of(x)) != 4 or not call("training"):
            return None
        if not are_wide(given.values(), graph):
            return None
        if result == 0:
            return self.instead_of(
                node,
                {"x": x, **given},
                epsilon=call("eps"),
                momentum=call("momentum"),
                relu=False,
                source=source,
            )
        maker = next((one for one in graph if self.matches(one) and one.attributes["source"] == source), None)
        if maker is None or result is None:
            return None
        return Further.of(maker, node.name, _FURTHER[result - 1], node.shape, node.dtype)

    def fuse_step(self, graph: Graph) -> None:
        """Takes an addition and a function of single elements behind it."""
        for node in graph:
            if self.matches(node):
                self.take_reader(node, graph)
        put_in_order(graph)

    def take_reader(self, node: Node, graph: Graph) -> None:
        """Has a normalisation do what the only reader of its result does, if it can."""
        if not self.is_plain(node):
            return
        readers = readers_of(node, graph)
        if len(readers) != 1 or node.name in graph.outputs:
            return
        taken = _taken(node, readers[0], graph)
        if taken is not None:
            rest, expression = taken
            fused = self.applying(node.with_inputs(residual=rest) if rest else node, expression)
            graph.nodes[node.name] = fused
            graph.remove(readers[0], instead=node.name)

    def is_plain(self, node: Node) -> bool:
        """Whether a normalisation is nothing else yet."""
        return self.applied(node).is_identity and "residual" not in node.inputs

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        wide = x if x.dtype == torch.float64 else x.float()
        weight, bias = (inputs[role].to(wide.dtype) for role in ("weight", "bias"))
        y = F.batch_norm(wide, None, None, weight, bias, training=True, eps=node.attributes["epsilon"])
        return finish(node, y, inputs)

    def further(self, node: Node, inputs: Tensors) -> Tensors:
        problem = _problem(node, tuple(inputs["x"].shape), "fp32").statistics
        return {name: found.float() for name, found in for_training(problem, inputs).items()}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        own = forms.value(node.name).dtype
        if any(
            forms.value(node.inputs[role]).dtype != own for role in ("x", "residual") if role in node.inputs
        ):
            return None
        return Lowered(BATCH_NORM_TRAINING, _problem(node, forms.value(node.name).shape, forms.stored))


def _problem(node: Node, shape: tuple[int, ...], dtype: str) -> BatchNormTrainingProblem:
    a = node.attributes
    batch, channels, height, width = shape
    return BatchNormTrainingProblem(
        batch, channels, height, width, residual="residual" in node.inputs, dtype=dtype, layout="nhwc",
        epsilon=a["epsilon"], momentum=a["momentum"], **activation_of(node),
    )  # fmt: skip


def _taken(node: Node, reader: Node, graph: Graph) -> tuple[str | None, Expression] | None:
    """The value that the only reader of a result adds to it, if it does, and what it then applies; None if it does
    something else."""
    if reader.shape != node.shape or reader.dtype != node.dtype:
        return None
    if Add.matches(reader):
        rest = next((name for name in reader.inputs.values() if name != node.name), None)
        if rest is None or rest in graph.constants or graph.dtype_of(rest) != graph.dtype_of(node.name):
            return None
        return rest, Add().applied(reader)
    if len(reader.inputs) != 1:
        return None
    if Relu.matches(reader):
        return None, Relu().expression(reader)
    if Pointwise.matches(reader):
        expression = Pointwise().expression(reader)
        return (None, expression) if expression != IDENTITY else None
    return None
