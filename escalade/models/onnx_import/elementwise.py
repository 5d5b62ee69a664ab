"""ONNX operators on single elements, with broadcasting."""

from __future__ import annotations

import importlib
import operator as python
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch.nn import functional as F

from escalade.models.onnx_import.operators import OPERATORS, OnnxNode, as_tensor, given, operator, tensors_of

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Asin": torch.asin, "Atan": torch.atan, "Ceil": torch.ceil, "Cos": torch.cos,
    "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": F.hardswish,
    "IsNaN": torch.isnan, "Log": torch.log, "Mish": F.mish, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": F.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign,
    "Sin": torch.sin, "Sinh": torch.sinh, "Softplus": F.softplus, "Softsign": F.softsign, "Sqrt": torch.sqrt,
    "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip
_TENSOR_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": torch.add, "And": torch.logical_and, "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge,
    "Less": torch.lt, "LessOrEqual": torch.le, "Mul": torch.mul, "Or": torch.logical_or, "Pow": torch.pow,
    "Sub": torch.sub, "Xor": torch.logical_xor,
}  # fmt: skip
_HOST_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": python.add, "And": python.and_, "Equal": python.eq, "Greater": python.gt, "GreaterOrEqual": python.ge,
    "Less": python.lt, "LessOrEqual": python.le, "Mul": python.mul, "Or": python.or_, "Pow": python.pow,
    "Sub": python.sub, "Xor": python.xor, "Max": max, "Min": min,
}  # fmt: skip
_NEEDS_TENSORS = ("And", "Or", "Xor")
"""Operators whose PyTorch functions take no numbers."""


def on_host(function: Callable[..., Any], *values: Any) -> Any:
    """Apply a function to numbers and lists of numbers, broadcast against each other."""
    lists = [value for value in values if isinstance(value, list)]
    if not lists:
        return function(*values)
    length = max(map(len, lists))

    def at(value: Any, index: int) -> Any:
        return value[index if len(value) > 1 else 0] if isinstance(value, list) else value

    return [function(*(at(value, index) for value in values)) for index in range(length)]


def all_on_host(values: Sequence[Any]) -> bool:
    return not any(isinstance(value, torch.Tensor) for value in values)


