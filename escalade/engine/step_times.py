"""Time a plan on the GPU: each step alone with warm caches, and the whole plan as one CUDA graph."""

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
    """Time of a step in the plan, and in PyTorch (None if that was not timed or PyTorch cannot compute it)."""

    step: PlanStep
    plan_us: float
    pytorch_us: float | None = None

    @property
    def lost_us(self) -> float:
        """The time by which PyTorch is faster, or 0."""
        return 0.0 if self.pytorch_us is None else max(0.0, self.plan_us - self.pytorch_us)


def copy_inputs(program: PlanProgram | PlanKernels, x: Sequence[torch.Tensor]) -> None:
    """Copy inputs to the program's own input buffers."""
    for buffer, tensor in zip(program.inputs, x, strict=True):
        buffer.copy_(tensor)


def time_steps(
    kernels: PlanKernels,
    x: Sequence[torch.Tensor],
    device: torch.device,
    against_pytorch: Callable[[PlanStep], bool] = lambda step: False,
) -> list[StepTime]:
    """Time all steps that run, in order, so that each finds valid inputs.

    Steps selected by `against_pytorch` are interleaved with PyTorch's operators for the same node, both as CUDA graphs.
    """
    kernels.bind_own_memory()
    copy_inputs(kernels, x)
    return [_timed(kernels, step, call, device, against_pytorch(step)) for step, call in kernels.iter_steps()]


def _timed(
    kernels: PlanKernels,
    step: PlanStep,
    call: Callable[[], None],
    device: torch.device,
    against_pytorch: bool,
) -> StepTime:
    subjects = [Subject(_PLAN, [call])]
    if against_pytorch and not step.in_pytorch:
        subjects += _pytorch_subject(kernels, step)
    times = time_interleaved(subjects, device, seconds_each=_SECONDS)
    own = times[_PLAN].median_us
    if step.in_pytorch:
        return StepTime(step, own, own)
    return StepTime(step, own, times[PYTORCH].median_us if PYTORCH in times else None)


def _pytorch_subject(kernels: PlanKernels, step: PlanStep) -> list[Subject]:
    """Return PyTorch's operators for a step as a timing subject, if they accept the step's values."""
    compute = kernels.pytorch_call(step)
    try:
        compute()
    except (EscaladeError, torch.OutOfMemoryError):
        return []
    return [Subject(PYTORCH, [compute])]


def time_plan(program: PlanProgram, x: Sequence[torch.Tensor]) -> float:
    """Return the time in microseconds of the whole plan, without copying its inputs."""
    sampler = {_PLAN: ReplaySampler(lambda: copy_inputs(program, x), program.run)}
    whole = interleave(
        sampler, seconds_each=_WHOLE_SECONDS, min_rounds=10, max_rounds=500, before_round=keep_busy
    )
    return whole[_PLAN].median_us
