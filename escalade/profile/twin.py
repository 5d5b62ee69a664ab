"""Without a GPU: the kernels of each part on the twin, which counts what they ask of memory and of each unit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from escalade.device.packing import Prepared
from escalade.device.recipe import Recipe
from escalade.device.run import TwinOptions
from escalade.device.twin import Counts
from escalade.engine.explain import explain_plan
from escalade.engine.plan.plan import Plan
from escalade.measure.records import Record
from escalade.measure.verification import outputs_of
from escalade.ops.base.operation import Operation
from escalade.ops.choose.choice import Choice
from escalade.profile.parts import Part
from escalade.profile.targets import part_of_rung, part_of_step
from escalade.profile.words import said_of_counts

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """A part, and what the twin runs for it: a recipe over random inputs of its problem."""

    part: Part
    operation: Operation[Any]
    problem: Any
    recipe: Recipe
    weights_stay: bool

    def count(self, seed: int) -> Counts:
        """Runs it once. Kernels do the same whatever numbers they are given."""
        options = TwinOptions(counts=True)
        prepared = Prepared(
            self.recipe, _CPU, self.part.name, weights_stay=self.weights_stay, options=options
        )
        inputs = self.operation.inputs(self.problem, _CPU, seed)
        ready = prepared.bind({**inputs, **outputs_of(self.operation, self.problem, _CPU)})
        ready()
        return ready.counts()


@dataclass(frozen=True)
class Counted:
    """A part and what the twin counted of it."""

    part: Part
    counts: dict[str, int]
    words: str


def counted(part: Part, counts: Counts) -> Counted:
    return Counted(part, counts.figures(), said_of_counts(counts))


def of_rung(operation: Operation[Any], choice: Choice) -> list[Work]:
    """The one call of a rung."""
    recipe = choice.rung.recipe(choice.problem, choice.config)
    stay = operation.weights_stay
    part = part_of_rung(operation, choice.problem, choice.rung, recipe.after_packing if stay else recipe)
    return [Work(part, operation, choice.problem, recipe, stay)]


def of_plan(plan: Plan) -> list[Work]:
    """The steps of a plan that Escalade's kernels do, each by itself."""
    return list(_of_steps(plan))


def _of_steps(plan: Plan) -> Iterator[Work]:
    for step, said in zip(plan.steps, explain_plan(plan).steps, strict=True):
        if step.lowered is not None and step.recipe is not None and step.runs:
            ready = step.has_weights_ready(plan.graph.constants)
            yield Work(
                part_of_step(plan, step, said),
                step.lowered.operation,
                step.lowered.problem,
                step.recipe,
                ready,
            )


def records(title: str, parts: Sequence[Counted]) -> list[Record]:
    """The counts as the tables of counts take them, a row a part."""
    return [
        Record(
            "profile_counts", title, each.part.dtype, "", 0, "escalade", each.part.name, timing="twin",
            counts=each.counts,
        )
        for each in parts
    ]  # fmt: skip


def to_json(title: str, parts: Sequence[Counted]) -> str:
    return json.dumps({"title": title, "parts": [asdict(each) for each in parts]}, indent=2)
