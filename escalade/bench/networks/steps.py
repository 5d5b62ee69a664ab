"""Records of the steps of a plan on the GPU, each timed by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from escalade.engine.explain import ExplainedStep, Explanation
from escalade.measure.records import Record

SUFFIX = "_steps"
"""How the workload of these records ends, behind the network's name."""


def step_records(explanation: Explanation) -> list[Record]:
    """A record for the whole plan, and one for each step with all that the plan says of it as its config."""
    plan = {"steps": len(explanation.steps), "launches": explanation.launches, "inputs": explanation.inputs}
    whole = _record(explanation, "plan", plan, explanation.time_us, explanation.floor_us)
    return [whole, *(_step_record(explanation, step) for step in explanation.steps)]


def _step_record(explanation: Explanation, step: ExplainedStep) -> Record:
    said = {name: value for name, value in asdict(step).items() if name not in ("time_us", "floor_us")}
    return _record(explanation, f"step{step.number:02}", said, step.time_us, step.floor_us)


def _record(
    explanation: Explanation, what: str, said: Mapping[str, Any], time: float | None, floor: float | None
) -> Record:
    return Record(
        workload=explanation.title + SUFFIX,
        problem=f"b{explanation.batch}_{what}",
        dtype=explanation.dtype,
        layout="",
        batch=explanation.batch,
        system="escalade",
        rung=str(said.get("rung", "")),
        config=dict(said),
        timing="graph" if time is not None else "",
        median_us=time,
        floor_us=floor,
        conditions=dict(explanation.conditions),
    )
