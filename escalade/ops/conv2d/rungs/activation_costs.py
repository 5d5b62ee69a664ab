"""What a pointwise program costs where sums are finished, for estimates."""

from __future__ import annotations

from escalade.ops.expressions import Expression

SPECIAL_LANES = 16
"""Results of a multiprocessor's special-function units in a clock."""
SPECIAL = {
    "silu": 1.5,
    "sigmoid": 2,
    "exp": 1,
    "tanh": 2,
    "gelu": 1.5,
    "gelu_tanh": 1.5,
    "mish": 2,
    "log": 1,
    "elu": 1,
}
"""Special functions that one call of a function takes, of those that networks have between layers."""
PLAIN = ("add", "sub", "mul", "neg", "relu", "maximum", "minimum")
"""Functions of one instruction."""
CALL, SPECIAL_CALL = 4.0, 1.0
"""Instructions of a call of another function, and those for each special function in it."""


def activation_cost(text: str) -> tuple[float, float]:
    """Instructions and special functions of an expression, about; without one it may be ReLU."""
    if not text:
        return 1.0, 0.0
    calls = [call.function for call in Expression.parse(text).calls]
    special = sum(SPECIAL.get(name, 0) for name in calls)
    plain = sum(name in PLAIN for name in calls)
    return plain + CALL * (len(calls) - plain) + SPECIAL_CALL * special, special
