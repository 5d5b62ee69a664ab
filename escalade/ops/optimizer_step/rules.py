"""The optimisers as expressions: what a step makes of a parameter, its gradient and its state.

A rule's numbers are scalars of its expression, not part of its text: they lie in a tensor on the device, and a schedule
of learning rates or momenta needs neither another kernel nor another CUDA graph. `step` is what the kernel counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from escalade.errors import UnsupportedError
from escalade.ops.expressions import Expression

PARAMETER, GRADIENT, STEP = "p", "g", "step"
"""What every rule may name, besides its state and its scalars."""


@dataclass(frozen=True)
class Rule:
    """An optimiser: the new parameter, and then the new state, as an expression of `p`, `g`, the state, scalars and
    `step`, which is 1 at the first step."""

    expression: str
    state: tuple[str, ...]
    """The names of what is kept for each element; zeros before the first step."""
    values: tuple[tuple[str, float], ...]
    """The scalars by name."""

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """The scalars in the order in which the expression first uses them."""
        return scalar_names(self.expression, self.state)

    def scalars(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """The values as the operator takes them: an fp32 tensor in the order of `scalar_names`."""
        known = dict(self.values)
        return torch.tensor([known[name] for name in self.scalar_names], dtype=torch.float32, device=device)

    def scaled(self, scale: float = 65536.0) -> Rule:
        """The rule for gradients of a loss that was multiplied by `scale`, one more scalar."""
        unscaled = Expression.parse(f"{GRADIENT} * reciprocal(scale)")
        expression = Expression.parse(self.expression).substitute({GRADIENT: unscaled})
        return Rule(expression.text, self.state, (*self.values, ("scale", scale)))


def scalar_names(expression: str, state: tuple[str, ...]) -> tuple[str, ...]:
    """What an expression names besides the parameter, the gradient, the state and the step, in that order."""
    arrays = (PARAMETER, GRADIENT, STEP, *state)
    return tuple(name for name in Expression.parse(expression).inputs if name not in arrays)


def sgd(
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Rule:
    """`torch.optim.SGD`, whose momentum `m` begins as the first gradient, undamped."""
    if nesterov and (momentum <= 0 or dampening != 0):
        raise UnsupportedError(
            f"nesterov with a momentum of {momentum} and a dampening of {dampening}: it takes a momentum above 0 and "
            "no dampening"
        )
    gradient = _decayed(_ascending(maximize), weight_decay)
    values = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "undamped": 1 - dampening}
    if momentum == 0:
        return _rule(f"{PARAMETER} - lr * ({gradient})", (), values)
    velocity = "momentum * m + d"
    if dampening:
        velocity = f"where({STEP} > 1, momentum * m + undamped * d, d)"
    direction = "d + momentum * b" if nesterov else "b"
    return _rule(f"d = {gradient}; b = {velocity}; {PARAMETER} - lr * ({direction}), b", ("m",), values)


def adam(
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled: bool = False,
) -> Rule:
    """`torch.optim.Adam`, and with `decoupled` weight decay AdamW.

    1 - beta^step comes from expm1 of the step times log(beta): as a difference in fp32 it would lose ten bits.
    """
    if not all(0 <= beta < 1 for beta in betas):
        raise UnsupportedError(f"betas of {betas}: each is at least 0 and below 1")
    gradient = _ascending(maximize) if decoupled else _decayed(_ascending(maximize), weight_decay)
    decayed = f"{PARAMETER} * (1 - lr * weight_decay)" if decoupled and weight_decay else PARAMETER
    largest, second = ("; l = maximum(w, s)", "l") if amsgrad else ("", "s")
    text = (
        f"d = {gradient}; f = lerp(m, d, rest1); s = beta2 * v + rest2 * d * d{largest}; "
        f"rate = lr / -expm1({STEP} * log_beta1); correction = reciprocal(sqrt(-expm1({STEP} * log_beta2))); "
        f"{decayed} - rate * f / (sqrt({second}) * correction + eps), f, s{', l' if amsgrad else ''}"
    )
    values = {
        "lr": lr, "weight_decay": weight_decay, "eps": eps, "rest1": 1 - betas[0], "beta2": betas[1],
        "rest2": 1 - betas[1], "log_beta1": _logarithm(betas[0]), "log_beta2": _logarithm(betas[1]),
    }  # fmt: skip
    return _rule(text, ("m", "v", "w") if amsgrad else ("m", "v"), values)


def _ascending(maximize: bool) -> str:
    return f"-{GRADIENT}" if maximize else GRADIENT


def _decayed(gradient: str, weight_decay: float) -> str:
    return f"{gradient} + weight_decay * {PARAMETER}" if weight_decay else gradient


def _logarithm(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _rule(text: str, state: tuple[str, ...], values: dict[str, float]) -> Rule:
    used = scalar_names(text, state)
    return Rule(Expression.parse(text).text, state, tuple((name, values[name]) for name in used))
