"""`quantise` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the twin."""

from __future__ import annotations

import torch

from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import E4M3, dtype_of
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import define, require_rung
from escalade.ops.quantise.operation import QUANTISE
from escalade.ops.quantise.problem import QuantiseProblem


def quantise(x: torch.Tensor, factor: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """x * factor as float8_e4m3fn, to nearest and within ±448; a tensor of any shape, the result in its layout.

    `factor` is one fp32 number on x's device. There is no gradient.
    """
    return OPERATOR(x, factor, rung)


def _check(x: torch.Tensor, factor: torch.Tensor) -> str:
    dtype = dtype_of("quantise", x)
    if factor.dtype != torch.float32 or factor.numel() != 1 or factor.device != x.device:
        raise UnsupportedError(
            f"factor is {factor.dtype} of shape {tuple(factor.shape)} on {factor.device}; quantise takes one float32 "
            f"number on {x.device}"
        )
    return dtype


def _run(x: torch.Tensor, factor: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    problem = QuantiseProblem(x.numel(), _check(x, factor))
    y = torch.empty_like(x, dtype=E4M3)
    if problem.elements == 0:
        require_rung(QUANTISE, rung)
        return y
    dense = x if x.stride() == y.stride() else torch.empty_like(x).copy_(x)
    ready(QUANTISE, problem, x.device, rung).run({"x": aligned(dense), "factor": factor, "y": y})
    return y


def _fake(x: torch.Tensor, factor: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    _check(x, factor)
    return torch.empty_like(x, dtype=E4M3)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    raise UnsupportedError("quantise has no gradient; detach x, or call it under torch.no_grad()")


OPERATOR = define(
    "quantise(Tensor x, Tensor factor, str? rung=None) -> Tensor",
    _run,
    _fake,
    backward=_backward,
)
