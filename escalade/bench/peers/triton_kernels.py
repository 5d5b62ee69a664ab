"""A convolution in Triton's language: an implicit GEMM over NHWC with its epilogue, tuned by Triton's own autotuner.

Rows of the product are output pixels, columns filters, and the sum goes over taps and channels. `triton_conv2d` imports
this module when it first needs it, since Triton need not be installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

_WARMING_MS, _TUNING_MS = 5, 20
_TILES = (
    (128, 256, 8, 3),
    (256, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 64, 4, 4),
    (64, 128, 4, 4),
    (64, 64, 4, 5),
    (64, 32, 4, 5),
)
"""Pixels, filters, warps and stages of a tile."""
_NARROWEST = 32


def _configs() -> list[Any]:
    return [
        triton.Config({"ROWS": pixels, "COLUMNS": filters}, num_warps=warps, num_stages=stages)
        for pixels, filters, warps, stages in _TILES
    ]


def _worthwhile(configs: Sequence[Any], given: dict[str, Any], **_: Any) -> list[Any]:
    """The tiles that are not mostly beside the result: each is compiled before it can be timed."""
    widest = max(_NARROWEST, triton.next_power_of_2(given["filters"]))
    return [config for config in configs if config.kwargs["COLUMNS"] <= widest]


def _timed(call: Any, quantiles: Sequence[float]) -> Any:
    return triton.testing.do_bench(call, warmup=_WARMING_MS, rep=_TUNING_MS, quantiles=quantiles)


@triton.autotune(
    _configs(),
    key=["height", "width", "channels", "filters", "pixels", "R", "S", "STRIDE_H", "STRIDE_W", "PRECISION"],
    prune_configs_by={"early_config_prune": _worthwhile},
    do_bench=_timed,
)
@triton.jit
def convolve(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, residual: tl.tensor, y: tl.tensor,
    height: tl.tensor, width: tl.tensor, channels: tl.tensor, filters: tl.tensor,
    y_height: tl.tensor, y_width: tl.tensor, pixels: tl.tensor,
    R: tl.constexpr, S: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr, PAD_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
    FEW_CHANNELS: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """y = relu(conv2d(x, weight) + bias + residual) for one tile of pixels and filters.

    A step of the sum is DEPTH channels of one tap; of FEW_CHANNELS it is so many of all taps' channels in a row, which
    are mostly of other taps.
    """
    columns = tl.cdiv(filters, COLUMNS)
    row = (tl.program_id(0) // columns) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % columns) * COLUMNS + tl.arange(0, COLUMNS)
    image = row // (y_height * y_width)
    top = (row // y_width) % y_height * STRIDE_H - PAD_H
    left = row % y_width * STRIDE_W - PAD_W
    chunks = tl.cdiv(channels, DEPTH)
    steps = tl.cdiv(R * S * channels, DEPTH) if FEW_CHANNELS else R * S * chunks
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(0, steps):
        if FEW_CHANNELS:
            depth = step * DEPTH + tl.arange(0, DEPTH)
            tap = depth // channels
            channel = depth % channels
            real = tap < R * S
        else:
            tap = tl.zeros((DEPTH,), dtype=tl.int32) + step // chunks
            channel = (step % chunks) * DEPTH + tl.arange(0, DEPTH)
            real = channel < channels
        h = top[:, None] + (tap // S * DILATION_H)[None, :]
        w = left[:, None] + (tap % S * DILATION_W)[None, :]
        inside = (row < pixels)[:, None] & real[None, :] & (h >= 0) & (h < height) & (w >= 0) & (w < width)
        a = tl.load(
            x + ((image[:, None] * height + h) * width + w) * channels + channel[None, :],
            mask=inside,
            other=0.0,
        )
        b = tl.load(
            weight + column[None, :] * (R * S * channels) + (tap * channels + channel)[:, None],
            mask=real[:, None] & (column < filters)[None, :],
            other=0.0,
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = row[:, None] * filters + column[None, :]
    kept = (row < pixels)[:, None] & (column < filters)[None, :]
    if BIAS:
        total += tl.load(bias + column, mask=column < filters, other=0.0).to(tl.float32)[None, :]
    if RESIDUAL:
        total += tl.load(residual + place, mask=kept, other=0.0).to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=kept)
