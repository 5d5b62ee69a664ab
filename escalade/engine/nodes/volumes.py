"""Volumes as images: views of volumes as images, and copies of their frames.

Layers on volumes read and write images [N, C, D, H * W], with a frame's pixels in each row: in NHWC the same bytes as
volumes in NDHWC, so that everything around them is computed on images too.
"""

from __future__ import annotations

import torch

from escalade.engine.graph.graph import Graph, Node, Shape, dtype_name
from escalade.engine.nodes.base import Operator, Tensors
from escalade.engine.nodes.lowering import ElementMove, Forms, Lowered
from escalade.engine.nodes.movement import lower_moves
from escalade.engine.nodes.views import Reshape


def as_frame_rows(graph: Graph, node: Node, name: str) -> str:
    """Return volumes that a node reads as images with a frame's pixels in each row."""
    batch, channels, depth, height, width = graph.shape_of(name)
    shape = (batch, channels, depth, height * width)  # type: ignore[operator]
    for other in graph:  # nodes that read the same value have the same view of it
        if other.name == node.name:
            break
        is_view = Reshape.matches(other) and other.inputs["x"] == name and "order" not in other.attributes
        if is_view and other.shape == shape:
            return other.name
    return viewed(graph, name, shape)


def viewed(graph: Graph, name: str, shape: Shape) -> str:
    view = Reshape.node(graph.fresh(f"{name}_rows"), {"x": name}, {}, shape, dtype_name(graph.dtype_of(name)))
    return graph.add(view)


class FrameImages(Operator):
    """Volumes as images of their frames, or with a frame's pixels in each row, from the other of the two.

    Both are the same bytes in NHWC.
    """

    name = "frames"

    @classmethod
    def of_rows(cls, node: Node, rows: str, sides: tuple[int, int]) -> Node:
        """Return the images of frames with these sides, in place of a node."""
        return cls.instead_of(node, {"x": rows}, sides=sides)

    @classmethod
    def as_rows(cls, name: str, images: str, shape: Shape, dtype: str) -> Node:
        return cls.node(name, {"x": images}, {"sides": None}, shape, dtype)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x, sides = inputs["x"], node.attributes["sides"]
        if sides is not None:
            return x.unflatten(3, sides).transpose(1, 2).flatten(0, 1)
        return x.unflatten(0, (-1, node.shape[2])).transpose(1, 2).flatten(3)

    def is_alias(self, node: Node, forms: Forms) -> bool:
        return True

    def may_alias(self, node: Node) -> bool:
        return True


class _Moved(Operator):
    """A copy of elements of images with a frame's pixels in each row."""

    values = ("x0",)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        return lower_moves(self, node, forms)


class VolumeShuffle(_Moved):
    """Volumes whose channels [frames, rows, columns, K] are boxes of the result, side by side, of K channels."""

    name = "volume_shuffle"

    def _boxes(self, node: Node, x: torch.Tensor) -> torch.Tensor:
        """Return x as [N, K, D, frames, H, rows, W, columns]."""
        split = x.unflatten(3, node.attributes["sides"]).unflatten(1, (*node.attributes["box"], -1))
        return split.permute(0, 4, 5, 1, 6, 2, 7, 3)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        boxes = self._boxes(node, inputs["x0"])
        batch, channels, *sizes = boxes.shape
        depth, height, width = (sizes[at] * sizes[at + 1] for at in (0, 2, 4))
        return boxes.reshape(batch, channels, depth, height * width)

    def element_moves(self, node: Node, inputs: Tensors, result: torch.Tensor) -> list[ElementMove]:
        (frames, rows, columns), (height, width) = node.attributes["box"], node.attributes["sides"]
        whole = result.unflatten(3, (height * rows, width * columns))
        target = whole.unflatten(4, (width, columns)).unflatten(3, (height, rows)).unflatten(2, (-1, frames))
        return [ElementMove(self._boxes(node, inputs["x0"]), target)]


class FrameStack(_Moved):
    """Frames that a filter covers, stacked as channels [frames, C]: a convolution of volumes is then one of images."""

    name = "frame_stack"

    def _parts(self, node: Node, x: torch.Tensor) -> list[torch.Tensor]:
        a, depth = node.attributes, node.shape[2]
        step, last = a["stride"], (depth - 1) * a["stride"] + 1  # type: ignore[operator]
        return [x[:, :, tap * a["dilation"] :][:, :, :last:step] for tap in range(a["taps"])]

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return torch.cat(self._parts(node, inputs["x0"]), 1)

    def element_moves(self, node: Node, inputs: Tensors, result: torch.Tensor) -> list[ElementMove]:
        parts = self._parts(node, inputs["x0"])
        return [
            ElementMove(part, target) for part, target in zip(parts, result.chunk(len(parts), 1), strict=True)
        ]
