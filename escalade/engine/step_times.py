"""How long the steps of a plan take on the GPU, each by itself over warm caches, and the whole plan in one go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from escalade.device.timing import ReplaySampler, Subject, interleave, keep_busy, time_interleaved
from escalade.engine.plan.kernels import PlanKernels
from escalade.engine.plan.program import PlanProgram
from escalade.engine.plan.step import PlanStep
from escalade.errors import EscaladeError
from escalade.ops.choose.pytorch import PYTORCH

_SECONDS = 0.02
_WHOLE_SECONDS = 0.2
_PLAN = "plan"


@dataclass(frozen=True)
class StepTime:
    """Microseconds of a step as the plan does it, and as PyTorch does; None where nobody asked, or PyTorch cannot."""

    step: PlanStep
    plan_us: float
    pytorch_us: float | None = None

    @property
    def lost_us(self) -> float:
        """The microseconds by which PyTorch is faster, if it is."""
        return 0.0 if self.pytorch_us is None else max(0.0, self.plan_us - self.pytorch_us)


def fill(program: PlanProgram | PlanKernels, x: Sequence[torch.Tensor]) -> None:
    """Brings inputs to where the plan reads them."""
    for room, tensor in zip(program.inputs, x, strict=True):
        room.copy_(tensor)


def time_steps(
    kernels: PlanKernels,
    x: Sequence[torch.Tensor],
    device: torch.device,
    beside_pytorch: Callable[[PlanStep], bool] = lambda step: False,
) -> list[StepTime]:
    """The times of all steps that do something, in order, so that each finds the values that it is to work on.

    Those that `beside_pytorch` names take turns with PyTorch's operators for the same node, in CUDA graphs both.
    """
    kernels.bind_own_memory()
    fill(kernels, x)
    return [_timed(kernels, step, call, device, beside_pytorch(step)) for step, call in kernels.iter_steps()]


def _timed(
    kernels: PlanKernels, step: PlanStep, call: Callable[[], None], device: torch.device, beside_pytorch: bool
) -> StepTime:
    subjects = [Subject(_PLAN, [call])]
    if beside_pytorch and not step.in_pytorch:
        subjects += _rival(kernels, step)
    times = time_interleaved(subjects, device, seconds_each=_SECONDS)
    own = times[_PLAN].median_us
    if step.in_pytorch:
        return StepTime(step, own, own)
    return StepTime(step, own, times[PYTORCH].median_us if PYTORCH in times else None)


def _rival(kernels: PlanKernels, step: PlanStep) -> list[Subject]:
    """PyTorch in a step's place, if it takes the step's values."""
    compute = kernels.pytorch_call(step)
    try:
        compute()
    except (EscaladeError, torch.OutOfMemoryError):
        return []
    return [Subject(PYTORCH, [compute])]


def time_plan(program: PlanProgram, x: Sequence[torch.Tensor]) -> float:
    """Microseconds of the whole plan, its inputs in place."""
    sampler = {_PLAN: ReplaySampler(lambda: fill(program, x), program.run)}
    whole = interleave(
        sampler, seconds_each=_WHOLE_SECONDS, min_rounds=10, max_rounds=500, before_round=keep_busy
    )
    return whole[_PLAN].median_us
