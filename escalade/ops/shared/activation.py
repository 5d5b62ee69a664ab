"""The activation at the end of an operation: ReLU by a flag, any other as the text of an expression in `x`."""

from __future__ import annotations

from typing import Protocol

import torch

from escalade.device.program import Constant
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.expressions import Expression

IN_NAME = r"(\[(?P<activation>[^\]]+)\])?"
"""How the name of a problem ends, as `spell` spells it."""
FORM = "[silu(x)] or another expression in x"
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
    if expression.inputs != ("x",) or len(expression.results) != 1:
        raise UnsupportedError(
            f"an activation of {problem.activation!r}: it is one result computed from x, such as x * sigmoid(x)"
        )
    if problem.relu:
        raise UnsupportedError(
            f"ReLU and an activation of {expression.text!r}: an activation says all that is done; write relu(x) "
            "where it means x"
        )
    object.__setattr__(problem, "relu", expression == _RELU)
    plain = expression == _RELU or expression.is_identity
    object.__setattr__(problem, "activation", "" if plain else expression.text)


def spell(problem: Activated) -> str:
    """The end of a problem's name: nothing unless it has an expression."""
    return f"[{problem.activation.replace(' ', '')}]" if problem.activation else ""


def constants(relu: bool, activation: str, dtype: str) -> dict[str, Constant]:
    """What `activated` of kernels/common/epilogue.cuh leaves open, for results of that type."""
    expression = Expression.parse(activation).constants(fast=ELEMENT_BYTES[dtype] <= 2) if activation else {}
    return {"HAS_RELU": relu, **expression}


def constants_of(problem: Activated) -> dict[str, Constant]:
    """What `constants` gives, for a kernel that does all of a problem."""
    return constants(problem.relu, problem.activation, problem.dtype)


def apply(problem: Activated, y: torch.Tensor) -> torch.Tensor:
    """The activation of a result by PyTorch."""
    if problem.activation:
        (y,) = Expression.parse(problem.activation).evaluate({"x": y})
    return torch.relu(y) if problem.relu else y
