"""Non-overlapping windows in NCHW, up to 16 bytes of a row per thread, for gradients of pooling."""

from __future__ import annotations

from typing import Any

from escalade.device.program import Program
from escalade.device.recipe import Argument, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.shared import pooling
from escalade.ops.shared.windowed import WindowedImages

MOST_ROWS = 8
"""Most rows per window, since the kernel unrolls them."""


def refusal(rung: str, p: WindowedImages) -> str | None:
    """Return why such a rung does not support a problem; None if it does."""
    vector = widest_vector(p.dtype, p.width)
    if p.layout != "nchw":
        return f"{rung} supports layout nchw, not {p.layout}"
    overlap = any(kernel > stride for kernel, stride in zip(p.kernel, p.stride, strict=True))
    if p.padding != (0, 0) or p.ceil_mode or overlap:
        return f"{rung} needs windows that do not overlap and lie inside the image"
    if p.dilations != (1, 1) or p.stride[0] > MOST_ROWS:
        return f"{rung} needs windows without dilation, and strides of up to {MOST_ROWS} rows"
    if vector % p.stride[1]:
        return f"{rung} reads {vector} columns of a row of {p.width} at once; the stride {p.stride[1]} must divide them"
    if _threads(p) >= 2**31:
        return f"{rung} counts threads in 32 bits; {p.name} needs more"
    return unsupported_pitch(rung, p)


def recipe(
    source: str, p: WindowedImages, buffers: tuple[Argument, ...], threads: int, **scope: Any
) -> Recipe:
    """Launch a source over rows of windows, including the pixel rows below the last window."""
    program = Program.of(source, problem=p, vector=widest_vector(p.dtype, p.width), **scope)
    return launch(program, blocks(_threads(p), threads), threads, *buffers, pooling.shape(p))


def _threads(p: WindowedImages) -> int:
    return (
        p.batch * p.channels * ceil_div(p.height, p.stride[0]) * (p.width // widest_vector(p.dtype, p.width))
    )
