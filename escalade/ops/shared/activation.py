"""The activation at the end of an operation: ReLU as a flag, any other as an expression in `x`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import torch

from escalade.device.program import Constant, Macro
from escalade.errors import UnsupportedError
from escalade.ops.expressions import Expression

IN_NAME = r"[\[{activation:text}\]]"
"""The activation in a problem's name pattern."""
VECTORS = ("a", "b")
"""Names of fp32 vectors, a number per filter, that an activation of conv2d may use: mish(x) * a + b."""
_RELU = Expression.apply("relu", "x")


class HasActivation(Protocol):
    """A problem that ends with an activation; its `__post_init__` calls `normalize`."""

    @property
    def relu(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def dtype(self) -> str: ...


def normalize(problem: HasActivation) -> None:
    """Check the activation and store its canonical text, or the flag if it is ReLU."""
    if not problem.activation:
        return
    expression = Expression.parse(problem.activation)
    known = {"x", "residual"} if getattr(problem, "residual", False) else {"x"}
    known |= set(VECTORS) if getattr(problem, "takes_vectors", False) else set()
    if "x" not in expression.inputs or not known >= set(expression.inputs) or len(expression.results) != 1:
        raise UnsupportedError(
            f"activation {problem.activation!r}: it must be one expression in x, such as x * sigmoid(x), that may also "
            f"use residual if the problem has one, and {' and '.join(VECTORS)} if it is a convolution"
        )
    if problem.relu:
        raise UnsupportedError(
            f"ReLU and activation {expression.text!r}: pass one of them; an activation can contain relu(x)"
        )
    object.__setattr__(problem, "relu", expression == _RELU)
    plain = expression == _RELU or expression.is_identity
    object.__setattr__(problem, "activation", "" if plain else expression.text)


def constants(relu: bool, activation: str, dtype: str) -> dict[str, Constant]:
    """Return the parameters of kernels/common/epilogue.cuh, for results of that dtype."""
    if not activation:
        return {"HAS_RELU": relu}
    expression = Expression.parse(activation)
    named = {name: number for number, name in enumerate(expression.inputs)}
    vectors: dict[str, Constant] = {
        "EXPRESSION_VECTORS": Macro("1"),
        **{f"EXPRESSION_{name.upper()}": named.get(name, -1) for name in ("residual", *VECTORS)},
    }
    return {
        "HAS_RELU": relu,
        "EXPRESSION_X": named["x"],
        **(vectors if vectors_of(activation) else {}),
        **expression.constants(dtype),
        **({} if vectors_of(activation) else expression.pair_constants()),
    }


def constants_of(problem: HasActivation) -> dict[str, Constant]:
    return constants(problem.relu, problem.activation, problem.dtype)


def takes_residual(activation: str) -> bool:
    """Return True if the activation uses the residual itself; otherwise it is added before the activation."""
    return bool(activation) and "residual" in Expression.parse(activation).inputs


def vectors_of(activation: str) -> tuple[str, ...]:
    """Return the vectors that an activation uses."""
    inputs = Expression.parse(activation).inputs if activation else ()
    return tuple(name for name in VECTORS if name in inputs)


def apply(
    problem: HasActivation,
    y: torch.Tensor,
    residual: torch.Tensor | None = None,
    vectors: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """Apply a problem's residual and activation with PyTorch."""
    return finished(problem.relu, problem.activation, y, residual, vectors)


def finished(
    relu: bool,
    activation: str,
    y: torch.Tensor,
    residual: torch.Tensor | None,
    vectors: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> torch.Tensor:
    """Apply a residual and an activation to sums with PyTorch; `vectors` may contain other inputs too."""
    if residual is not None and not takes_residual(activation):
        y = y + residual
    if activation:
        values = {name: vectors[name].to(y.dtype).view(-1, 1, 1) for name in vectors_of(activation)}
        values |= {"x": y} if residual is None else {"x": y, "residual": residual}
        (y,) = Expression.parse(activation).evaluate(values)
    return torch.relu(y) if relu else y
