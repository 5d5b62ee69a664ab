"""Windows side by side in NCHW, up to 16 bytes of a row a thread: how the gradients of poolings lie over threads."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.shared import pooling
from escalade.ops.shared.windowed import WindowedImages, constants

MOST_ROWS = 8
"""Rows of a window: the code has no loop over them."""


def refusal(rung: str, p: WindowedImages) -> str | None:
    """Why such a rung does not take a problem, if it does not."""
    vector = widest_vector(p.dtype, p.width)
    if p.layout != "nchw":
        return f"{rung} takes layout nchw, not {p.layout}"
    overlap = any(kernel > stride for kernel, stride in zip(p.kernel, p.stride, strict=True))
    if p.padding != (0, 0) or p.ceil_mode or overlap:
        return f"{rung} takes windows side by side, that lie inside the image"
    if p.dilations != (1, 1) or p.stride[0] > MOST_ROWS:
        return f"{rung} takes windows without gaps, and strides of up to {MOST_ROWS} rows"
    if vector % p.stride[1]:
        return f"{rung} takes {vector} columns at a time of rows of {p.width}, which a stride of {p.stride[1]} divides"
    if _threads(p) >= 2**31:
        return f"{rung} counts threads in 32 bits; there are too many for {p.name}"
    return unsupported_pitch(rung, p)


def recipe(
    source: str, p: WindowedImages, more: dict[str, Constant], buffers: tuple[Argument, ...], threads: int
) -> Recipe:
    """The launch of a source over rows of windows, the rows below the last of them included."""
    entry = source.removesuffix(".cu").replace("/", "_")
    call = KernelCall(
        Program.of(source, entry, constants(p) | more | {"VECTOR": widest_vector(p.dtype, p.width)}),
        (blocks(_threads(p), threads), 1, 1),
        (threads, 1, 1),
        (*buffers, pooling.shape(p)),
        overlap=True,
    )
    return Recipe((call,))


def _threads(p: WindowedImages) -> int:
    return (
        p.batch * p.channels * ceil_div(p.height, p.stride[0]) * (p.width // widest_vector(p.dtype, p.width))
    )
