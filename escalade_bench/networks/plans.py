"""Plans of networks: their digests for a card without running anything, what PyTorch computes, and timed steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from escalade.device.nvml import ConditionMonitor
from escalade.engine.comparison import time_plan, time_steps
from escalade.engine.engine import Engine
from escalade.engine.explain import Explanation, Floor, explain_plan
from escalade.engine.graph.forms import STORAGE
from escalade.engine.passes import FusionLevel
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.errors import UnsupportedError
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks.workload import Setting
from escalade_bench.peers.network import FORMATS

STEPS = "_steps"
"""Suffix of the workload of the records of timed steps, after the network's name."""
_IMAGE = 3
"""Dimensions of an image: channels, height and width."""


def of_batches(setting: Setting, batches: Iterable[int], dtype: str) -> Made:
    """Return the digests of today's plans of a network's batches."""
    return _of_engine(setting, setting.engine(dtype), batches)


def _of_engine(setting: Setting, engine: Engine, batches: Iterable[int]) -> Made:
    item = tuple(setting.workload.inputs(1, setting.size).shape[1:])
    layout, device = setting.workload.layout, setting.device
    inputs = (empty(batch, item, engine.dtype, layout, device) for batch in batches)
    return Made.together(Made.of_plan(engine.plan_for(setting.session.card, x)) for x in inputs)


def of_levels(setting: Setting, batches: Iterable[int], dtype: str) -> Made:
    """Return the digests of the plans of one image at every level of fusion."""
    engines = [Engine(setting.graph, dtype, setting.device, plans=1, fusion=level) for level in FusionLevel]
    return Made.together(_of_engine(setting, engine, (1,)) for engine in engines)


def of_stream(setting: Setting, batches: Iterable[int], dtype: str) -> Made:
    """Return the digests of the plans of batches of bytes, which the network normalizes itself."""
    engine, stream, item = setting.stream_engine(dtype)
    images = (torch.empty(n, *item, dtype=torch.uint8, device=setting.device) for n in stream.batches)
    return Made.together(Made.of_plan(engine.plan_for(setting.session.card, each)) for each in images)


def empty(batch: int, item: tuple[int, ...], dtype: str, layout: str, device: torch.device) -> torch.Tensor:
    """Return an input like those that are timed. Its contents are undefined: no plan depends on them."""
    format = FORMATS[layout] if len(item) == _IMAGE else torch.contiguous_format
    return torch.empty(batch, *item, dtype=STORAGE[dtype], device=device, memory_format=format)


def planned(engine: Engine, *inputs: torch.Tensor, floor: Floor | None = None) -> Explanation:
    """Return the plan for inputs like these: of an engine on the CPU, the one that an H200 would run."""
    device = "cuda" if engine.device.type == "cuda" else "twin"
    return explain_plan(engine.plan(*inputs), floor, device=device)


def by_operator(explanation: Explanation) -> dict[str, int]:
    """Return the number of PyTorch's steps per operator: the most frequent first, then by name.

    `aten::mul.Tensor` and `aten::mul_.Tensor` are mul; Escalade's operations keep their names.
    """
    found = (step.operation.removeprefix("aten::") for step in explanation.fallbacks)
    counts = Counter(name.partition(".")[0].removesuffix("_") for name in found)
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def spelled(counts: Mapping[str, int]) -> str:
    """Return `mul 2, silu 1`; empty without any."""
    return ", ".join(f"{operator} {count}" for operator, count in counts.items())


def summary(plan: Explanation) -> dict[str, Any]:
    """Return the figures of a plan for a record's config."""
    counts = {"steps": len(plan.steps), "launches": plan.launches}
    return {**counts, "pytorch": by_operator(plan), "memory": plan.memory}


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


def step_records(plan: Explanation) -> list[Record]:
    """Return a record of the whole plan, and one per step with the plan's description of it as its config."""

    def record(what: str, said: dict[str, Any], time: float | None, floor: float | None) -> Record:
        return Record(
            plan.title + STEPS, f"b{plan.batch}_{what}", plan.dtype, "", plan.batch, "escalade",
            str(said.get("rung", "")), said, "graph" if time is not None else "",
            median_us=time, floor_us=floor, conditions=dict(plan.conditions),
        )  # fmt: skip

    counts = {"steps": len(plan.steps), "launches": plan.launches, "inputs": plan.inputs}
    arena = [asdict(block) for block in plan.arena]
    whole = {**counts, "memory": plan.memory, "arena": arena}
    found = [record("plan", whole, plan.time_us, plan.floor_us)]
    for step in plan.steps:
        said = {name: value for name, value in asdict(step).items() if name not in ("time_us", "floor_us")}
        found.append(record(f"step{step.number:02}", said, step.time_us, step.floor_us))
    return found
