"""The cross-entropy of rows or pixels by targets that are classes, with its gradient: both in one pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import ROWS_OF_LAST, Layouts, Operator, Tensors
from escalade.engine.nodes.gradients import cast_of, depends_on, put_in_order
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.side_outputs import Further
from escalade.ops.cross_entropy import CROSS_ENTROPY, CrossEntropyProblem

_LOSS = "loss"
_LOSSES = {"nll_loss_backward": "nll_loss_forward", "nll_loss2d_backward": "nll_loss2d_forward"}
"""PyTorch's gradients of losses by targets that are classes, of rows and of images, with the losses themselves."""
_REDUCTIONS = {1: "mean", 2: "sum"}
"""What PyTorch does with the losses of rows, by the numbers that it has for that."""


class CrossEntropy(Operator):
    """scale * d loss / dx of loss = mean or sum of -log softmax(x)[target] over rows, and beside it the loss.

    The rows of images are their pixels, which lie so in NHWC.
    """

    name = "cross_entropy"
    values = ("x", "target", "scale")
    mixes_types = True

    def fuse_step(self, graph: Graph) -> None:
        """Takes the logarithm of softmax, the loss by targets, and the gradients of both, with casts around them."""
        for node in graph:
            if _called(node) == "_log_softmax_backward_data":
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
        return Layouts("nhwc", "nhwc") if "x" in given else ROWS_OF_LAST

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a, (images, classes, *pixels) = node.attributes, forms.value(node.name).shape
        problem = CrossEntropyProblem(
            images * math.prod(pixels), classes, a["reduction"], ignored=a["ignored"], gradient=True,
            dtype=forms.stored,
        )  # fmt: skip
        return Lowered(CROSS_ENTROPY, problem, {"scale": FP32})


def _loss(node: Node, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    a = node.attributes
    return F.cross_entropy(wide, target, reduction=a["reduction"], ignore_index=a["ignored"])


def _called(node: Node | None) -> str:
    """The operator of PyTorch's that a node calls, if it is such a node."""
    return name_of(node.attributes["target"]) if Aten.matches(node) else ""


def _is_of_classes(logs: Node) -> bool:
    """Whether logarithms are of the softmax over the classes of rows, or of the pixels of images."""
    rank = len(logs.shape)
    return rank in (2, 4) and AtenCall(logs)("dim") in (1, 1 - rank)


def _without_cast(node: Node | None, graph: Graph) -> tuple[Node | None, tuple[Node, ...]]:
    """What a value is in front of a cast, and the cast, if it is one."""
    source = None if node is None else cast_of(node, graph)
    return (node, ()) if node is None or source is None else (graph.nodes.get(source), (node,))


@dataclass(frozen=True)
class _Found:
    """The nodes of a loss and its gradient, from logits to their gradient."""

    x: str
    target: str
    scale: str
    reduction: str
    ignored: int
    losses: tuple[Node, ...]
    """What PyTorch's forward operator gives: the loss, and what the gradient divides by."""
    between: tuple[Node, ...]
    """Nodes that nobody needs any more."""
    gradient: Node

    @staticmethod
    def at(last: Node, graph: Graph) -> _Found | None:
        """What ends in this node, the gradient of the logarithm of softmax; None if somebody reads what is in between,
        or if it is another loss than that of rows or pixels by classes.

        CUDA's autocast has the logarithms of logits in 16 bits, a cast of them, the loss in fp32, and a cast of its
        gradient. Kernels take logarithms in fp32, and round the gradient of logits once.
        """
        end, users = AtenCall(last), graph.users()
        logs = graph.nodes.get(end.value("output") or "")
        taken, onward = _without_cast(graph.nodes.get(end.value("grad_output") or ""), graph)
        if _called(logs) != "_log_softmax" or taken is None or _called(taken) not in _LOSSES:
            return None
        assert logs is not None
        widened = tuple(one for one in users[logs.name] if cast_of(one, graph) is not None)
        wide = {logs.name, *(one.name for one in widened)}
        back, forward = AtenCall(taken), _LOSSES[_called(taken)]
        target, scale, x = back.value("target"), back.value("grad_output"), AtenCall(logs).value("self")
        reduction = _REDUCTIONS.get(back("reduction", 1))
        reading = [one for name in wide for one in users.get(name, [])]
        losses = tuple(one for one in graph if one in reading and _called(one) == forward)
        if target is None or scale is None or x is None or reduction is None:
            return None
        if back.value("weight") is not None or back.value("self") not in wide or not _is_of_classes(logs):
            return None
        if graph.dtype_of(x) != graph.dtype_of(last.name) or any(one.dtype != "float32" for one in losses):
            return None
        if graph.dtype_of(scale) is not torch.float32 or set(graph.shape_of(scale)) - {1}:
            return None
        if graph.dtype_of(target) is not torch.int64:
            return None
        alike = all(
            AtenCall(one).value("target") == target
            and AtenCall(one)("reduction", 1) == back("reduction", 1)
            and AtenCall(one)("ignore_index", -100) == back("ignore_index", -100)
            for one in losses
        )
        divisors = tuple(one for one in losses if one.attributes.get("result", 0) == 1)
        between = (logs, *widened, taken, *onward, *divisors)
        gone = {last.name, *(one.name for one in (*between, *losses))}
        read = {reader.name for one in between for reader in users.get(one.name, [])}
        free = read <= gone and not {one.name for one in between} & set(graph.outputs)
        if not alike or not free or depends_on(scale, (one.name for one in losses), graph):
            return None
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
        return replace(self, x=x, between=(*self.between, self.gradient), gradient=reader)

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
