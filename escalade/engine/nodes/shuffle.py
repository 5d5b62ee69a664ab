"""An image's channels dealt out in turns, as networks do it whose layers see a group of channels each."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.permute import Permute
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.signature import COUNT, IMAGE, RESULT, Attributes, Signature, SizeError, Sizes
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.convert import CONVERT, ConvertProblem, reach

Order = tuple[int, ...]


class Shuffle(Operator):
    """Channel c of the result is channel c / ways + c % ways * step of x, for as many channels as the result has."""

    name = "shuffle"
    signature = Signature({"x": IMAGE}, {"ways": COUNT, "step": COUNT})

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return dict.fromkeys(("channel_shuffle", "native_channel_shuffle"), self._recognise)

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x, groups = call.value("self"), call("groups", 1)
        channels = node.shape[1] if len(node.shape) == 4 else None
        if x is None or not isinstance(channels, int) or not node.is_floating:
            return None
        return x if groups == 1 else self.instead_of(node, {"x": x}, ways=groups, step=channels // groups)

    def fuse_written_out(self, graph: Graph) -> None:
        """Puts the operator in the place of a view as groups, their exchange with the channels, and a view back."""
        for node in graph:
            turned = graph.nodes.get(node.inputs["x"]) if Reshape.matches(node) else None
            groups = graph.nodes.get(turned.inputs["x"]) if Permute.matches(turned) else None
            if not Reshape.matches(groups) or turned is None or not _deals(graph, groups, turned, node):
                continue
            _, ways, step, *_ = groups.shape
            graph.nodes[node.name] = self.instead_of(node, {"x": groups.inputs["x"]}, ways=ways, step=step)
        graph.remove_dead_code()

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        channel = torch.arange(node.shape[1], device=inputs["x"].device)  # type: ignore[arg-type]
        ways, step = node.attributes["ways"], node.attributes["step"]
        return inputs["x"].index_select(1, channel // ways + channel % ways * step)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x, result = sizes["x"], sizes[RESULT]
        ways, step = attributes["ways"], attributes["step"]
        if len(result) != 4 or not 0 < result[1] <= x[1]:
            raise SizeError(f"{list(result)} is no image of channels of {list(x)}")
        if reach(result[1], ways, step) > x[1] or -(-result[1] // ways) > step:
            raise SizeError(
                f"{result[1]} channels cannot be dealt out of {ways} ways, {step} apart, of {x[1]}"
            )
        return {RESULT: (x[0], result[1], *x[2:])}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.name)
        batch, channels, height, width = form.shape
        dtype = NAMES.get(form.dtype)
        if dtype not in DTYPES or not form.elements:
            return None
        problem = ConvertProblem(
            batch, channels, height, width, dtype, "nhwc", dtype, "nhwc",
            stored_channels=forms.value(node.inputs["x"]).shape[1], **node.attributes,
        )  # fmt: skip
        return Lowered(CONVERT, problem, pitches={"x": "stored_channels"})

    def channels_taken(self, node: Node) -> Order:
        channels = node.shape[1]
        assert isinstance(channels, int)
        return dealt(channels, node.attributes["ways"], node.attributes["step"])


def dealt(channels: int, ways: int, step: int) -> Order:
    """The channels that so many are dealt out of, in turns."""
    return tuple(channel // ways + channel % ways * step for channel in range(channels))


def _deals(graph: Graph, groups: Node, turned: Node, node: Node) -> bool:
    """Whether three nodes are [N, C, H, W] as [N, ways, step, H, W], ways and step exchanged, and as it was again."""
    image = graph.shape_of(groups.inputs["x"])
    return (
        len(image) == 4
        and node.is_floating
        and node.shape == image
        and len(groups.shape) > 3
        and groups.shape[0] == image[0]
        and groups.shape[1] * groups.shape[2] == image[1]  # type: ignore[operator]
        and turned.attributes["order"] == (0, 2, 1, *range(3, len(groups.shape)))
    )
