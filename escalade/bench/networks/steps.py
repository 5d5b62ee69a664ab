"""Records of the steps of a plan on the GPU, each timed by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from escalade.device.nvml import Watch
from escalade.engine.engine import Engine
from escalade.engine.explain import ExplainedStep, Explanation, explain_plan
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.step_times import time_plan, time_steps
from escalade.errors import UnsupportedError
from escalade.measure.ceilings import Ceilings
from escalade.measure.records import Record

SUFFIX = "_steps"
"""How the workload of these records ends, behind the network's name."""


def timed_plan(engine: Engine, inputs: tuple[torch.Tensor, ...], ceilings: Ceilings) -> Explanation:
    """The plan with the floor of every step and its time, over memory of the plan's own."""
    program = engine.program(*inputs)
    if not isinstance(program, KernelProgram):
        raise UnsupportedError("--time measures kernels, and PyTorch computes this plan")
    explanation = explain_plan(program.plan, ceilings.floor_us)
    watch = Watch()
    times = {each.step.node.name: each.plan_us for each in time_steps(program, inputs, engine.device)}
    whole = time_plan(program, inputs)
    watch.look()
    return explanation.with_times(times, whole, watch.seen)


def step_records(explanation: Explanation) -> list[Record]:
    """A record for the whole plan, and one for each step with all that the plan says of it as its config."""
    plan = {
        "steps": len(explanation.steps),
        "launches": explanation.launches,
        "inputs": explanation.inputs,
        "memory": explanation.memory,
        "arena": [asdict(block) for block in explanation.arena],
    }
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
