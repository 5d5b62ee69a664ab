"""The functions of single elements that expressions are made of.

Each has one name in three places: here, with what PyTorch calls it; in an expression's text; and in
`escalade/kernels/common/functions.cuh`, in namespace `of`. Truth values are 1 and 0, as everything is a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Compute = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Function:
    """A function of one to three numbers, by PyTorch over tensors."""

    arity: int
    compute: Compute


def _truth(test: Compute) -> Compute:
    """A test whose answer is a number of the type of what it looks at."""
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
    "hardsigmoid": F.hardsigmoid, "hardswish": F.hardswish, "isnan": _truth(torch.isnan), "isinf": _truth(torch.isinf),
    "logical_not": _truth(torch.logical_not),
}  # fmt: skip
_TWO: dict[str, Compute] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "pow": torch.pow, "atan2": torch.atan2,
    "fmod": torch.fmod, "remainder": torch.remainder, "maximum": torch.maximum, "minimum": torch.minimum,
    "fmax": torch.fmax, "fmin": torch.fmin, "copysign": torch.copysign, "hypot": torch.hypot,
    "lt": _truth(torch.lt), "le": _truth(torch.le), "gt": _truth(torch.gt), "ge": _truth(torch.ge),
    "eq": _truth(torch.eq), "ne": _truth(torch.ne), "logical_and": _truth(torch.logical_and),
    "logical_or": _truth(torch.logical_or), "logical_xor": _truth(torch.logical_xor),
    "leaky_relu": _leaky_relu, "elu": _elu,
}  # fmt: skip
_THREE: dict[str, Compute] = {"where": _where, "clamp": torch.clamp, "lerp": torch.lerp}

FUNCTIONS = {
    name: Function(arity, compute)
    for arity, table in enumerate((_ONE, _TWO, _THREE), 1)
    for name, compute in table.items()
}
"""Every function by name. `elu(x, a)` is x above 0 and a * (exp(x) - 1) below; `leaky_relu(x, a)` is a * x below."""