@operator(*_UNARY)
def _unary(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    if isinstance(x, torch.Tensor):
        return _UNARY[node.op](x)
    return on_host(lambda value: _UNARY[node.op](torch.tensor(value)).item(), x)


@operator(*_TENSOR_BINARY)
def _binary(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    if all_on_host(inputs):
        return on_host(_HOST_BINARY[node.op], *inputs)
    x, y = inputs
    if node.op in _NEEDS_TENSORS or isinstance(x, list) or isinstance(y, list):
        x, y = tensors_of(inputs)
    elif not isinstance(x, torch.Tensor) and node.op not in ("Add", "Mul", "Pow", "Sub"):
        x = as_tensor(x, y)
    return _TENSOR_BINARY[node.op](x, y) if isinstance(x, torch.Tensor) else _HOST_BINARY[node.op](x, y)


@operator("Div")
def _div(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, y = inputs
    if all_on_host(inputs):
        return on_host(_host_quotient, x, y)
    if isinstance(x, torch.Tensor) and isinstance(y, int | float):
        return _quotient(x, y)
    return _quotient(*tensors_of(inputs))


def _quotient(x: torch.Tensor, y: Any) -> torch.Tensor:
    is_whole = not x.is_floating_point() and not (isinstance(y, torch.Tensor) and y.is_floating_point())
    return torch.div(x, y, rounding_mode="trunc" if is_whole else None)


def _host_quotient(x: Any, y: Any) -> Any:
    if isinstance(x, float) or isinstance(y, float):
        return x / y
    return x // y if isinstance(x, int) and x % y == 0 else int(x / y)  # ONNX truncates toward zero


@operator("Mod")
def _mod(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    if all_on_host(inputs):
        return on_host(python.mod, *inputs)
    function = torch.fmod if node.get("fmod", 0) else torch.remainder
    return function(*tensors_of(inputs))


@operator("Max", "Min")
def _extremum(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    if all_on_host(inputs):
        return reduce(lambda x, y: on_host(_HOST_BINARY[node.op], x, y), inputs)
    function = torch.maximum if node.op == "Max" else torch.minimum
    return reduce(function, tensors_of(inputs))


@operator("Where")
def _where(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    if all_on_host(inputs):
        return on_host(lambda condition, x, y: x if condition else y, *inputs)
    like = next((value for value in inputs[1:] if isinstance(value, torch.Tensor)), inputs[0])
    condition, x, y = (as_tensor(value, like) for value in inputs)
    return torch.where(condition, x, y)


@operator("Clip")
def _clip(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    least, most = node.host(inputs, 1), node.host(inputs, 2)
    return inputs[0] if least is None and most is None else torch.clamp(inputs[0], least, most)


OPERATORS.update({
    "Celu": lambda node, inputs: F.celu(inputs[0], node.get("alpha", 1.0)),
    "Elu": lambda node, inputs: F.elu(inputs[0], node.get("alpha", 1.0)),
    "Gelu": lambda node, inputs: F.gelu(inputs[0], approximate=node.get("approximate", "none")),
    "LeakyRelu": lambda node, inputs: F.leaky_relu(inputs[0], node.get("alpha", 0.01)),
    "Mean": lambda node, inputs: reduce(torch.add, tensors_of(inputs)) / len(inputs),
    "Sum": lambda node, inputs: reduce(torch.add, tensors_of(inputs)),
    "ThresholdedRelu": lambda node, inputs: F.threshold(inputs[0], node.get("alpha", 1.0), 0.0),
})  # fmt: skip


@operator("PRelu")
def _prelu(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, slope = inputs[0], as_tensor(inputs[1], inputs[0])
    per_channel = slope.numel() == 1 or (slope.dim() == x.dim() - 1 and slope.shape[0] == slope.numel())
    return F.prelu(x, slope.reshape(-1)) if per_channel else torch.where(x < 0, x * slope, x)


@operator("Selu")
def _selu(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    if not {"alpha", "gamma"} & node.attributes.keys():
        return F.selu(inputs[0])
    x, alpha, gamma = (
        inputs[0],
        node.get("alpha", 1.67326319217681884765625),
        node.get("gamma", 1.0507009873554),
    )
    return gamma * torch.where(x > 0, x, alpha * torch.expm1(x))


@operator("HardSigmoid")
def _hard_sigmoid(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    alpha, beta = node.get("alpha", 0.2), node.get("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:  # the slope of PyTorch's, as a C float in the file
        return F.hardsigmoid(inputs[0])
    return torch.clamp(alpha * inputs[0] + beta, 0, 1)


@operator("Identity", "Dropout")
def _identity(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    if node.op == "Dropout":
        node.require(node.outputs == 1, "the mask is not computed")
        node.require(
            not given(inputs, 2), "training mode is not supported; export the model in evaluation mode"
        )
    return inputs[0]


_QUANTIZED = (torch.int8, torch.uint8)


@operator("QuantizeLinear")
def _quantize(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, scale, zero = inputs[0], inputs[1], given(inputs, 2)
    node.require_defaults(block_size=0, saturate=1)
    dtype = node.types.get(2) or dtype_of(node.get("output_dtype", 0)) or torch.uint8
    node.require(dtype in _QUANTIZED, f"{dtype} is not supported, only int8 and uint8")
    bounds = torch.iinfo(dtype)
    if isinstance(scale, float) and not isinstance(zero, torch.Tensor):
        return _decomposed().quantize_per_tensor(x, scale, zero or 0, bounds.min, bounds.max, dtype)
    codes = torch.round(x / _along(node, scale, x)) + (0 if zero is None else _along(node, zero, x))
    return codes.clamp(bounds.min, bounds.max).to(dtype)


@operator("DequantizeLinear")
def _dequantize(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, scale, zero = inputs[0], inputs[1], given(inputs, 2)
    node.require_defaults(block_size=0)
    if isinstance(x, torch.Tensor) and x.dtype in _QUANTIZED and isinstance(scale, float):
        bounds = torch.iinfo(x.dtype)
        return _decomposed().dequantize_per_tensor(x, scale, zero or 0, bounds.min, bounds.max, x.dtype)
    codes = torch.as_tensor(x).to(scale.dtype if isinstance(scale, torch.Tensor) else torch.float32)
    codes = codes if zero is None else codes - _along(node, zero, codes)
    return codes * _along(node, scale, codes)


def _decomposed() -> Any:
    """Return the operators of PyTorch's quantization tools, from which engines take ranges."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # which registers them
    return torch.ops.quantized_decomposed


def _along(node: OnnxNode, values: Any, x: torch.Tensor) -> Any:
    """Return numbers per slice of the node's axis, shaped to broadcast with x."""
    if not isinstance(values, list | torch.Tensor):
        return values
    shape = [1] * x.dim()
    if x.dim():
        shape[node.get("axis", 1) % x.dim()] = -1
    return torch.as_tensor(values, device=x.device).reshape(shape)


_DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
"""PyTorch's dtypes by the numbers of ONNX's TensorProto.DataType."""


def dtype_of(number: int) -> torch.dtype | None:
    """Return PyTorch's dtype for a number of ONNX's TensorProto.DataType; None if there is none."""
    return _DTYPES.get(number)


@operator("Cast", "CastLike")
def _cast(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    if node.op == "CastLike":
        like = inputs[1]
        return x.to(like.dtype) if isinstance(like, torch.Tensor) and isinstance(x, torch.Tensor) else x
    dtype = dtype_of(node.get("to", 0))
    if dtype is None:
        raise node.refusal(f"element type {node.get('to', 0)} is not supported")
    if isinstance(x, torch.Tensor):
        return x.to(dtype)
    kind = float if dtype.is_floating_point else bool if dtype is torch.bool else None
    return on_host(lambda value: _whole(value) if kind is None else kind(value), x)


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float | bool) else value  # a batch size keeps its type
