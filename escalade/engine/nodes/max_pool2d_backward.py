"""The gradient of what the largest value of each window was taken of, also where that came out of a ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.gradients import through_relu
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.max_pool2d import PLACES, MaxPool2d, window_problem
from escalade.engine.nodes.side_outputs import Further, put_beside
from escalade.engine.nodes.windows import windows_of
from escalade.ops.max_pool2d import NOWHERE
from escalade.ops.max_pool2d_backward import MAX_POOL2D_BACKWARD, MaxPool2dBackwardProblem, from_places

_WINDOW = ("kernel", "stride", "padding", "ceil_mode", "dilation")


class MaxPool2dBackward(Operator):
    """dx of y = max_pool2d(x), from the gradient of y, and x or the places of the maxima that the pool has written.

    With `mask`, where x came out of a ReLU, dx is the gradient of what went into that.
    """

    name = "max_pool2d_backward"
    values = ("gradient", "x", PLACES)

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"max_pool2d_with_indices_backward": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """Where PyTorch's indices are those of the same windows, so that x says all of it."""
        gradient, x, indices = (call.value(role) for role in ("grad_output", "self", "indices"))
        if gradient is None or x is None or len(node.shape) != 4:
            return None
        window = _window(call)
        pool = graph.nodes.get(indices or "")
        if not Aten.matches(pool) or name_of(pool.attributes["target"]) != "max_pool2d_with_indices":
            return None
        own = AtenCall(pool)
        if own.value("self") != x or _window(own) != window or pool.attributes.get("result") != 1:
            return None
        return self.instead_of(node, {"gradient": gradient, "x": x}, **window, mask=False)

    def fuse_step(self, graph: Graph) -> None:
        """Takes a ReLU's backward pass behind it, and has the pool itself write where its maxima are."""
        for node in graph:
            if not self.matches(node) or PLACES in node.inputs:
                continue
            behind = through_relu(node, graph)
            masks = behind is not None and behind[1] == node.inputs["x"]
            taken = node.with_attributes(mask=masks)
            pool = next((other for other in graph if _is_of(other, node, graph)), None)
            if pool is not None:
                places = _with_places(graph, pool, masks)
                taken = taken.with_inputs(x=None, places=places).with_attributes(mask=False)
            if masks:
                assert behind is not None
                graph.nodes[behind[0].name] = replace(taken, name=behind[0].name)
                del graph.nodes[node.name]
            else:
                graph.nodes[node.name] = taken

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a, gradient = node.attributes, inputs["gradient"]
        if PLACES in inputs:
            pixels, counts = from_places(
                inputs[PLACES], gradient.new_empty(node.shape).shape[3], a["kernel"], a["stride"], a["padding"],  # type: ignore[arg-type]
                a["dilation"],
            )  # fmt: skip
            planes = gradient.new_zeros(*node.shape[:2], node.shape[2] * node.shape[3])  # type: ignore[operator, arg-type]
            planes.scatter_add_(2, pixels.flatten(2), torch.where(counts, gradient, 0.0).flatten(2))
            return planes.view(node.shape)  # type: ignore[arg-type]
        x = inputs["x"]
        aten: Any = torch.ops.aten
        window = a["kernel"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"]
        _, indices = aten.max_pool2d_with_indices(x, *window)
        dx: torch.Tensor = aten.max_pool2d_with_indices_backward(gradient, x, *window, indices)
        return torch.where(x <= 0, 0.0, dx) if a["mask"] else dx

    def lower(self, node: Node, forms: Forms) -> Lowered:
        stored = PLACES in node.inputs
        forward = window_problem(node, forms.value(node.name), forms.stored)
        problem = MaxPool2dBackwardProblem(forward, mask=node.attributes["mask"], stored=stored)
        return Lowered(MAX_POOL2D_BACKWARD, problem)


def _window(call: AtenCall) -> dict[str, Any]:
    return {**windows_of(call), "dilation": call.pair("dilation", 1)}


def _is_of(pool: Node, backward: Node, graph: Graph) -> bool:
    """Whether a pool is the one whose gradient a node is, and can write its places."""
    if not MaxPool2d.matches(pool) or pool.inputs["x"] != backward.inputs["x"] or PLACES in pool.attributes:
        return False
    a, b = pool.attributes, backward.attributes
    height, width = a["kernel"]
    return height * width <= NOWHERE and all(a[key] == b[key] for key in _WINDOW)


def _with_places(graph: Graph, pool: Node, behind_relu: bool) -> str:
    """Has a pool write the places of its maxima; their name."""
    maker = pool.with_attributes(**{PLACES: True, "behind_relu": behind_relu})
    further = Further.of(maker, graph.fresh(f"{pool.name}_{PLACES}"), PLACES, pool.shape, "uint8")
    put_beside(graph, maker, further)
    return further.name
