"""What works over the channels of every pixel, in either layout."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Layouts
from escalade.ops.shared.columns import MOST_LENGTH


def channels_as_they_lie(node: Node, given: Mapping[str, str]) -> Layouts:
    """An image stays as it lies where the kernels for channels that lie apart hold them all."""
    channels = node.shape[1]
    assert isinstance(channels, int)
    return Layouts.of_all(given) if channels <= MOST_LENGTH else Layouts("nhwc", "nhwc")


def side_by_side(node: Node, form: Form) -> int:
    """The rows of channels that lie side by side: an image's pixels in PyTorch's order; 1 for any other rows."""
    apart = node.attributes.get("of_channels") and form.layout == "nchw"
    return prod(form.shape[2:]) if apart else 1
