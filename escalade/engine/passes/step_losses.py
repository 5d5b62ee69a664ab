"""Training steps: fusion of a loss with its gradient, both computed in one pass over the logits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import AtenCall, activation_of
from escalade.engine.nodes.losses import LOSS, CrossEntropy, PointwiseLoss
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.side_outputs import SideOutput
from escalade.engine.passes.gradient_patterns import cast_source, depends_on, sort_nodes
from escalade.ops.base.dtypes import NAMES

_FORWARD = {"nll_loss_backward": "nll_loss_forward", "nll_loss2d_backward": "nll_loss2d_forward"}
"""PyTorch's losses by target class, of rows and of images, by the names of their gradients."""
_REDUCTIONS = {1: "mean", 2: "sum"}
"""Kinds of reduction, by PyTorch's numbers."""
_IGNORED_CLASS = -100  # PyTorch's default


def fuse_cross_entropy(graph: Graph) -> None:
    """Fuse the log-softmax, the loss by target class, and the gradients of both, with the casts around them."""
    for node in graph:
        if node.calls == "_log_softmax_backward_data":
            found = _CrossEntropy.match(node, graph)
            if found is not None:
                found.fuse(graph)


@dataclass(frozen=True)
class _CrossEntropy:
    """Nodes of a loss and its gradient, from the logits x to their gradient."""

    x: str
    target: str
    scale: str
    reduction: str
    ignored: int
    losses: tuple[Node, ...]
    """Results of PyTorch's forward operator: the loss, and the divisor of the gradient."""
    inner: tuple[Node, ...]
    """Nodes that only the others read."""
    gradient: Node

    @staticmethod
    def match(last: Node, graph: Graph) -> _CrossEntropy | None:
        """Match the nodes that end in the gradient of a log-softmax; None if other nodes read the inner ones.

        CUDA's autocast computes the log-softmax of 16-bit logits, a cast of it, the loss in fp32, and a cast of its
        gradient. Our kernels compute the logarithm in fp32, and round the gradient of the logits once.
        """
        end, users = AtenCall(last), graph.users()
        logs = graph.nodes.get(end.value("output") or "")
        backward, cast = _without_cast(graph.nodes.get(end.value("grad_output") or ""), graph)
        if logs is None or logs.calls != "_log_softmax" or backward is None or backward.calls not in _FORWARD:
            return None
        widened = tuple(one for one in users[logs.name] if cast_source(one, graph) is not None)
        log_names = {logs.name, *(one.name for one in widened)}
        call = AtenCall(backward)
        target, scale, x = call.value("target"), call.value("grad_output"), AtenCall(logs).value("self")
        reduction, ignored = _REDUCTIONS.get(call("reduction", 1)), call("ignore_index", _IGNORED_CLASS)
        readers = [one for name in log_names for one in users.get(name, [])]
        losses = tuple(one for one in graph if one in readers and one.calls == _FORWARD[backward.calls])
        if target is None or scale is None or x is None or reduction is None:
            return None
        if (
            call.value("weight") is not None
            or call.value("self") not in log_names
            or not _is_over_classes(logs)
        ):
            return None
        if graph.dtype_of(x) != graph.dtype_of(last.name) or any(one.dtype != "float32" for one in losses):
            return None
        if graph.dtype_of(scale) is not torch.float32 or set(graph.shape_of(scale)) - {1}:
            return None
        if graph.dtype_of(target) is not torch.int64:
            return None
        is_same_loss = all(
            AtenCall(one).value("target") == target
            and AtenCall(one)("reduction", 1) == call("reduction", 1)
            and AtenCall(one)("ignore_index", _IGNORED_CLASS) == ignored
            for one in losses
        )
        divisors = tuple(one for one in losses if one.attributes.get("result", 0) == 1)
        inner = (logs, *widened, backward, *cast, *divisors)
        replaced = {last.name, *(one.name for one in (*inner, *losses))}
        read_by = {reader.name for one in inner for reader in users.get(one.name, [])}
        is_closed = read_by <= replaced and not {one.name for one in inner} & set(graph.outputs)
        if not is_same_loss or not is_closed or depends_on(scale, (one.name for one in losses), graph):
            return None
        found = _CrossEntropy(x, target, scale, reduction, ignored, losses, inner, last)
        return found._before_cast(graph)

    def _before_cast(self, graph: Graph) -> _CrossEntropy:
        """Start from the logits before a cast, if their gradient is cast back."""
        x = cast_source(graph.nodes.get(self.x), graph)
        reader = graph.only_user(self.gradient.name)
        if x is None or reader is None or cast_source(reader, graph) is None or reader.name in graph.outputs:
            return self
        if graph.dtype_of(reader.name) != graph.dtype_of(x):
            return self
        return replace(self, x=x, inner=(*self.inner, self.gradient), gradient=reader)

    def fuse(self, graph: Graph) -> None:
        fused = CrossEntropy.instead_of(
            self.gradient, {"x": self.x, "target": self.target, "scale": self.scale},
            reduction=self.reduction, ignored=self.ignored,
        )  # fmt: skip
        graph.nodes[fused.name] = fused
        for loss in self.losses:
            if loss not in self.inner:
                graph.nodes[loss.name] = SideOutput.of(fused, loss.name, LOSS, loss.shape, loss.dtype)
        for node in self.inner:
            del graph.nodes[node.name]
        sort_nodes(graph)


