"""A network's own forward pass with its layers computed by plain loops on one thread, or some of them on a GPU.

Both replace PyTorch's operators at dispatch, so that the network is the same in every phase.
"""

from __future__ import annotations

import ctypes
import pathlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from escalade.device.cache import cache_key, default_cache
from escalade.device.twin import toolchain
from escalade.errors import UnsupportedError
from escalade.ops.batch_norm import batch_norm
from escalade.ops.conv2d.op import conv2d

_SOURCE = pathlib.Path(__file__).with_name("loops.cpp")
OPTIONS = ("-O2",)
"""Compiler options: no vectorized loops, no instruction sets beyond the default."""
_aten = torch.ops.aten
Replaced = Callable[..., Any]


class _Replacing(TorchDispatchMode):
    """Replaces some of PyTorch's operators."""

    def __init__(self, replaced: Mapping[Any, Replaced]) -> None:
        super().__init__()
        self._replaced = replaced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._replaced.get(func, func)(*args, **(kwargs or {}))


def in_loops() -> TorchDispatchMode:
    """Compile the loops, and return a mode that runs every layer of a ResNet by a loop, on one thread in fp32."""
    _library()
    return _Replacing(
        {
            _aten.convolution.default: _conv2d,
            _aten.native_batch_norm.default: _batch_norm,
            _aten.relu.default: partial(_pointwise, "relu"),
            _aten.add.Tensor: partial(_pointwise, "add"),
            _aten.max_pool2d_with_indices.default: _max_pool2d,
            _aten.mean.dim: _mean,
            _aten.addmm.default: _addmm,
        }
    )


def convolutions_on(device: torch.device, dtype: torch.dtype) -> TorchDispatchMode:
    """Return a mode that runs convolutions and BatchNorm by kernels on a GPU, copying every image to the GPU and back.

    Weights are copied once.
    """
    there: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def weight(tensor: torch.Tensor, type: torch.dtype) -> torch.Tensor:
        if id(tensor) not in there:  # keep the tensor alive, so that its id stays unique
            copied = tensor.to(device, type)
            laid = copied.contiguous(memory_format=torch.channels_last) if copied.dim() == 4 else copied
            there[id(tensor)] = tensor, laid
        return there[id(tensor)][1]

    def sent(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, dtype).contiguous(memory_format=torch.channels_last)

    def back(y: torch.Tensor) -> torch.Tensor:
        return y.to("cpu", torch.float32)

    def convolution(
        x: torch.Tensor, w: torch.Tensor, bias: Any, stride: Any, padding: Any, *rest: Any
    ) -> Any:
        _require_plain(bias, *rest)
        return back(conv2d(sent(x), weight(w, dtype), stride=stride, padding=padding))

    def norm(x: torch.Tensor, *given: Any) -> Any:
        scale, shift, mean, variance, training, _, epsilon = given
        assert not training
        w, b, m, v = (weight(tensor, torch.float32) for tensor in (scale, shift, mean, variance))
        return back(batch_norm(sent(x), w, b, m, v, eps=epsilon)), x.new_empty(0), x.new_empty(0)

    return _Replacing({_aten.convolution.default: convolution, _aten.native_batch_norm.default: norm})


@cache
def _library() -> ctypes.CDLL:
    """Return the loops, compiled by the twin's compiler."""
    source = _SOURCE.read_text()

    def make(path: pathlib.Path) -> None:
        given: list[str | pathlib.Path] = ["-shared", "-fPIC", *OPTIONS, _SOURCE.name, "-o", path]
        toolchain.run(given, "plain loops", {_SOURCE.name: source})

    key = cache_key("loops 1", source, repr(OPTIONS), *toolchain.identity())
    return ctypes.CDLL(str(default_cache().file(key, ".so", make)))


def _run(name: str, *arguments: torch.Tensor | int) -> None:
    """Call a loop with pointers to contiguous floats, and integers."""
    given = [
        ctypes.c_void_p(each.data_ptr()) if isinstance(each, torch.Tensor) else ctypes.c_int(each)
        for each in arguments
    ]
    getattr(_library(), f"loops_{name}")(*given)


def _require_plain(bias: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int) -> None:
    if bias is not None or any(each != 1 for each in dilation) or transposed or groups != 1:
        raise UnsupportedError("plain loops take convolutions of ResNets: without bias, dilation or groups")


def _conv2d(
    x: torch.Tensor, w: torch.Tensor, bias: Any, stride: Any, padding: Any, *rest: Any
) -> torch.Tensor:
    _require_plain(bias, *rest)
    x, w = x.contiguous(), w.contiguous()
    (images, channels, height, width), (filters, _, rows, columns) = x.shape, w.shape
    sizes = ((height, rows), (width, columns))
    out = [(size + 2 * padding[0] - taps) // stride[0] + 1 for size, taps in sizes]
    y = x.new_empty(images, filters, *out)
    _run(
        "conv2d", x, w, y, images, channels, height, width, filters, rows, columns, stride[0], padding[0], *out
    )  # fmt: skip
    return y


def _batch_norm(x: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    weight, bias, mean, variance, training, _, epsilon = given
    assert not training
    x = x.contiguous()
    scale = weight / (variance + epsilon).sqrt()
    y = torch.empty_like(x)
    _run("batch_norm", x, scale, bias - mean * scale, y, x.shape[0], x.shape[1], x[0, 0].numel())
    return y, x.new_empty(0), x.new_empty(0)


def _pointwise(name: str, *given: torch.Tensor) -> torch.Tensor:
    given = tuple(x.contiguous() for x in given)
    y = torch.empty_like(given[0])
    _run(name, *given, y, y.numel())
    return y


def _max_pool2d(x: torch.Tensor, kernel: Any, stride: Any, padding: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    height, width = x.shape[2:]
    out = [(size + 2 * padding[0] - kernel[0]) // stride[0] + 1 for size in (height, width)]
    y = x.new_empty(*x.shape[:2], *out)
    planes = x.shape[0] * x.shape[1]
    _run("max_pool2d", x, y, planes, height, width, kernel[0], stride[0], padding[0], *out)
    return y, x.new_empty(0, dtype=torch.int64)


def _mean(x: torch.Tensor, dims: Any, keepdim: bool = False) -> torch.Tensor:
    assert sorted(each % 4 for each in dims) == [2, 3] and keepdim
    x = x.contiguous()
    y = x.new_empty(*x.shape[:2], 1, 1)
    _run("mean", x, y, y.numel(), x[0, 0].numel())
    return y


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, rows = x.contiguous(), weight.t().contiguous()
    y = x.new_empty(len(x), len(rows))
    _run("linear", x, rows, bias, y, len(x), x.shape[1], len(rows))
    return y
