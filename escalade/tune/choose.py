"""The choice of a rung and a config: asked for by name, measured, or by a rule that needs no measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from escalade import ops
from escalade.device.cuda import architecture_of
from escalade.errors import UnsupportedError
from escalade.ops.ladder import Config, Problem, Rung
from escalade.tune.table import tables_for


@dataclass(frozen=True)
class Choice:
    rung: Rung[Any]
    config: Config
    problem: Any
    """What the rung is to do: the problem, perhaps in another layout."""
    why: str


def choose(
    operation: str,
    problem: Problem,
    device: torch.device,
    rung: str | None = None,
    avoid: frozenset[str] = frozenset(),
) -> Choice:
    """The rung of that name, or the first of the preferred ones that can do the problem on the device.

    `avoid` holds rungs that have failed here before, as `operation/rung`.
    """
    asked_of = ops.operation(operation)
    ladder = asked_of.ladder
    here = architecture_of(device)
    if rung is not None:
        asked = ladder.rung(rung)
        refusal = asked.refusal(problem, here)
        if refusal:
            raise UnsupportedError(f"rung {rung} of {operation} cannot do {problem.name}: {refusal}")
        return Choice(asked, asked.configs(problem)[0], problem, "asked for by name")
    measured = _from_tables(operation, problem, device, avoid)
    if measured is not None:
        return measured
    refusals = []
    for name in asked_of.preferred(problem):
        if f"{operation}/{name}" in avoid:
            refusals.append(f"{name}: it failed before.")
            continue
        candidate = ladder.rung(name)
        for form in asked_of.forms(name, problem):
            refusal = candidate.refusal(form, here)
            if refusal is None:
                why = "first of the preferred rungs that supports it"
                if form != problem:
                    why += f", in layout {form.layout}"
                return Choice(candidate, candidate.configs(form)[0], form, why)
            refusals.append(f"{name}: {refusal}")
    raise UnsupportedError(f"no rung of {operation} can do {problem.name}. " + " ".join(refusals))


def _from_tables(
    operation: str, problem: Problem, device: torch.device, avoid: frozenset[str]
) -> Choice | None:
    """What was measured to be fastest for this problem, or for one of another batch size not far away."""
    if device.type != "cuda":
        return None
    ladder = ops.operation(operation).ladder
    for table in tables_for(device):
        found = table.find(operation, problem)
        if found is None or f"{operation}/{found.entry.rung}" in avoid:
            continue
        try:
            rung = ladder.rung(found.entry.rung)
        except UnsupportedError:  # a table of another version
            continue
        if rung.refusal(problem, architecture_of(device)) is not None:
            continue
        for config in rung.configs(problem):
            if config.as_dict() == found.entry.config:
                return Choice(rung, config, problem, found.why)
    return None
