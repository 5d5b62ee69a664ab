"""Time a plan against PyTorch on the GPU, per step and as a whole, to find the steps where PyTorch is faster."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from escalade.device.timing import ReplaySampler, Subject, interleave, keep_busy, time_interleaved
from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.evaluate import compute, own_arithmetic
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.kernels import PlanKernels
from escalade.engine.plan.plan import PlanStep
from escalade.engine.plan.program import PlanProgram
from escalade.engine.step_table import Columns, StepTable, microseconds
from escalade.errors import EscaladeError
from escalade.files import FileError
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.choose.pytorch import PYTORCH, is_clearly_faster, verdict, verdict_key
from escalade.ops.choose.table import add, user_path

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


logger = logging.getLogger("escalade")

_MAX_NAMED = 5
"""Slower steps that the summary names."""


@dataclass(frozen=True)
class ComparedStep:
    """One step of a plan. Times are in microseconds; None if PyTorch's operators do not take the plan's values."""

    number: int
    name: str
    source: str
    """The module of the model that it comes from."""
    operation: str
    rung: str
    """The rung of Escalade's ladder, or `PyTorch`."""
    plan_us: float
    pytorch_us: float | None
    """PyTorch's operators for the same node, with the same dtype and values."""
    lost_us: float
    """The time by which PyTorch is faster."""


@dataclass(frozen=True)
class Comparison(StepTable):
    """A plan compared with PyTorch: `str()` returns a table, `to_json()` everything. All times are of CUDA graphs."""

    dtype: str
    batch: int
    steps: tuple[ComparedStep, ...]
    plan_us: float
    """The whole plan as one CUDA graph."""
    pytorch_us: float
    """The whole model in PyTorch, as one CUDA graph in the same dtype and in channels_last."""
    title: str = "plan"

    @property
    def speedup(self) -> float:
        return self.pytorch_us / self.plan_us

    @property
    def losing(self) -> tuple[ComparedStep, ...]:
        """Steps where PyTorch is faster, largest loss first."""
        return tuple(sorted((s for s in self.steps if s.lost_us), key=lambda step: -step.lost_us))

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "speedup": self.speedup}, indent=2)

    @property
    def _heading(self) -> str:
        return f"{self.title}: {self.dtype}, batch {self.batch}"

    def _columns(self, width: int | None) -> tuple[Columns, Columns]:
        return _TEXTS, _FIGURES

    def _bars(self) -> tuple[str, list[float]]:
        return "µs", [step.plan_us for step in self.steps]

    def summary(self) -> list[str]:
        both = [step for step in self.steps if step.pytorch_us is not None]
        own, theirs = sum(step.plan_us for step in both), sum(step.pytorch_us or 0.0 for step in both)
        lines = [
            f"Sum of the steps that both run, each timed alone with warm caches: {own:.1f} µs, in PyTorch {theirs:.1f} "
            "µs.",
            f"The whole plan takes {self.plan_us:.1f} µs, the whole model as PyTorch's own CUDA graph "
            f"{self.pytorch_us:.1f} µs: {self.speedup:.2f} times as fast.",
        ]
        if not self.losing:
            return [*lines, "No step takes longer than in PyTorch."]
        named = ", ".join(
            f"{step.operation} {step.source or step.name} ({step.lost_us:.1f} µs)"
            for step in self.losing[:_MAX_NAMED]
        )
        lost = sum(step.lost_us for step in self.losing)
        lines.append(
            f"{len(self.losing)} of the steps take longer than in PyTorch, {lost:.1f} µs in total; the slowest: "
            f"{named}. compile(..., measured=True) leaves such steps to PyTorch; `escalade tune` searches for faster "
            "kernels."
        )
        return lines


_TEXTS: Columns = {
    "in the model": lambda step: step.source,
    "operation": lambda step: step.operation,
    "rung": lambda step: step.rung,
}
_FIGURES: Columns = {
    "plan µs": lambda step: microseconds(step.plan_us),
    "PyTorch µs": lambda step: microseconds(step.pytorch_us),
    "lost µs": lambda step: microseconds(step.lost_us or None),
}


