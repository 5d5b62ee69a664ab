"""What graph operators over windows of one size share: how they are recognised, and the sizes that follow."""

from __future__ import annotations

from typing import Any

from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.signature import FLAG, Attributes, SizeError, Sizes, pair, positive
from escalade.ops.shared.windowed import output_size

WINDOWS = {"kernel": pair(1), "stride": pair(1), "padding": pair(0), "ceil_mode": FLAG}
"""The attributes of such an operator."""


def windows_of(call: AtenCall) -> dict[str, Any]:
    """These attributes, of a call of one of PyTorch's pools."""
    kernel = call.pair("kernel_size", 1)
    return {
        "kernel": kernel,
        "stride": call.pair("stride", kernel),
        "padding": call.pair("padding", 0),
        "ceil_mode": bool(call("ceil_mode", False)),
    }


def pooled(sizes: Sizes, attributes: Attributes, spans: tuple[int, int]) -> Sizes:
    """The sizes behind windows that span so many pixels."""
    batch, channels, *image = sizes
    result = []
    for size, span, kernel, stride, padding in zip(
        image, spans, *(attributes[key] for key in ("kernel", "stride", "padding")), strict=True
    ):
        if 2 * padding > kernel:
            raise SizeError(f"a padding of {padding} is more than half of a window of {kernel}")
        result.append(output_size(size, span, stride, padding, attributes["ceil_mode"]))
    return batch, channels, *positive(result)
