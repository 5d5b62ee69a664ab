"""The cross-entropy of rows by targets that are classes, with its gradient: both in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import ROWS_OF_LAST, Layouts, Operator, Tensors
from escalade.engine.nodes.further import Further
from escalade.engine.nodes.gradients import cast_of, depends_on, put_in_order
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.ops.cross_entropy import CROSS_ENTROPY, CrossEntropyProblem

_LOSS = "loss"
_REDUCTIONS = {1: "mean", 2: "sum"}
"""What PyTorch does with the losses of rows, by the numbers that it has for that."""


class CrossEntropy(Operator):
    """scale * d loss / dx of loss = mean or sum of -log softmax(x)[target] over rows, and beside it the loss."""

    name = "cross_entropy"
    values = ("x", "target", "scale")
    mixes_types = True

    def fuse_step(self, graph: Graph) -> None:
        """Takes the logarithm of softmax, the loss by targets, and the gradients of both, with casts around them."""
        for node in graph:
            if _is_call(node, "_log_softmax_backward_data"):
                found = _Found.at(node, graph)
                if found is not None:
                    found.replace(graph)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        with torch.enable_grad():
            x = inputs["x"].detach().requires_grad_()
            (gradient,) = torch.autograd.grad(
                _loss(node, x, inputs["target"]), x, inputs["scale"].reshape(())
            )
        return gradient

    def further(self, node: Node, inputs: Tensors) -> Tensors:
        return {_LOSS: _loss(node, inputs["x"], inputs["target"])}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return ROWS_OF_LAST

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a, (batch, classes) = node.attributes, forms.value(node.name).shape
        problem = CrossEntropyProblem(
            batch, classes, a["reduction"], ignored=a["ignored"], gradient=True, dtype=forms.stored
        )
        return Lowered(CROSS_ENTROPY, problem, {"scale": FP32})


def _loss(node: Node, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    a = node.attributes
    return F.cross_entropy(wide, target, reduction=a["reduction"], ignore_index=a["ignored"])


def _is_call(node: Node | None, name: str) -> bool:
    return Aten.matches(node) and name_of(node.attributes["target"]) == name


@dataclass(frozen=True)
class _Found:
    """The nodes of a loss and its gradient, from logits to their gradient."""

    x: str
    target: str
    scale: str
    reduction: str
    ignored: int
    losses: tuple[Node, ...]
    """The results of `nll_loss_forward`: the loss, and what the gradient divides by."""
    between: tuple[Node, ...]
    """Nodes that nobody needs any more."""
    gradient: Node

    @staticmethod
    def at(last: Node, graph: Graph) -> _Found | None:
        """What ends in this node, the gradient of the logarithm of softmax; None if somebody reads what is in between,
        or if it is another loss than that of rows by classes."""
        end = AtenCall(last)
        logs, picked = (graph.nodes.get(end.value(role) or "") for role in ("output", "grad_output"))
        if not _is_call(logs, "_log_softmax") or not _is_call(picked, "nll_loss_backward"):
            return None
        assert logs is not None and picked is not None
        back = AtenCall(picked)
        target, scale, x = back.value("target"), back.value("grad_output"), AtenCall(logs).value("self")
        reduction = _REDUCTIONS.get(back("reduction", 1))
        users = graph.users()
        losses = tuple(one for one in users[logs.name] if _is_call(one, "nll_loss_forward"))
        if (
            target is None
            or scale is None
            or x is None
            or reduction is None
            or back.value("weight") is not None
        ):
            return None
        if back.value("self") != logs.name or AtenCall(logs)("dim") not in (1, -1) or len(last.shape) != 2:
            return None
        if str(graph.dtype_of(x)) != f"torch.{last.dtype}" or any(one.dtype != "float32" for one in losses):
            return None  # CUDA's autocast has logits in 16 bits, and their logarithms in fp32
        if graph.dtype_of(scale) is not torch.float32 or set(graph.shape_of(scale)) - {1}:
            return None
        alike = all(
            AtenCall(one).value("target") == target
            and AtenCall(one)("reduction", 1) == back("reduction", 1)
            and AtenCall(one)("ignore_index", -100) == back("ignore_index", -100)
            for one in losses
        )
        readers = {one.name for one in users[logs.name]} - {one.name for one in losses}
        divisors = [one for one in losses if one.attributes.get("result", 0) == 1]
        kept = {picked.name, logs.name, *(one.name for one in divisors)} & set(graph.outputs)
        free = readers == {picked.name, last.name} and users[picked.name] == [last]
        free &= all(
            {one.name for one in users.get(divisor.name, [])} <= {picked.name} for divisor in divisors
        )
        if not alike or not free or kept or depends_on(scale, (one.name for one in losses), graph):
            return None
        between = (logs, picked, *divisors)
        return _Found(
            x, target, scale, reduction, back("ignore_index", -100), losses, between, last
        )._narrowed(graph)

    def _narrowed(self, graph: Graph) -> _Found:
        """The loss of logits as they are in front of a cast, if their gradient is cast back."""
        cast = graph.nodes.get(self.x)
        x = None if cast is None else cast_of(cast, graph)
        reader = graph.only_user(self.gradient.name)
        if x is None or reader is None or cast_of(reader, graph) is None or reader.name in graph.outputs:
            return self
        if graph.dtype_of(reader.name) != graph.dtype_of(x):
            return self
        return _Found(
            x, self.target, self.scale, self.reduction, self.ignored, self.losses,
            (*self.between, self.gradient), reader,
        )  # fmt: skip

    def replace(self, graph: Graph) -> None:
        fused = CrossEntropy.instead_of(
            self.gradient, {"x": self.x, "target": self.target, "scale": self.scale},
            reduction=self.reduction, ignored=self.ignored,
        )  # fmt: skip
        graph.nodes[fused.name] = fused
        for loss in self.losses:
            if loss not in self.between:
                graph.nodes[loss.name] = Further.of(fused, loss.name, _LOSS, loss.shape, loss.dtype)
        for node in self.between:
            del graph.nodes[node.name]
        put_in_order(graph)
