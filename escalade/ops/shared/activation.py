"""The activation at the end of an operation: ReLU as a flag, any other as an expression in `x`."""

from __future__ import annotations

from typing import Protocol

import torch

from escalade.device.program import Constant
from escalade.errors import UnsupportedError
from escalade.ops.expressions import Expression

IN_NAME = r"[\[{activation:text}\]]"
"""The activation in a problem's name pattern."""
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
    if "x" not in expression.inputs or not known >= set(expression.inputs) or len(expression.results) != 1:
        raise UnsupportedError(
            f"activation {problem.activation!r}: it must be one expression in x, such as x * sigmoid(x), that may also "
            "use residual if the problem has one"
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
    return {
        "HAS_RELU": relu,
        "EXPRESSION_X": expression.inputs.index("x"),
        **expression.constants(dtype),
        **expression.pair_constants(),
    }


def constants_of(problem: HasActivation) -> dict[str, Constant]:
    return constants(problem.relu, problem.activation, problem.dtype)


def takes_residual(activation: str) -> bool:
    """Return True if the activation uses the residual itself; otherwise it is added before the activation."""
    return bool(activation) and "residual" in Expression.parse(activation).inputs


def apply(problem: HasActivation, y: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a problem's residual and activation with PyTorch."""
    return finished(problem.relu, problem.activation, y, residual)


def finished(relu: bool, activation: str, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Apply a residual and an activation to sums with PyTorch."""
    if residual is not None and not takes_residual(activation):
        y = y + residual
    if activation:
        values = {"x": y} if residual is None else {"x": y, "residual": residual}
        (y,) = Expression.parse(activation).evaluate(values)
    return torch.relu(y) if relu else y
