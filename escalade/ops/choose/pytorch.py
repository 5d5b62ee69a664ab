"""What a plan leaves to PyTorch although a rung can do it: what PyTorch was measured, or is sure, to do sooner."""

from __future__ import annotations

from typing import Any

from escalade.errors import UnsupportedError
from escalade.ops.base.card import Place, is_gpu
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice, estimated
from escalade.ops.choose.table import Entry, key_of, tables_for

PYTORCH = "PyTorch"
"""What stands for a rung where PyTorch does a step."""
_STEP = "step/"
"""In front of an operation's name in tables, where a plan's step was measured beside PyTorch's."""
_RIVAL, _RIVAL_US = "instead_of", "instead_of_us"
_NOISE = 1.03
"""Times of one and the same kernel differ by up to this factor from one look to the next."""


def verdict_key(operation: Operation[Any], problem: Problem) -> str:
    """The key of a table's entry that says who does a step of a plan sooner."""
    return key_of(_STEP + operation.name, problem)


def is_clearly_faster(pytorch_us: float, own_us: float) -> bool:
    """Whether PyTorch's time is less, by more than chance has a part in."""
    return own_us > _NOISE * pytorch_us


def verdict(choice: Choice, own_us: float, pytorch_us: float) -> Entry:
    """A table's entry for a step that was measured both ways."""
    if not is_clearly_faster(pytorch_us, own_us):
        return Entry(choice.rung.name, choice.config.as_dict(), round(own_us, 3))
    return Entry(PYTORCH, {_RIVAL: choice.rung.name, _RIVAL_US: round(own_us, 3)}, round(pytorch_us, 3))


def reason_for_pytorch(
    operation: Operation[Any], choice: Choice, place: Place, avoid: frozenset[str] = frozenset()
) -> str | None:
    """Why a plan on a GPU leaves a problem to PyTorch, in a sentence; None if the choice does it.

    A measurement counts as long as it was made beside the rung that is chosen now. Without one, only a rung that is a
    last resort gives way, by estimates or for want of one, and only if no other takes the problem; those in `avoid`
    have failed here.
    """
    if not is_gpu(place):
        return None
    for table in tables_for(place):
        found = table.find(_STEP + operation.name, choice.problem)
        if found is None:
            continue
        if found.entry.rung == PYTORCH and found.entry.config.get(_RIVAL) == choice.rung.name:
            return f"{found.why}; {choice.rung.name} took {found.entry.config[_RIVAL_US]:.3g} µs"
        if found.entry.rung == choice.rung.name:
            return None
    return _by_estimate(operation, choice, avoid)


def _by_estimate(operation: Operation[Any], choice: Choice, avoid: frozenset[str]) -> str | None:
    if not choice.rung.last_resort or _has_another(operation, choice, avoid):
        return None
    alone = f"no rung of {operation.name} but {choice.rung.name} takes {choice.problem.name} in {choice.problem.dtype}"
    own = choice.rung.estimate(choice.problem, choice.config)
    if own is None:
        return f"{alone}, and there is no estimate of what it takes"
    theirs = operation.pytorch_us(choice.problem, choice.rung.card)
    if own <= theirs:
        return None
    return f"{alone}, and PyTorch should be faster (about {theirs:.3g} µs, not {own:.3g})"


def _has_another(operation: Operation[Any], choice: Choice, avoid: frozenset[str]) -> bool:
    """Whether the last resort was only the quickest of several: small problems take all of them about as long."""
    besides = avoid | {f"{operation.name}/{choice.rung.name}"}
    try:
        estimated(operation, choice.problem, choice.rung.card, besides)
    except UnsupportedError:
        return False
    return True
