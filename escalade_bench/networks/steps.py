"""Records of the steps of a plan on the GPU, each timed alone."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from escalade.device.nvml import ConditionMonitor
from escalade.engine.comparison import time_plan, time_steps
from escalade.engine.engine import Engine
from escalade.engine.explain import Explanation, explain_plan
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.errors import UnsupportedError
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.records import Record

SUFFIX = "_steps"
"""Suffix of the workload of these records, after the network's name."""


def timed_plan(engine: Engine, inputs: tuple[torch.Tensor, ...], ceilings: Ceilings) -> Explanation:
    """Return the plan with the floor and the time of every step, measured in the plan's own memory."""
    program = engine.program(*inputs)
    if not isinstance(program, KernelProgram):
        raise UnsupportedError("--time measures kernels, and PyTorch computes this plan")
    explanation = explain_plan(program.plan, ceilings.floor_us)
    watch = ConditionMonitor()
    times = {each.step.node.name: each.plan_us for each in time_steps(program, inputs, engine.device)}
    whole = time_plan(program, inputs)
    watch.sample()
    return explanation.with_times(times, whole, watch.record)


def step_records(explanation: Explanation) -> list[Record]:
    """Return a record of the whole plan, and one per step with the plan's description of it as its config."""
    plan = {
        "steps": len(explanation.steps),
        "launches": explanation.launches,
        "inputs": explanation.inputs,
        "memory": explanation.memory,
        "arena": [asdict(block) for block in explanation.arena],
    }
    found = [_record(explanation, "plan", plan, explanation.time_us, explanation.floor_us)]
    for step in explanation.steps:
        said = {name: value for name, value in asdict(step).items() if name not in ("time_us", "floor_us")}
        found.append(_record(explanation, f"step{step.number:02}", said, step.time_us, step.floor_us))
    return found


def _record(
    plan: Explanation, what: str, said: dict[str, Any], time: float | None, floor: float | None
) -> Record:
    return Record(
        plan.title + SUFFIX, f"b{plan.batch}_{what}", plan.dtype, "", plan.batch, "escalade",
        str(said.get("rung", "")), said, "graph" if time is not None else "",
        median_us=time, floor_us=floor, conditions=dict(plan.conditions),
    )  # fmt: skip
