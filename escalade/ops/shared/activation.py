"""The activation at the end of an operation: ReLU by a flag, any other as the text of an expression in `x`."""

from __future__ import annotations

from typing import Protocol

import torch

from escalade.device.program import Constant
from escalade.errors import UnsupportedError
from escalade.ops.expressions import Expression

IN_NAME = r"[\[{activation:text}\]]"
"""The activation in the name pattern of a problem."""
_RELU = Expression.apply("relu", "x")


class Activated(Protocol):
    """A problem that ends with an activation; `settle` belongs into its `__post_init__`."""

    @property
    def relu(self) -> bool: ...
    @property
    def activation(self) -> str: ...
    @property
    def dtype(self) -> str: ...


def settle(problem: Activated) -> None:
    """Checks the activation, and says it in the one way there is: in canonical form, and ReLU by its flag."""
    if not problem.activation:
        return
    expression = Expression.parse(problem.activation)
    known = {"x", "residual"} if getattr(problem, "residual", False) else {"x"}
    if "x" not in expression.inputs or not known >= set(expression.inputs) or len(expression.results) != 1:
        raise UnsupportedError(
            f"an activation of {problem.activation!r}: it is one result computed from x, such as x * sigmoid(x), and "
            "from residual, where there is one that is not just added in front"
        )
    if problem.relu:
        raise UnsupportedError(
            f"ReLU and an activation of {expression.text!r}: an activation says all that is done; write relu(x) "
            "where it means x"
        )
    object.__setattr__(problem, "relu", expression == _RELU)
    plain = expression == _RELU or expression.is_identity
    object.__setattr__(problem, "activation", "" if plain else expression.text)


def constants(relu: bool, activation: str, dtype: str) -> dict[str, Constant]:
    """What `activated` and `activated_pair` of kernels/common/epilogue.cuh leave open, for results of that type."""
    if not activation:
        return {"HAS_RELU": relu}
    expression = Expression.parse(activation)
    return {
        "HAS_RELU": relu,
        "EXPRESSION_X": expression.inputs.index("x"),
        **expression.constants(dtype),
        **expression.pair_constants(),
    }


def constants_of(problem: Activated) -> dict[str, Constant]:
    """What `constants` gives, for a kernel that does all of a problem."""
    return constants(problem.relu, problem.activation, problem.dtype)


def takes_residual(activation: str) -> bool:
    """Whether an activation says itself what becomes of the residual, which is added in front of others."""
    return bool(activation) and "residual" in Expression.parse(activation).inputs


def apply(problem: Activated, y: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """What becomes of a problem's sums by PyTorch: the residual, if there is one, and the activation."""
    return finished(problem.relu, problem.activation, y, residual)


def finished(relu: bool, activation: str, y: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """What becomes of sums by PyTorch: the residual, if there is one, and the activation."""
    if residual is not None and not takes_residual(activation):
        y = y + residual
    if activation:
        values = {"x": y} if residual is None else {"x": y, "residual": residual}
        (y,) = Expression.parse(activation).evaluate(values)
    return torch.relu(y) if relu else y
