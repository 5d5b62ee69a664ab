"""Cost of a pointwise expression in an epilogue, for estimates."""

from __future__ import annotations

from escalade.ops.expressions import Expression

SPECIAL_LANES = 16
"""Special-function results per clock and SM."""
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
"""Special-function instructions per call, for the functions that networks use between layers."""
PLAIN = ("add", "sub", "mul", "neg", "relu", "maximum", "minimum")
"""Functions that compile to one instruction."""
CALL, SPECIAL_CALL = 4.0, 1.0
"""Instructions per call of any other function, plus those per special function in it."""


def activation_cost(text: str) -> tuple[float, float]:
    """Return instructions and special functions of an expression, estimated; an empty one counts as ReLU."""
    if not text:
        return 1.0, 0.0
    calls = [call.function for call in Expression.parse(text).calls]
    special = sum(SPECIAL.get(name, 0) for name in calls)
    plain = sum(name in PLAIN for name in calls)
    return plain + CALL * (len(calls) - plain) + SPECIAL_CALL * special, special
