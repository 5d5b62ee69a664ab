"""A range of a dimension: where readers can take it out of the whole, nothing is done for it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered, Taken
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.sequences import dimension_of_image
from escalade.engine.nodes.signature import INDEX, RESULT, ROWS, Attributes, Signature, SizeError, Sizes
from escalade.ops.pad2d import PAD2D, Pad2dProblem

_SEQUENCE, _IMAGE = 3, 4
"""The dimensions of a batch of them."""


class Slice(Operator):
    """y = the elements of x from `first` on along `dimension`, as many as y has."""

    name = "slice"
    signature = Signature({"x": ROWS}, {"dimension": INDEX, "first": INDEX})

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        ranges = dict.fromkeys(("slice", "narrow"), self._range)
        pieces = (
            "split",
            "split_with_sizes",
            "chunk",
            "unsafe_split",
            "unsafe_chunk",
            "unsafe_split_with_sizes",
        )
        return {**ranges, **dict.fromkeys(pieces, self._piece), "select": self._one}

    def _range(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        start = call("start", 0)
        return self._taken(node, call, graph, start) if call("step", 1) == 1 else None

    def _piece(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """One of the pieces that x is split into; all but the last are alike unless their sizes are given."""
        number, x, at = node.attributes.get("result", 0), call.value("self"), call("dim", 0)
        if x is None or not isinstance(at, int):
            return None
        whole, own = graph.shape_of(x)[at], node.shape[at]
        sizes = call("split_sizes", call("split_size"))
        if isinstance(sizes, tuple):
            if not all(isinstance(size, int) for size in sizes):
                return None
            return self._taken(node, call, graph, list(accumulate(sizes, initial=0))[number])
        if not isinstance(whole, int) or not isinstance(own, int):
            return None
        each = sizes if isinstance(sizes, int) else -(-whole // call("chunks", 1))
        return self._taken(node, call, graph, number * each)

    def _one(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """A step of a sequence, or a row or column of an image; to PyTorch one of other dimensions is a view."""
        x, at, index = call.value("self"), call("dim", 0), call("index")
        if x is None or x in graph.constants or not node.is_floating:
            return None
        sizes = graph.shape_of(x)
        if len(sizes) not in (_SEQUENCE, _IMAGE) or not isinstance(at, int) or not isinstance(index, int):
            return None
        at %= len(sizes)
        whole = sizes[at]
        if at < 2 or not isinstance(whole, int):
            return None
        if whole > 1:
            place = {"dimension": at, "first": index % whole}
            shape = (*sizes[:at], 1, *sizes[at + 1 :])
            part = self.node(graph.fresh(f"{node.name}_part"), {"x": x}, place, shape, node.dtype)
            graph.append(part)
            x = part.name
        return Reshape.instead_of(node, {"x": x})

    def _taken(self, node: Node, call: AtenCall, graph: Graph, start: object) -> Recognised:
        x, at = call.value("self"), call("dim", 0)
        if x is None or x in graph.constants or not node.is_floating or not isinstance(at, int):
            return None
        sizes, at = graph.shape_of(x), at % len(node.shape)
        if sizes == node.shape:
            return x
        whole = sizes[at]
        if not isinstance(start, int) or not isinstance(whole, int) or not isinstance(node.shape[at], int):
            return None  # a range of the batch
        first = min(max(start + whole if start < 0 else start, 0), whole)
        return self.instead_of(node, {"x": x}, dimension=at, first=first)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        taken = self.taken(node)
        return inputs["x"].narrow(taken.dimension, taken.first, node.shape[taken.dimension])  # type: ignore[arg-type]

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x, result, at = sizes["x"], sizes[RESULT], attributes["dimension"]
        if len(x) != len(result) or at >= len(x) or attributes["first"] + result[at] > x[at]:
            raise SizeError(
                f"{list(result)} from {attributes['first']} on along dimension {at} are no part of {list(x)}"
            )
        return {RESULT: (*x[:at], result[at], *x[at + 1 :])}

    def as_image(self, node: Node) -> Attributes:
        return {**node.attributes, "dimension": dimension_of_image(node.attributes["dimension"])}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Channels lie innermost in NHWC; along other dimensions images stay as they are."""
        return super().layouts(node, given) if node.attributes["dimension"] == 1 else Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Rows or columns of an image are that image with fewer around it."""
        form, at = forms.value(node.inputs["x"]), node.attributes["dimension"]
        if len(form.shape) != 4 or at < 2 or not form.elements:
            return None
        first, left = node.attributes["first"], forms.value(node.name).shape[at]
        fewer = (-first, first + left - form.shape[at])
        pads = (*fewer, 0, 0) if at == 2 else (0, 0, *fewer)
        return Lowered(PAD2D, Pad2dProblem(*form.shape, pads, "constant", 0.0, forms.stored, form.layout))

    def channels_taken(self, node: Node) -> tuple[int, ...] | None:
        if len(node.shape) != 4 or node.attributes["dimension"] != 1:
            return None
        first, channels = node.attributes["first"], node.shape[1]
        assert isinstance(channels, int)
        return tuple(range(first, first + channels))

    def may_share(self, node: Node) -> bool:
        return True

    def taken(self, node: Node) -> Taken:
        return Taken(node.attributes["dimension"], node.attributes["first"])
