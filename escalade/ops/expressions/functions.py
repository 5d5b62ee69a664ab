"""Element-wise functions of expressions.

A function has the same name here, in an expression's text, and in namespace `of` of
`escalade/kernels/common/functions.cuh`. Booleans are 1 and 0, since every value is a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Compute = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Function:
    """A function of one to three numbers, computed with PyTorch over tensors."""

    arity: int
    compute: Compute


def _as_number(test: Compute) -> Compute:
    """Return a predicate whose result has the dtype of its first argument."""
    return lambda *values: test(*values).to(values[0].dtype)


def _where(test: torch.Tensor, yes: torch.Tensor, no: torch.Tensor) -> torch.Tensor:
    return torch.where(test != 0, yes, no)


def _elu(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, scale * torch.expm1(x))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 20, x, torch.log1p(torch.exp(x)))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _leaky_relu(x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, slope * x)


_ONE: dict[str, Compute] = {
    "neg": torch.neg, "abs": torch.abs, "sign": torch.sign, "square": torch.square, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1,
    "log": torch.log, "log2": torch.log2, "log10": torch.log10, "log1p": torch.log1p, "sin": torch.sin,
    "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh, "asinh": torch.asinh, "acosh": torch.acosh,
    "atanh": torch.atanh, "erf": torch.erf, "erfc": torch.erfc, "floor": torch.floor, "ceil": torch.ceil,
    "trunc": torch.trunc, "round": torch.round, "relu": torch.relu, "sigmoid": torch.sigmoid, "silu": F.silu,
    "gelu": F.gelu, "gelu_tanh": _gelu_tanh, "mish": F.mish, "softplus": _softplus, "log_sigmoid": F.logsigmoid,
    "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "isnan": _as_number(torch.isnan),
    "isinf": _as_number(torch.isinf), "logical_not": _as_number(torch.logical_not),
}  # fmt: skip
_TWO: dict[str, Compute] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow, "atan2": torch.atan2,
    "fmod": torch.fmod, "remainder": torch.remainder, "maximum": torch.maximum, "minimum": torch.minimum,
    "fmax": torch.fmax, "fmin": torch.fmin, "copysign": torch.copysign, "hypot": torch.hypot,
    "lt": _as_number(torch.lt), "le": _as_number(torch.le), "gt": _as_number(torch.gt), "ge": _as_number(torch.ge),
    "eq": _as_number(torch.eq), "ne": _as_number(torch.ne), "logical_and": _as_number(torch.logical_and),
    "logical_or": _as_number(torch.logical_or), "logical_xor": _as_number(torch.logical_xor),
    "leaky_relu": _leaky_relu, "elu": _elu,
}  # fmt: skip
_THREE: dict[str, Compute] = {"where": _where, "clamp": torch.clamp, "lerp": torch.lerp}

FUNCTIONS = {
    name: Function(arity, compute)
    for arity, table in enumerate((_ONE, _TWO, _THREE), 1)
    for name, compute in table.items()
}
"""All functions by name. `elu(x, a)` is a * (exp(x) - 1) for x <= 0; `leaky_relu(x, a)` is a * x there."""
