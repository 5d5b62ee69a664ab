"""Choice of rung and config: by name, by a table of measurements, or by estimates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from escalade.device.recipe import KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card, DeviceOrCard, is_gpu
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem, traffic
from escalade.ops.base.rung import Config, Rung
from escalade.ops.choose.table import Table, tables_for

REMEMBERED = 4096
"""Estimated choices to keep: a network has tens to hundreds, for each batch size and card."""


@dataclass(frozen=True)
class Choice:
    rung: Rung[Any]
    config: Config
    problem: Any
    """The problem for the rung, perhaps in another layout."""
    why: str
    us: float | None = None
    """Estimated microseconds including conversions; None without an estimate."""


def choose(
    operation: Operation[Any],
    problem: Problem,
    target: DeviceOrCard,
    rung: str | None = None,
    avoid: frozenset[str] = frozenset(),
    decided: Table | None = None,
) -> Choice:
    """Return the named rung, else the one `decided` before or measured fastest, else the least estimate.

    `avoid` holds rungs that failed before, as `operation/rung`. Nothing is compiled or timed. A config that writes
    memory shared by all callers of a program is chosen only if its rung is named and has no other.
    """
    card = Card.of(target)
    if rung is not None:
        named = operation.ladder.rung(rung).on(card)
        refusal = named.refusal(problem)
        if refusal:
            raise UnsupportedError(
                f"rung {rung} of {operation.name} cannot compute {problem.name}: {refusal}"
            )
        config = next(configs_for_any_caller(named, problem), named.configs(problem)[0])
        return Choice(named, config, problem, "asked for by name")
    tables = (*([decided] if decided else ()), *(tables_for(target) if is_gpu(target) else ()))
    return _from_tables(operation, problem, card, avoid, tables) or estimated(operation, problem, card, avoid)


@lru_cache(REMEMBERED)
def estimated(
    operation: Operation[Any], problem: Problem, card: Card, avoid: frozenset[str] = frozenset()
) -> Choice:
    """Return the expected fastest choice on a card, without measurements; it depends on nothing but the arguments.

    Preferred rungs compete by estimate, in order, up to the first without one. That rung is taken only if no earlier
    one supports the problem.
    """
    best: Choice | None = None
    least = float("inf")
    refusals = []
    for name in dict.fromkeys(operation.preferred(problem)):
        if f"{operation.name}/{name}" in avoid:
            refusals.append(f"{name}: it failed before.")
            continue
        rung = operation.ladder.rung(name).on(card)
        form, refusal = _form(operation, rung, problem)
        if form is None:
            refusals.append(f"{name}: {refusal}")
            continue
        layout = f", in layout {form.layout}" if form != problem else ""
        conversion = card.microseconds(0, 2 * traffic(problem), launches=2) if layout else 0.0
        if rung.least(form) + conversion >= least:
            continue
        config, us = _best(rung, form, least, conversion)
        if config is None:
            refusals.append(f"{name}: its weights are in memory that all callers share.")
            continue
        if us is None:
            if best is None:
                why = "first of the preferred rungs that supports it"
                best = Choice(rung, config, form, why + layout)
            break
        if us + conversion < least:
            least = us + conversion
            best = Choice(rung, config, form, f"least by estimate ({least:.3g} µs)" + layout, least)
    if best is None:
        raise UnsupportedError(
            f"no rung of {operation.name} can compute {problem.name}. " + " ".join(refusals)
        )
    return best


def configs_for_any_caller(rung: Rung[Any], problem: Problem) -> Iterator[Config]:
    """Yield configs that fit the card and write no memory shared between callers."""
    return (config for config in rung.configs(problem) if _for_any_caller(rung, rung.recipe(problem, config)))


def _for_any_caller(rung: Rung[Any], recipe: Recipe) -> bool:
    launches = (step for step in recipe.steps if isinstance(step, KernelCall))
    return not recipe.shared_state and all(one.shared_bytes <= rung.card.shared_bytes for one in launches)


def _form(operation: Operation[Any], rung: Rung[Any], problem: Problem) -> tuple[Any, str]:
    """Return the first layout of the problem that the rung supports; or None, and why there is none."""
    refusals = []
    for form in operation.forms(rung.name, problem):
        refusal = rung.refusal(form)
        if refusal is None:
            return form, ""
        refusals.append(refusal)
    return None, " ".join(refusals)


def _best(
    rung: Rung[Any], problem: Problem, limit: float, conversion: float
) -> tuple[Config | None, float | None]:
    """Return the config with the least estimate that fits the card, and the estimate.

    Without estimates: the default config and None. (None, None) if every config shares memory between callers. A config
    that takes `limit` or longer with its `conversion` is returned unchecked, since it is not chosen.
    """
    figures = [(rung.estimate(problem, config), config) for config in rung.configs(problem)]
    ranked = sorted(((us, config) for us, config in figures if us is not None), key=lambda figure: figure[0])
    for us, config in ranked:
        if us + conversion >= limit or _for_any_caller(rung, rung.recipe(problem, config)):
            return config, us
    return next(configs_for_any_caller(rung, problem), None), None


def _from_tables(
    operation: Operation[Any], problem: Problem, card: Card, avoid: frozenset[str], tables: Sequence[Table]
) -> Choice | None:
    """Return the measured choice for this problem, or for the nearest batch size."""
    for table in tables:
        found = table.find(operation.name, problem) or table.find(operation.name, operation.tuned_as(problem))
        if found is None or f"{operation.name}/{found.entry.rung}" in avoid:
            continue
        try:
            rung = operation.ladder.rung(found.entry.rung).on(card)
        except UnsupportedError:  # written by another version
            continue
        if rung.refusal(problem) is not None:
            continue
        for config in rung.configs(problem):
            if config.as_dict() != found.entry.config:
                continue
            if _for_any_caller(rung, rung.recipe(problem, config)):
                return Choice(rung, config, problem, found.why)
    return None