def compare(program: KernelProgram, captured: Graph, x: Sequence[torch.Tensor], batch: int) -> Comparison:
    """Time a program's plan and the `captured` model in PyTorch."""
    device = x[0].device
    numbers = {step.node.name: number for number, step in enumerate(program.plan.steps, start=1)}
    timed = time_steps(program, x, device, _comparable)
    call = whole_in_pytorch(captured.at(batch), program.plan.dtype, x)
    whole = time_interleaved([Subject(PYTORCH, [call])], device)
    return Comparison(
        program.plan.dtype,
        batch,
        tuple(_compared(numbers[each.step.node.name], each) for each in timed),
        time_plan(program, x),
        whole[PYTORCH].median_us,
    )


def _comparable(step: PlanStep) -> bool:
    # PyTorch has no quantized convolutions on GPUs.
    return step.lowered is not None and step.lowered.problem.dtype not in QUANTIZED


def _compared(number: int, timed: StepTime) -> ComparedStep:
    step = timed.step
    return ComparedStep(
        number,
        step.node.name,
        step.node.source,
        operator_of(step.node).title(step.node),
        step.choice.rung.name if step.choice else PYTORCH,
        timed.plan_us,
        timed.pytorch_us,
        timed.lost_us,
    )


def whole_in_pytorch(graph: Graph, dtype: str, x: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
    """Return a callable that runs the model as a PyTorch user would: its own operators, in the dtype and channels_last.

    Values are released after their last reader.
    """
    storage, device = STORAGE[dtype], x[0].device
    shared = ConstantCache(dtype, device)
    steps = [(node, {role: PlanStep(node).constant(role) for role in node.inputs}) for node in graph]
    constants = {
        (node.name, role): shared.get(entry, graph)
        for node, entries in steps
        for role, entry in entries.items()
        if entry.name in graph.constants
    }
    inputs = {entry.name: _to_storage(tensor, storage) for entry, tensor in zip(graph.inputs, x, strict=True)}
    last = {name: number for number, (node, _) in enumerate(steps) for name in node.inputs.values()}
    last |= dict.fromkeys(graph.outputs, len(steps))

    def call() -> list[torch.Tensor]:
        values = dict(inputs)
        with own_arithmetic(dtype, device):
            for number, (node, _) in enumerate(steps):
                read = {
                    role: values[name] if name in values else constants[node.name, role]
                    for role, name in node.inputs.items()
                }
                values[node.name] = compute(node, read, device)
                for name in {*node.inputs.values(), node.name}:
                    if last.get(name, number) <= number:
                        values.pop(name, None)
        return [values[name] if name in values else graph.constants[name] for name in graph.outputs]

    return call


def _to_storage(tensor: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    order = torch.channels_last if tensor.dim() == 4 else torch.contiguous_format
    return tensor.to(storage).contiguous(memory_format=order)


def faster_in_pytorch(kernels: PlanKernels, x: Sequence[torch.Tensor]) -> dict[str, str]:
    """Measure which steps PyTorch runs faster, and return them by name with the reason.

    The winner is saved in the user's table for the card. Steps with the same problem are measured once.
    """
    device = x[0].device
    first: dict[str, str] = {}
    for step in kernels.plan.steps:
        if _comparable(step):
            first.setdefault(_key(step), step.node.name)
    timed = time_steps(kernels, x, device, lambda step: step.node.name in first.values())
    found = {_key(each.step): each for each in timed if each.step.lowered and each.pytorch_us is not None}
    reasons = {}
    for key, each in found.items():
        assert each.pytorch_us is not None
        if is_clearly_faster(each.pytorch_us, each.plan_us):
            reasons[key] = f"faster when measured: {each.pytorch_us:.3g} µs, not {each.plan_us:.3g}"
        _remember(key, each, torch.cuda.get_device_name(device))
    return {
        step.node.name: reasons[_key(step)]
        for step in kernels.plan.steps
        if _comparable(step) and _key(step) in reasons
    }


def _key(step: PlanStep) -> str:
    assert step.lowered is not None
    return verdict_key(step.lowered.operation, step.lowered.problem)


def _remember(key: str, timed: StepTime, gpu: str) -> None:
    assert timed.step.choice is not None and timed.pytorch_us is not None
    try:
        add(user_path(gpu), key, verdict(timed.step.choice, timed.plan_us, timed.pytorch_us))
    except FileError as error:  # compiling works without the table
        logger.warning("the measurement could not be saved: %s", error)
