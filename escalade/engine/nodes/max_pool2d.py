"""The largest value of each window of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors, with_channels
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.sequences import of_sequences
from escalade.engine.nodes.signature import IMAGE, RESULT, Attributes, Signature, Sizes, pair
from escalade.engine.nodes.windows import WINDOWS, pooled, windows_of
from escalade.ops.max_pool2d import MAX_POOL2D, MaxPool2dProblem, extra_references
from escalade.ops.reduce import REDUCE, ReduceProblem

PLACES = "places"
"""What a pool is told, and what it is called, that writes where its maxima are beside them."""


class MaxPool2d(Operator):
    """The largest value of each window, windows side by side or overlapping, with gaps inside or without."""

    name = "max_pool2d"
    computes_in_fp32 = True
    signature = Signature({"x": IMAGE}, {**WINDOWS, "dilation": pair(1)})

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {
            "max_pool2d": self._recognise,
            "max_pool2d_with_indices": self._recognise,
            "adaptive_max_pool2d": self._adaptive,
            "adaptive_max_pool1d": of_sequences(self._adaptive, "self"),
            "max_pool1d": of_sequences(self._recognise, "self"),
            "max_pool1d_with_indices": of_sequences(self._recognise, "self"),
        }

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        if len(node.shape) != 4 or not _is_values(node):
            return None
        return self.instead_of(
            node, {"x": call.value("self")}, **windows_of(call), dilation=call.pair("dilation", 1)
        )

    def _adaptive(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """Where the windows that divide the image so are of one size and equally far apart."""
        x = call.value("self")
        if x is None or len(node.shape) != 4 or not _is_values(node):
            return None
        found = [
            _even(size, outputs)
            for size, outputs in zip(graph.shape_of(x)[2:], node.shape[2:], strict=True)
            if isinstance(size, int) and isinstance(outputs, int)
        ]
        if len(found) != 2 or None in found:
            return None
        (down, height), (along, width) = found  # type: ignore[misc]
        return self.instead_of(
            node, {"x": x},
            kernel=(height, width), stride=(down, along), padding=(0, 0), ceil_mode=False, dilation=(1, 1),
        )  # fmt: skip

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return F.max_pool2d(
            inputs["x"], a["kernel"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"]
        )

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        (rows, columns), (down, along) = attributes["kernel"], attributes["dilation"]
        spans = (rows - 1) * down + 1, (columns - 1) * along + 1
        return {RESULT: pooled(sizes["x"], attributes, spans)}

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        return with_channels(node, channels)

    def windows_of_maxima(self, node: Node) -> tuple[int, int] | None:
        a = node.attributes
        alone = a["kernel"] == a["stride"] and a["padding"] == (0, 0) and a["dilation"] == (1, 1)
        return a["kernel"] if alone else None

    def further(self, node: Node, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        form = Form(tuple(x.shape), x.dtype, "nhwc")
        problem = replace(
            window_problem(node, form, "fp32"), places=True, behind_relu=node.attributes["behind_relu"]
        )
        return {PLACES: extra_references(problem, inputs)[PLACES].to(torch.uint8)}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return super().layouts(node, given) if PLACES in node.attributes else Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        problem = window_problem(node, forms.value(node.inputs["x"]), forms.stored)
        if PLACES in a:
            problem = replace(problem, places=True, behind_relu=a["behind_relu"])
        elif _is_whole_image(problem):
            return Lowered(REDUCE, _over_pixels(problem))
        return Lowered(MAX_POOL2D, problem)


def window_problem(node: Node, form: Form, dtype: str) -> MaxPool2dProblem:
    """The maximum over a node's windows of images that lie so."""
    a = node.attributes
    batch, channels, height, width = form.shape
    return MaxPool2dProblem(
        batch, channels, height, width, a["kernel"], a["stride"], a["padding"], a["ceil_mode"], dtype, form.layout,
        dilation=a["dilation"],
    )  # fmt: skip


def _is_whole_image(problem: MaxPool2dProblem) -> bool:
    """Whether there is one window, over all pixels. A thread for each maximum would go through them one by one."""
    p = problem
    reaches = all(
        size + padding <= kernel
        for size, padding, kernel in zip((p.height, p.width), p.padding, p.kernel, strict=True)
    )
    return reaches and p.dilation == (1, 1) and (p.output_height, p.output_width) == (1, 1)


def _over_pixels(problem: MaxPool2dProblem) -> ReduceProblem:
    """The maximum over an image as a reduction, of its channels side by side or of each by itself."""
    p = problem
    if p.layout == "nhwc":
        return ReduceProblem("max", p.batch, p.height * p.width, p.channels, dtype=p.dtype)
    return ReduceProblem("max", p.batch * p.channels, p.height * p.width, dtype=p.dtype)


def _is_values(node: Node) -> bool:
    """Whether a node is the maxima, not where they are."""
    return node.is_floating and node.attributes.get("result", 0) == 0


def _even(size: int, outputs: int) -> tuple[int, int] | None:
    """The stride and the size of PyTorch's windows that divide so many pixels, if all have the same."""
    places = [(at * size // outputs, -(-(at + 1) * size // outputs)) for at in range(outputs)]
    widths = {last - first for first, last in places}
    steps = {behind[0] - before[0] for before, behind in pairwise(places)} or {1}
    return (steps.pop(), widths.pop()) if len(widths) == len(steps) == 1 and 0 not in steps else None
