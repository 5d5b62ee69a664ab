"""The steps of a plan on the GPU, each timed by itself."""

from __future__ import annotations

import torch

from escalade.engine.plan.program import KernelProgram
from escalade.measure.timing import ReplaySampler, Subject, interleave, keep_busy, time_interleaved

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
