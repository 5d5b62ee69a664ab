"""`conv2d` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin.

It runs on the caller's current stream and device, and works under autograd, `torch.compile`,
`torch.export`, CUDA-graph capture and autocast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES, dtype_of
from escalade.ops.calling.executables import aligned, ready
from escalade.ops.calling.library import define, library, require_alike, require_rung
from escalade.ops.conv2d.operation import CONV2D
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d.reference import empty_output
from escalade.ops.shared.images import MEMORY_FORMAT, layout_of
from escalade.ops.shared.pooling import two

_SCHEMA = (
    "conv2d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, int[2] stride=1, "
    "int[2] padding=0, int[2] dilation=1, int groups=1, bool relu=False, bool tf32=False, str? rung=None) -> Tensor"
)
_TF32_POSITION = 9


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """relu(conv2d(x, weight) + bias + residual), each of bias, residual and relu optional.

    Shapes are PyTorch's. NCHW and channels_last inputs are taken as they are (the result has x's
    layout), anything else is copied first. `tf32` allows TF32 products for fp32 tensors; `rung` names
    one rung of the ladder instead of the chosen one.
    """
    return torch.ops.escalade.conv2d(
        x, weight, bias, residual, two(stride, "stride"), two(padding, "padding"),
        two(dilation, "dilation"), groups, relu, tf32, rung,
    )  # fmt: skip


def problem_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    relu: bool,
    tf32: bool,
) -> Conv2dProblem:
    """The problem that these tensors pose, or a sentence on why they pose none."""
    _check_tensors(x, weight, bias, residual, groups, tf32)
    batch, channels, height, width = x.shape
    filters, _, filter_height, filter_width = weight.shape
    problem = Conv2dProblem(
        batch, channels, height, width, filters, filter_height, filter_width,
        (stride[0], stride[-1]), (padding[0], padding[-1]), (dilation[0], dilation[-1]), groups,
        "tf32" if tf32 else NAMES[x.dtype], layout_of(x), bias is not None, residual is not None, relu,
    )  # fmt: skip
    expected = (batch, filters, problem.output_height, problem.output_width)
    if residual is not None and residual.shape != expected:
        raise UnsupportedError(
            f"residual has shape {tuple(residual.shape)}; it must be the output's, {expected}"
        )
    return problem


def _check_tensors(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    groups: int,
    tf32: bool,
) -> None:
    """What can be said without the sizes of images and batch, which may be symbols while a program is traced."""
    if x.dim() != 4 or weight.dim() != 4:
        raise UnsupportedError(
            f"x has {x.dim()} dimensions and weight {weight.dim()}; conv2d takes 4 each: x [N, C, H, W], "
            "weight [K, C/groups, R, S]"
        )
    dtype_of("conv2d", x)
    require_alike(x, {"weight": weight, "bias": bias, "residual": residual})
    if groups < 1 or x.shape[1] != weight.shape[1] * groups:
        raise UnsupportedError(
            f"x has {x.shape[1]} channels, but weight {tuple(weight.shape)} with groups={groups} takes "
            f"{weight.shape[1] * groups}"
        )
    if tf32 and x.dtype != torch.float32:
        raise UnsupportedError(f"tf32=True is a way to multiply float32 tensors; x is {x.dtype}")
    filters = weight.shape[0]
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != filters):
        raise UnsupportedError(
            f"bias has shape {tuple(bias.shape)}; for {filters} filters it must be ({filters},)"
        )
    if residual is not None and residual.dim() != 4:
        raise UnsupportedError(f"residual has shape {tuple(residual.shape)}; it must be the output's")


class _Call(NamedTuple):
    """What the operator is called with: PyTorch leaves out arguments at the end that have their defaults."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    stride: Sequence[int] = (1, 1)
    padding: Sequence[int] = (0, 0)
    dilation: Sequence[int] = (1, 1)
    groups: int = 1
    relu: bool = False
    tf32: bool = False
    rung: str | None = None


def _run(*arguments: Any) -> torch.Tensor:
    x, weight, bias, residual, stride, padding, dilation, groups, relu, tf32, rung = _Call(*arguments)
    problem = problem_of(x, weight, bias, residual, stride, padding, dilation, groups, relu, tf32)
    if problem.batch == 0:
        require_rung(CONV2D, rung)
        return empty_output(problem, x.device)
    prepared = ready(CONV2D, problem, x.device, rung)
    memory_format = MEMORY_FORMAT[prepared.problem.layout]

    def laid_out(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        return aligned(
            tensor.contiguous(memory_format=memory_format) if tensor.dim() == 4 else tensor.contiguous()
        )

    y = empty_output(prepared.problem, x.device)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    prepared.run({**{name: laid_out(tensor) for name, tensor in given.items()}, "y": y})
    return y.contiguous(memory_format=MEMORY_FORMAT[problem.layout])


def _fake(*arguments: Any) -> torch.Tensor:
    x, weight, bias, residual, stride, padding, dilation, groups, _, tf32, _ = _Call(*arguments)
    _check_tensors(x, weight, bias, residual, groups, tf32)
    size = [
        (x.shape[2 + d] + 2 * padding[d] - dilation[d] * (weight.shape[2 + d] - 1) - 1) // stride[d] + 1
        for d in (0, 1)
    ]
    return torch.empty(
        (x.shape[0], weight.shape[0], *size),
        dtype=x.dtype, device=x.device, memory_format=MEMORY_FORMAT[layout_of(x)],
    )  # fmt: skip


def _cast(argument: object, device_type: str, dtype: torch.dtype) -> object:
    if isinstance(argument, torch.Tensor) and argument.dtype in NAMES and argument.device.type == device_type:
        return argument.to(dtype)
    return argument


def _under_autocast(device_type: str):  # type: ignore[no-untyped-def]
    def cast_and_run(*arguments: object) -> torch.Tensor:
        dtype = torch.get_autocast_dtype(device_type)
        cast = [_cast(argument, device_type, dtype) for argument in arguments]
        if len(cast) > _TF32_POSITION:  # it is about fp32 tensors, which these no longer are
            cast[_TF32_POSITION] = bool(cast[_TF32_POSITION]) and dtype == torch.float32
        with torch.autocast(device_type, enabled=False):
            return torch.ops.escalade.conv2d(*cast)

    return cast_and_run


define(_SCHEMA, _run, _fake)
library.impl("conv2d", _under_autocast("cuda"), "AutocastCUDA")
library.impl("conv2d", _under_autocast("cpu"), "AutocastCPU")
