"""The choice of a rung and a config: asked for by name, measured, or by estimates that need no measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from escalade.device.recipe import KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card, Place, is_gpu
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem, traffic
from escalade.ops.base.rung import Config, Rung
from escalade.ops.choose.table import Table, tables_for


@dataclass(frozen=True)
class Choice:
    rung: Rung[Any]
    config: Config
    problem: Any
    """What the rung is to do: the problem, perhaps in another layout."""
    why: str
    us: float | None = None
    """The microseconds by estimate, conversions included; None where nobody has estimated."""


def choose(
    operation: Operation[Any],
    problem: Problem,
    place: Place,
    rung: str | None = None,
    avoid: frozenset[str] = frozenset(),
    decided: Table | None = None,
) -> Choice:
    """The rung of that name, or the one that was `decided` before or measured to be fastest, or the one that should be.

    `avoid` holds rungs that have failed here before, as `operation/rung`. Nothing is compiled or timed. What writes
    memory that a program has for all its callers is taken only if its rung is named and has nothing else.
    """
    card = Card.of(place)
    if rung is not None:
        asked = operation.ladder.rung(rung).on(card)
        refusal = asked.refusal(problem)
        if refusal:
            raise UnsupportedError(f"rung {rung} of {operation.name} cannot do {problem.name}: {refusal}")
        config = next(configs_for_any_caller(asked, problem), asked.configs(problem)[0])
        return Choice(asked, config, problem, "asked for by name")
    tables = (*([decided] if decided else ()), *(tables_for(place) if is_gpu(place) else ()))
    return _from_tables(operation, problem, card, avoid, tables) or estimated(operation, problem, card, avoid)


def estimated(
    operation: Operation[Any], problem: Problem, card: Card, avoid: frozenset[str] = frozenset()
) -> Choice:
    """What should be fastest on a card, by a rule that needs no measurement.

    Preferred rungs that can do the problem compete by their estimates, in their order up to the first that has none:
    that one is taken if it comes first, and is a last resort otherwise.
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
        config, us = _best(rung, form)
        if config is None:
            refusals.append(f"{name}: it keeps weights in memory that all its callers share.")
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
        raise UnsupportedError(f"no rung of {operation.name} can do {problem.name}. " + " ".join(refusals))
    return best


def configs_for_any_caller(rung: Rung[Any], problem: Problem) -> Iterator[Config]:
    """Configs of a rung that fit its card and write nothing but the call's own memory."""
    return (config for config in rung.configs(problem) if _for_any_caller(rung, rung.recipe(problem, config)))


def _for_any_caller(rung: Rung[Any], recipe: Recipe) -> bool:
    launches = (step for step in recipe.steps if isinstance(step, KernelCall))
    return not recipe.shared_state and all(one.shared_bytes <= rung.card.shared_bytes for one in launches)


def _form(operation: Operation[Any], rung: Rung[Any], problem: Problem) -> tuple[Any, str]:
    """The first form of the problem that the rung takes; or None, and why it takes none."""
    refusals = []
    for form in operation.forms(rung.name, problem):
        refusal = rung.refusal(form)
        if refusal is None:
            return form, ""
        refusals.append(refusal)
    return None, " ".join(refusals)


def _best(rung: Rung[Any], problem: Problem) -> tuple[Config | None, float | None]:
    """The config with the least estimate among those that fit the rung's card, the first of equals; the default and
    None if the rung has no estimates. No config at all if the rung has none that any caller may be given."""
    figures = [(rung.estimate(problem, config), config) for config in rung.configs(problem)]
    ranked = sorted(((us, config) for us, config in figures if us is not None), key=lambda figure: figure[0])
    for us, config in ranked:
        if _for_any_caller(rung, rung.recipe(problem, config)):
            return config, us
    return next(configs_for_any_caller(rung, problem), None), None


def _from_tables(
    operation: Operation[Any], problem: Problem, card: Card, avoid: frozenset[str], tables: Sequence[Table]
) -> Choice | None:
    """What was measured to be fastest for this problem, or for one of another batch size not far away."""
    for table in tables:
        found = table.find(operation.name, problem)
        if found is None or f"{operation.name}/{found.entry.rung}" in avoid:
            continue
        try:
            rung = operation.ladder.rung(found.entry.rung).on(card)
        except UnsupportedError:  # a table of another version
            continue
        if rung.refusal(problem) is not None:
            continue
        for config in rung.configs(problem):
            if config.as_dict() != found.entry.config:
                continue
            if _for_any_caller(rung, rung.recipe(problem, config)):
                return Choice(rung, config, problem, found.why)
    return None
