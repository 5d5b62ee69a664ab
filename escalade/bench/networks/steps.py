"""The steps of a plan on the GPU, each timed by itself, and the records of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from escalade.engine.explain import ExplainedStep, Explanation
from escalade.engine.plan.program import KernelProgram
from escalade.measure.records import Record
from escalade.measure.timing import ReplaySampler, Subject, interleave, keep_busy, time_interleaved

SUFFIX = "_steps"
"""How the workload of these records ends, behind the network's name."""
_SECONDS = 0.02


def time_steps(
    program: KernelProgram, x: tuple[torch.Tensor, ...], device: torch.device
) -> tuple[dict[str, float], float]:
    """Microseconds of each step by its name, over warm caches, and of the whole plan."""

    def fill() -> None:
        for room, tensor in zip(program.inputs, x, strict=True):
            room.copy_(tensor)

    steps = [step for step in program.plan.steps if not step.is_alias]
    times = {}
    fill()
    for step, call in zip(steps, program.calls, strict=True):
        # In order, so that each step finds the values that it is to work on.
        timed = time_interleaved([Subject(step.node.name, [call])], device, seconds_each=_SECONDS)
        times[step.node.name] = timed[step.node.name].median_us
    sampler = {"plan": ReplaySampler(fill, program.run)}
    whole = interleave(sampler, seconds_each=0.2, min_rounds=10, max_rounds=500, before_round=keep_busy)
    return times, whole["plan"].median_us


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
    )
