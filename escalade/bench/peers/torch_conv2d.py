"""PyTorch's convolution (cuDNN) as users have it at its best: autotuned, either layout, fused where it can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F

from escalade.bench.peers.layer import LayerPeer
from escalade.ops.base.switches import with_cudnn
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.reference import pooled
from escalade.ops.shared import activation, prologue

Inputs = Mapping[str, torch.Tensor]


def conv2d_peers(problem: Conv2dProblem) -> tuple[LayerPeer, ...]:
    if problem.dtype == "fp8":
        return ()  # PyTorch has no convolutions in FP8
    found = [LayerPeer("torch-nchw", "nchw", eager), LayerPeer("torch-nhwc", "nhwc", eager)]
    if (
        problem.relu and not problem.prologue
    ):  # cuDNN's own fusions; PyTorch has them for a ReLU at the end only
        found += [LayerPeer("cudnn-fused-nchw", "nchw", fused), LayerPeer("cudnn-fused-nhwc", "nhwc", fused)]
    return tuple(found)


def eager(problem: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    """The prologue, the convolution with its bias, the residual and a ReLU in place or another activation, the pool."""
    p = problem

    def compute() -> torch.Tensor:
        x = prologue.apply(p.prologue, inputs)["x"]
        y = F.conv2d(x, inputs["weight"], inputs.get("bias"), p.stride, p.padding, p.dilation, p.groups)
        if p.activation:
            return pooled(p, activation.apply(p, y, inputs["residual"] if p.residual else None))
        if p.residual:
            y.add_(inputs["residual"])
        return pooled(p, y.relu_() if p.relu else y)

    return with_cudnn(p.dtype, compute)


def fused(problem: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    """cuDNN's convolution + bias (+ residual) + ReLU in one call, and the pool."""
    p = problem
    x, weight, bias = inputs["x"], inputs["weight"], inputs.get("bias")

    def compute() -> torch.Tensor:
        if p.residual:
            return torch.cudnn_convolution_add_relu(
                x, weight, inputs["residual"], 1.0, bias, p.stride, p.padding, p.dilation, p.groups
            )
        return torch.cudnn_convolution_relu(x, weight, bias, p.stride, p.padding, p.dilation, p.groups)

    return with_cudnn(p.dtype, lambda: pooled(p, compute()))


def compiled_peer() -> LayerPeer:
    """PyTorch's compiler with its own search among kernels: tens of seconds a problem, so only when asked for."""
    return LayerPeer("torch-compile", "nhwc", compiled)


def compiled(problem: Conv2dProblem, inputs: Inputs) -> torch.Tensor:
    """Prologue, convolution, bias, residual, activation and pool, compiled for this very problem."""
    call = _compiled(problem)
    return with_cudnn(problem.dtype, lambda: call(inputs))


@lru_cache(maxsize=1)
def _compiled(problem: Conv2dProblem) -> Callable[..., torch.Tensor]:
    p = problem

    def layer(inputs: Inputs) -> torch.Tensor:
        x = prologue.apply(p.prologue, inputs)["x"]
        y = F.conv2d(x, inputs["weight"], inputs.get("bias"), p.stride, p.padding, p.dilation, p.groups)
        return pooled(p, activation.apply(p, y, inputs.get("residual")))

    # What was compiled before is of no use, and after a few of one function the compiler gives up.
    torch.compiler.reset()
    return torch.compile(layer, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
