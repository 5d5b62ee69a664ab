"""Describe a plan: what computes each step and why, its lower bound on time, and the totals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from escalade.device.recipe import KernelCall
from escalade.engine.graph.forms import Form, unquantized
from escalade.engine.nodes import operator_of
from escalade.engine.plan.plan import Plan, PlanStep
from escalade.engine.step_table import Columns, StepTable, microseconds
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.choose.pytorch import PYTORCH
from escalade.terminal_text import counted

ON_THE_CPU = (
    "On the CPU PyTorch computes every step of this plan: no Escalade kernel runs, so no rung is chosen. "
    "device='twin' runs the kernels themselves on the CPU, device='cuda' on a GPU."
)
ON_THE_TWIN = "The twin chooses rungs as for an H200: estimates are for that card, not for this CPU."
_PRODUCTS = {"fp8": "FP8 (e4m3)", "int8": "INT8"}
_WIDE = 150
"""Terminal width in characters for all columns; a narrower one gets the first few, and JSON has them all."""
Floor = Callable[[int, int, str], float]
"""Returns a lower bound in microseconds for a number of operations and bytes in a dtype."""


@dataclass(frozen=True)
class ExplainedStep:
    """One step of a plan; None for what is unknown or was not measured. Field names are keys of the JSON."""

    number: int
    name: str
    source: str
    """The module of the model that it comes from."""
    operation: str
    problem: str
    dtype: str
    """The dtype of the operands for a kernel, of the result for PyTorch."""
    rung: str
    """The rung, `PyTorch`, or empty if nothing runs."""
    config: dict[str, Any]
    kernels: tuple[str, ...]
    """Source files of the launches, relative to `escalade/kernels`."""
    why: str
    launches: int
    flops: int
    """Operations of the direct algorithm; 0 for PyTorch steps, for which it is unknown."""
    bytes: int
    """Compulsory traffic: each input read once, each result written once."""
    offset: int | None
    """Offset of the result in the arena; None if it is stored elsewhere (constants, the caller's tensors)."""
    result_bytes: int
    floor_us: float | None = None
    time_us: float | None = None


@dataclass(frozen=True)
class ArenaBlock:
    """A buffer in the arena, live from step `first` through step `last`."""

    name: str
    offset: int
    bytes: int
    first: int
    """0 for inputs, which are live before the first step."""
    last: int
    """The number of steps plus one for outputs."""


@dataclass(frozen=True)
class Explanation(StepTable):
    """Description of a plan: `str()` returns a table as wide as the terminal, `to_json()` everything."""

    dtype: str
    batch: int
    inputs: tuple[str, ...]
    steps: tuple[ExplainedStep, ...]
    arena_bytes: int
    weight_bytes: int
    lasting_bytes: int
    outside_bytes: int
    """Bytes of inputs and results that kernels read and write in the caller's tensors."""
    notes: tuple[str, ...] = ()
    time_us: float | None = None
    """Time of the whole plan as one CUDA graph."""
    title: str = "plan"
    arena: tuple[ArenaBlock, ...] = ()
    device: str = "cuda"
    """`cuda` or `twin`, which run Escalade's kernels, or `cpu`, where PyTorch computes every step."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """State of the GPU during timing: see `escalade.device.nvml.GpuConditions`."""

    @property
    def in_kernels(self) -> bool:
        """True if Escalade's kernels run the plan."""
        return self.device != "cpu"

    @property
    def fallbacks(self) -> tuple[ExplainedStep, ...]:
        """Steps that PyTorch computes: all of them on the CPU."""
        return tuple(step for step in self.steps if step.rung == PYTORCH)

    @property
    def flops(self) -> int:
        return sum(step.flops for step in self.steps)

    @property
    def launches(self) -> int:
        return sum(step.launches for step in self.steps)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that a call uses, by purpose, without allocations of PyTorch steps."""
        return {
            "weights": self.weight_bytes,
            "packed": self.lasting_bytes,
            "arena": self.arena_bytes,
            "caller": self.outside_bytes,
        }

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def floor_us(self) -> float | None:
        """The sum of the steps' lower bounds."""
        floors = [step.floor_us for step in self.steps]
        return sum(f for f in floors if f is not None) if any(f is not None for f in floors) else None

    def with_times(
        self,
        times: Mapping[str, float],
        whole: float | None = None,
        conditions: Mapping[str, Any] = MappingProxyType({}),
    ) -> Explanation:
        """Return a copy with measured times of the steps and the whole plan, and the state of the GPU."""
        steps = tuple(replace(step, time_us=times.get(step.name)) for step in self.steps)
        return replace(self, steps=steps, time_us=whole, conditions=dict(conditions))

    def to_json(self) -> str:
        totals = {
            "steps": len(self.steps),
            "launches": self.launches,
            "flops": self.flops,
            "floor_us": self.floor_us,
            "bytes": self.total_bytes,
            "fallbacks": [step.operation for step in self.fallbacks],
        }
        return json.dumps({**asdict(self), "totals": totals}, indent=2)

    @property
    def _heading(self) -> str:
        return f"{self.title}: {self.dtype}, inputs {', '.join(self.inputs)}"

    def _columns(self, width: int | None) -> tuple[Columns, Columns]:
        texts: dict[str, Callable[[ExplainedStep], str]] = {
            "in the model": lambda step: step.source,
            "operation": lambda step: step.operation,
            "problem": lambda step: step.problem,
        }
        if self.in_kernels:
            texts["rung"] = lambda step: step.rung
        if self.dtype in QUANTIZED:
            texts["dtype"] = lambda step: step.dtype
        is_wide = width is None or width >= _WIDE
        if is_wide and self.in_kernels:
            if width is not None:
                texts["config"] = lambda step: " ".join(
                    f"{name}={value}" for name, value in step.config.items()
                )
                texts["source"] = lambda step: ", ".join(step.kernels)
            texts["why"] = lambda step: step.why
        figures: dict[str, Callable[[ExplainedStep], str]] = {
            "MFLOP": lambda step: f"{step.flops / 1e6:.1f}" if step.flops else ""
        }
        if is_wide:
            figures["MB"] = lambda step: f"{step.bytes / 1e6:.2f}" if step.bytes else ""
        if any(step.floor_us is not None for step in self.steps):
            figures["floor µs"] = lambda step: microseconds(step.floor_us)
        if any(step.time_us is not None for step in self.steps):
            figures["µs"] = lambda step: microseconds(step.time_us)
        return texts, figures

    def _bars(self) -> tuple[str, list[float]]:
        bars = {name: [value_of(step) or 0.0 for step in self.steps] for name, value_of in _MEASURES.items()}
        return next(
            ((name, values) for name, values in bars.items() if any(values)), ("bytes", bars["bytes"])
        )

    def summary(self) -> list[str]:
        if not self.in_kernels:
            return [
                f"{counted(len(self.steps), 'step')}, {self.flops / 1e9:.2f} GFLOP.",
                ON_THE_CPU,
                *self.notes,
            ]
        lines = [
            f"{counted(len(self.steps), 'step')}, {counted(self.launches, 'kernel launch')}, "
            f"{self.flops / 1e9:.2f} GFLOP.",
            f"Memory: {mebibytes(self.total_bytes)}: arena {mebibytes(self.arena_bytes)}, "
            f"weights {mebibytes(self.weight_bytes)}, packed weights and counters {mebibytes(self.lasting_bytes)}, "
            f"the caller's tensors {mebibytes(self.outside_bytes)}.",
        ]
        if self.dtype in QUANTIZED:
            convolutions = [step for step in self.steps if step.operation == "conv2d"]
            quantized = sum(step.dtype == self.dtype for step in convolutions)
            only = sum(step.operation == "quantise" for step in self.steps)
            lines += [
                f"{quantized} of {counted(len(convolutions), 'convolution')} multiply in {_PRODUCTS[self.dtype]}; "
                "everything else is fp16.",
                f"{only} of the steps only quantize values to 8 bits.",
            ]
        if self.floor_us is not None:
            lines.append(f"Lower bound, summed over the steps: {self.floor_us:.1f} µs.")
        timed = [step.time_us for step in self.steps if step.time_us is not None]
        if timed:
            lines.append(f"Sum of the steps, each timed alone with warm caches: {sum(timed):.1f} µs.")
        if self.time_us is not None:
            lines.append(f"The whole plan as one CUDA graph takes {self.time_us:.1f} µs.")
        if self.fallbacks:
            named = ", ".join(f"{step.operation} ({step.source or step.name})" for step in self.fallbacks)
            lines.append(
                f"PyTorch runs {len(self.fallbacks)} of the steps, for lack of a faster kernel: {named}."
            )
        else:
            lines.append("Nothing falls back to PyTorch.")
        if self.device == "twin":
            lines.append(ON_THE_TWIN)
        return lines + list(self.notes)


def explain_plan(plan: Plan, floor: Floor | None = None, *, device: str = "cuda") -> Explanation:
    """Describe a plan; `floor` adds lower bounds from the card's measured ceilings.

    `device` is what runs it: `cuda`, `twin`, or `cpu`, where PyTorch computes every step and no rung is named.
    """
    steps = tuple(_explained(plan, number, step, floor) for number, step in enumerate(plan.steps, start=1))
    return Explanation(
        plan.dtype,
        plan.batch,
        tuple(f"{entry.name} {_form(plan.forms[entry.name])}" for entry in plan.graph.inputs),
        tuple(map(_in_pytorch, steps)) if device == "cpu" else steps,
        plan.arena_bytes,
        plan.constant_bytes,
        plan.persistent_bytes,
        plan.outside_bytes,
        tuple(plan.graph.notes),
        arena=() if device == "cpu" else tuple(_blocks(plan)),
        device=device,
    )


def _blocks(plan: Plan) -> Iterator[ArenaBlock]:
    for one in sorted(plan.lifetimes, key=lambda one: (one.first, plan.offsets[one.name])):
        last = min(one.last, len(plan.steps)) + 1
        yield ArenaBlock(one.name, plan.offsets[one.name], one.bytes, one.first + 1, last)


def _in_pytorch(step: ExplainedStep) -> ExplainedStep:
    if not step.rung:
        return step
    why = "on the CPU PyTorch computes every step"
    return replace(step, rung=PYTORCH, config={}, kernels=(), why=why, launches=0, offset=None)


def _explained(plan: Plan, number: int, step: PlanStep, floor: Floor | None) -> ExplainedStep:
    node, form = step.node, plan.forms[step.node.name]
    flops = moved = 0
    if step.lowered is not None:
        flops, moved = step.lowered.problem.flops, step.lowered.problem.bytes
    elif step.in_pytorch:
        moved = _moved(plan, step)
    dtype = step.lowered.problem.dtype if step.lowered else str(form.dtype).removeprefix("torch.")
    calls = step.recipe.steps if step.recipe else ()
    packed_before = step.weights_are_constant(plan.graph.constants)  # otherwise every run packs its weights
    launched = [
        call for call in calls if isinstance(call, KernelCall) and not (packed_before and call.weights_only)
    ]
    return ExplainedStep(
        number=number,
        name=node.name,
        source=node.source,
        operation=operator_of(node).title(node),
        problem=step.lowered.problem.name if step.lowered else _form(form),
        dtype=dtype,
        rung=step.choice.rung.name if step.choice else PYTORCH if step.in_pytorch else "",
        config=step.choice.config.as_dict() if step.choice else {},
        kernels=tuple(dict.fromkeys(call.program.source for call in launched)),
        why=_why(step),
        launches=len(launched),
        flops=flops,
        bytes=moved,
        offset=None if node.name in plan.outside else plan.offsets.get(node.name),
        result_bytes=form.bytes,
        floor_us=floor(flops, moved, _rate(dtype, plan.dtype)) if floor and step.runs else None,
    )


def _rate(dtype: str, planned: str) -> str:
    """Return the dtype whose peak rate bounds a step: in a quantized plan everything else is fp16."""
    return planned if dtype == planned else unquantized(planned)


def _why(step: PlanStep) -> str:
    if step.choice:
        return step.choice.why
    if step.in_pytorch:
        return step.why_pytorch or "no kernel supports it"
    if step.side_output is not None:
        return f"written by the kernel of {step.side_output.node}"
    return "a view of the same bytes"


def _moved(plan: Plan, step: PlanStep) -> int:
    """Return the compulsory traffic in bytes of a PyTorch step."""
    constants = plan.graph.constants
    read = sum(
        constants[name].nbytes if name in constants else plan.forms[name].bytes
        for name in dict.fromkeys(step.node.inputs.values())
    )
    return read + plan.forms[step.node.name].bytes


def _form(form: Form) -> str:
    sizes = "×".join(str(size) for size in form.shape)
    return f"{sizes} {str(form.dtype).removeprefix('torch.')}" + (
        "" if form.layout == "flat" else f" {form.layout}"
    )


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count >= 2**20 else f"{count / 2**10:,.1f} KiB"


_MEASURES: dict[str, Callable[[ExplainedStep], float | None]] = {
    "µs": lambda step: step.time_us,
    "floor µs": lambda step: step.floor_us,
    "MFLOP": lambda step: step.flops / 1e6,
    "bytes": lambda step: step.bytes,
}
"""Lengths of the bars in a notebook; the first that any step has is used."""
