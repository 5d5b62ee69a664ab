"""Convolutions by a kernel in Triton's language, with the tile that its autotuner finds the fastest."""

from __future__ import annotations

import importlib
import math
from functools import cache, partial
from typing import Any

import torch

from escalade.bench.peers.catalogue import TRITON
from escalade.bench.peers.layer import Inputs, LayerPeer
from escalade.errors import UnsupportedError
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d.problem import Conv2dProblem

SYSTEM = "triton"
MOST_ELEMENTS = 2**31 - 1
"""The elements that a tensor may have, since the kernel counts in 32 bits."""
_PRECISION = {"fp32": "tf32x3", "tf32": "tf32", "fp16": "ieee", "bf16": "ieee"}
"""How Triton forms products of fp32; in three of TF32 they are as good as fp32's own, and faster."""
_DEPTH_BYTES, _FEW_CHANNELS = 128, 32


@cache
def kernels() -> Any:
    """The module with the kernel; whatever is wrong with Triton said in one sentence."""
    try:
        return importlib.import_module("escalade.bench.peers.triton_kernels")
    except Exception as error:  # it looks for a compiler and for the driver's libraries
        raise UnsupportedError(
            f"{SYSTEM} needs the package {TRITON.name} ({TRITON.install}): {error}"
        ) from error


def triton_peer(operation: Operation[Any], problem: Any) -> LayerPeer:
    """The peer for one problem, whose note names its tile once it has run; `UnsupportedError` for what it cannot do."""
    if operation.name != "conv2d":
        raise UnsupportedError(f"{SYSTEM} has a kernel for forward convolutions, not for {operation.name}")
    _require(problem)
    kernels()
    return LayerPeer(SYSTEM, "nhwc", partial(_run, operation), _tile)


def _require(p: Conv2dProblem) -> None:
    """The kernel does a convolution with bias, residual and ReLU."""
    if p.dtype not in _PRECISION:
        raise UnsupportedError(f"{SYSTEM}'s kernel is for {', '.join(_PRECISION)}, not for {p.dtype}")
    beyond = {
        f"{p.groups} groups": p.groups > 1,
        "a second convolution": p.shortcut_channels,
        f"the activation {p.activation}": p.activation,
        f"the prologue {p.prologue}": p.prologue,
        "the maxima of windows": p.pools,
    }
    for what, asked in beyond.items():
        if asked:
            raise UnsupportedError(
                f"{SYSTEM}'s kernel does a convolution with bias, residual and ReLU, without {what}"
            )
    largest = p.batch * max(p.channels * p.height * p.width, p.filters * p.output_height * p.output_width)
    if largest > MOST_ELEMENTS:
        raise UnsupportedError(f"{SYSTEM}'s kernel takes up to {MOST_ELEMENTS} elements, not {largest}")


def _run(operation: Operation[Any], problem: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    p, x, weight = problem, inputs["x"], inputs["weight"]
    y = operation.output(p, x.device)
    pixels = p.batch * p.output_height * p.output_width

    def grid(config: Any) -> tuple[int]:
        return (math.ceil(pixels / config["ROWS"]) * math.ceil(p.filters / config["COLUMNS"]),)

    kernels().convolve[grid](
        x, weight, inputs.get("bias", weight), inputs.get("residual", weight), y,
        p.height, p.width, p.channels, p.filters, p.output_height, p.output_width, pixels,
        R=p.filter_height, S=p.filter_width, STRIDE_H=p.stride[0], STRIDE_W=p.stride[1],
        PAD_H=p.padding[0], PAD_W=p.padding[1], DILATION_H=p.dilation[0], DILATION_W=p.dilation[1],
        BIAS=p.bias, RESIDUAL=p.residual, RELU=p.relu, PRECISION=_PRECISION[p.dtype],
        FEW_CHANNELS=p.channels < _FEW_CHANNELS, DEPTH=_DEPTH_BYTES // x.element_size(),
    )  # fmt: skip
    return y


def _tile() -> str:
    best = kernels().convolve.best_config
    return f"the fastest of its tiles: {best.kwargs}, {best.num_warps} warps, {best.num_stages} stages"
