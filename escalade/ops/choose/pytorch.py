"""Steps that a plan leaves to PyTorch although a rung supports them, because PyTorch is faster."""

from __future__ import annotations

from typing import Any

from escalade.errors import UnsupportedError
from escalade.ops.base.card import DeviceOrCard, is_gpu
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice, estimated
from escalade.ops.choose.table import Entry, key_of, tables_for

PYTORCH = "PyTorch"
"""Placeholder for a rung name where PyTorch computes a step."""
_STEP = "step/"
"""Prefix of operation names in tables, for a plan's step measured against PyTorch."""
_RIVAL, _RIVAL_US = "instead_of", "instead_of_us"
_NOISE = 1.03  # run-to-run variation of one kernel's time, as a factor


def verdict_key(operation: Operation[Any], problem: Problem) -> str:
    """Return the table key for whether PyTorch or we run a step."""
    return key_of(_STEP + operation.name, problem)


def is_clearly_faster(pytorch_us: float, own_us: float) -> bool:
    """Return True if PyTorch wins by more than measurement noise."""
    return own_us > _NOISE * pytorch_us


def verdict(choice: Choice, own_us: float, pytorch_us: float) -> Entry:
    """Return the table entry of a step that was measured both ways."""
    if not is_clearly_faster(pytorch_us, own_us):
        return Entry(choice.rung.name, choice.config.as_dict(), round(own_us, 3))
    return Entry(PYTORCH, {_RIVAL: choice.rung.name, _RIVAL_US: round(own_us, 3)}, round(pytorch_us, 3))


def reason_for_pytorch(
    operation: Operation[Any], choice: Choice, target: DeviceOrCard, avoid: frozenset[str] = frozenset()
) -> str | None:
    """Return why a plan on a GPU leaves a problem to PyTorch; None if the choice should run.

    A measurement counts only against the rung that is chosen now. Without one, an operation may leave problems to
    PyTorch (`Operation.left_to_pytorch`). Otherwise only a last-resort rung yields to PyTorch, if PyTorch's estimate is
    lower or the rung has none, and if no other rung supports the problem. Rungs in `avoid` failed before.
    """
    if not is_gpu(target):
        return None
    for table in tables_for(target):
        found = table.find(_STEP + operation.name, choice.problem)
        if found is None:
            continue
        if found.entry.rung == PYTORCH and found.entry.config.get(_RIVAL) == choice.rung.name:
            return f"{found.why}; {choice.rung.name} took {found.entry.config[_RIVAL_US]:.3g} µs"
        if found.entry.rung == choice.rung.name:
            return None
    return operation.left_to_pytorch(choice.problem) or _by_estimate(operation, choice, avoid)


def _by_estimate(operation: Operation[Any], choice: Choice, avoid: frozenset[str]) -> str | None:
    if not choice.rung.last_resort or _has_another(operation, choice, avoid):
        return None
    p = choice.problem
    alone = f"{choice.rung.name} is the only rung of {operation.name} for {p.name} in {p.dtype}"
    own = choice.rung.estimate(choice.problem, choice.config)
    if own is None:
        return f"{alone}, and it has no estimate"
    theirs = operation.pytorch_us(choice.problem, choice.rung.card)
    if own <= theirs:
        return None
    return f"{alone}, and PyTorch should be faster (about {theirs:.3g} µs, not {own:.3g})"


def _has_another(operation: Operation[Any], choice: Choice, avoid: frozenset[str]) -> bool:
    """Return True if another rung supports the problem too: small problems take about as long on all of them."""
    besides = avoid | {f"{operation.name}/{choice.rung.name}"}
    try:
        estimated(operation, choice.problem, choice.rung.card, besides)
    except UnsupportedError:
        return False
    return True