def _is_over_classes(logs: Node) -> bool:
    """Return True for a log-softmax over the classes of rows, or of the pixels of images."""
    rank = len(logs.shape)
    return rank in (2, 4) and AtenCall(logs)("dim") in (1, 1 - rank)


def _without_cast(node: Node | None, graph: Graph) -> tuple[Node | None, tuple[Node, ...]]:
    """Return the node before a cast, and the cast; the node itself if it is none."""
    source = cast_source(node, graph)
    return (node, ()) if node is None or source is None else (graph.nodes.get(source), (node,))


def fuse_pointwise_losses(graph: Graph) -> None:
    """Fuse the terms of a loss, their sum or mean, and its gradient, if it is a function of the same values."""
    for total in graph:
        terms = _terms_of(total, graph)
        if terms is None:
            continue
        for gradient in graph:
            fused = _fused_loss(terms, total, gradient, graph)
            if fused is not None:
                graph.nodes[gradient.name] = fused
                graph.nodes[total.name] = SideOutput.of(fused, total.name, LOSS, total.shape, total.dtype)
                del graph.nodes[terms.name]
                sort_nodes(graph)
                break


def _terms_of(total: Node, graph: Graph) -> Node | None:
    """Return the operand of a full sum or mean, if it is a function of one or two values that nothing else reads."""
    if not Reduce.matches(total) or total.attributes["kind"] not in _REDUCTIONS.values() or total.shape:
        return None
    terms = graph.nodes.get(total.inputs["x"])
    if not Pointwise.matches(terms) or graph.only_user(terms.name) is not total or len(terms.inputs) > 2:
        return None
    is_plain = "before" not in total.attributes and activation_of(total).is_identity
    is_fp32 = total.dtype == terms.dtype == "float32"
    has_kernels = all(
        graph.shape_of(name) == terms.shape and graph.dtype_of(name) in NAMES and name not in graph.constants
        for name in terms.inputs.values()
    )
    return terms if is_plain and is_fp32 and has_kernels else None


def _fused_loss(terms: Node, total: Node, gradient: Node, graph: Graph) -> Node | None:
    """Return loss and gradient as one node.

    The gradient has to be a function of the same values, one of which has its dtype, times at most one scalar.
    """
    values = set(terms.inputs.values())
    if not Pointwise.matches(gradient) or gradient.shape != terms.shape or gradient is terms:
        return None
    scales = [name for name in gradient.inputs.values() if name not in values]
    if not values <= set(gradient.inputs.values()) or len(scales) > 1:
        return None
    if any(set(graph.shape_of(name)) - {1} or graph.dtype_of(name) is not torch.float32 for name in scales):
        return None
    if any(depends_on(name, (total.name,), graph) for name in scales):
        return None
    dtype = graph.dtype_of(gradient.name)
    x = next((name for name in terms.inputs.values() if graph.dtype_of(name) == dtype), None)
    if x is None:
        return None
    target = next(iter(values - {x}), x)
    names = {target: "target", x: "x", **dict.fromkeys(scales, "scale")}
    by_role = {role: names[name] for role, name in gradient.inputs.items()}
    derivative = Pointwise().expression(gradient).rename(by_role)
    found = derivative.divided_by("scale") if scales else derivative
    if found is None:
        return None
    elements = math.prod(terms.shape)  # type: ignore[arg-type]
    found = found.times(elements if total.attributes["kind"] == "mean" else 1.0)
    term = Pointwise().expression(terms).rename({role: names[name] for role, name in terms.inputs.items()})
    scale = scales[0] if scales else graph.add_constant(f"{total.name}_scale", torch.ones(()))
    return PointwiseLoss.instead_of(
        gradient, {"x": x, "target": target, "scale": scale},
        expression=term.concat(found).text, reduction=total.attributes["kind"],
    )  # fmt: skip
