"""Verification of rungs on random inputs against the operation's float64 reference.

Outputs and workspaces are poisoned with NaN before a run, inputs are compared with their originals after it, and on
the GPU the memory on both sides of the output is guarded. A result passes if its error over the whole output is within
the rung's tolerance and no row and no single element is an outlier.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade.device import host_memory
from escalade.device.program import Program
from escalade.device.recipe import Recipe
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Counts
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import ELEMENT_BYTES
from escalade.ops.base.operation import Operation
from escalade.ops.base.pitch import pitch_fields, pitch_of, pitches, with_pitch
from escalade.ops.base.problem import Problem
from escalade.ops.base.rung import Config, Rung
from escalade.tune.refusal import failure_reason, require_device

WORST_ELEMENT = 32.0
"""Largest error of one element beyond its own rounding, in tolerances times the RMS of the output (or of its row, if
larger).

Sums of rounded terms reach 6 to 8. The rounding of the result is proportional to it, and some elements are far larger
than the RMS: 60 times for softmax, among ten thousand rows.
"""
WORST_ROW = 8.0
"""Largest error of a row (one index of the first dimension), in the same unit. In a row of fewer than 16 elements, one
element at `WORST_ELEMENT` may exceed it, so the limit is higher there."""
CHANCE = 0.01
"""Probability of rejecting a right result of n elements because all of them happen to be small: sums of mixed signs are
all below a fraction p of their typical size with probability p^n."""
UNIT_ROUNDOFF = {
    "fp32": 2.0**-24,
    "tf32": 2.0**-10,
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
    "fp8": 0.0,
    "int8": 0.0,
}
"""Unit roundoff of intermediate values; for TF32, of truncated operands. No intermediate value is stored in 8 bits."""
GUARD_BYTES = 4096
_CANARY = 0xA5


@dataclass(frozen=True)
class Outcome:
    """Result of verifying one rung and config on one problem."""

    rung: str
    problem: Problem
    config: Config | None
    passed: bool
    error: float | None = None
    tolerance: float | None = None
    refusal: str = ""
    """Why the rung does not support the problem: skipped, neither passed nor failed."""
    failure: str = ""
    seconds: float = 0.0
    counts: Counts | None = None
    """The twin's counts, if it passed and counts were enabled."""

    @property
    def failed(self) -> bool:
        return not self.passed and not self.refusal

    @property
    def label(self) -> str:
        return f"{self.rung} on {self.problem.name} {self.problem.dtype} {self.problem.layout}"


class VerificationCase:
    """A problem in one dtype: its inputs, what they should give, and how well PyTorch does."""

    def __init__(self, operation: Operation[Any], problem: Any, device: torch.device, seed: int) -> None:
        self.operation = operation
        self.device = device
        self.problem = replace(problem, layout=operation.layouts[0])
        _require_memory(self.problem, device)
        self.inputs = operation.inputs(self.problem, device, seed)
        self.expected = operation.reference(self.problem, self.inputs)
        self.further = operation.extra_references(self.problem, self.inputs)
        error = relative_error(operation.peer(self.problem, self.inputs), self.expected)
        self.peer_error = min(error, max_peer_error(operation, self.problem))

    def inputs_in(self, layout: str) -> dict[str, torch.Tensor]:
        """Return copies, so that a kernel that writes to its inputs cannot change the originals."""
        apart_in = pitches(self.problem) if layout == "nhwc" else {}
        return {
            name: with_pitch(tensor, apart_in[name])[0] if name in apart_in else in_layout(tensor, layout)
            for name, tensor in self.inputs.items()
        }

    def check(
        self, rung: Rung[Any], layout: str, config: Config, options: TwinOptions = TwinOptions()
    ) -> Outcome:
        """Run and verify once. Errors of compiling and launching count as failures."""
        problem = replace(self.problem, layout=layout)
        tolerance = rung.tolerance(problem, self.peer_error)
        began = time.perf_counter()

        def outcome(failure: str = "", error: float | None = None) -> Outcome:
            seconds = time.perf_counter() - began
            return Outcome(rung.name, problem, config, not failure, error, tolerance, "", failure, seconds)

        try:
            recipe = rung.recipe(problem, config)
            inputs = self.inputs_in(layout)
            outputs, guards = self._outputs(problem)
            label = f"{problem.name} {problem.dtype} {layout}, rung {rung.name}, {config}"
            options = replace(options, unwritten=(*options.unwritten, *outputs))
            executable = bind(
                recipe, {**inputs, **poisoned_workspaces(recipe, self.device), **outputs}, label, options
            )
            executable()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        except Exception as error:  # whatever a rung raises is reported, and verification continues
            failure_reason(error)  # re-raises interrupts
            ran = f"rung {rung.name} on {problem.name} {problem.dtype} {problem.layout}"
            what = f"Leave it out with --rung, or run `escalade verify --rung {rung.name} --device twin --checks`"
            require_device(self.device, f"{ran} left the GPU unusable for this process: {error}. {what}")
            return outcome(f"{type(error).__name__}: {error}")
        judged = self._judge(inputs, outputs, guards, tolerance, outcome)
        if not options.counts or not judged.passed:
            return judged
        return replace(judged, counts=executable.counts(packing=not self.operation.weights_are_constant))

    def _judge(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        guards: Sequence[torch.Tensor],
        tolerance: float,
        outcome: Callable[..., Outcome],
    ) -> Outcome:
        for name, tensor in inputs.items():
            if not _same(tensor, self.inputs[name]):
                return outcome(f"it changed its input {name}")
        if not all(bool((side == _CANARY).all()) for side in guards):
            return outcome("it wrote outside its output")
        for name, expected in self.further.items():
            # A further output, such as a bias gradient, may have few elements, all off by a full rounding error.
            allowed = max(tolerance, _rounding(outputs[name].dtype) / 2)
            failure, error = compare(outputs[name], expected, allowed)
            if failure:
                return outcome(f"of {name}: {failure}", error)
        return outcome(*compare(outputs["y"], self.expected, tolerance))

    def _outputs(self, problem: Any) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """Allocate all outputs, by buffer name; also returns the guard memory around them."""
        dense = pitch_fields(dict.fromkeys(pitches(problem), 0))
        plain = {
            "y": self.operation.output(replace(problem, **dense), self.device),
            **self.operation.extra_outputs(problem, self.device),
        }
        outputs: dict[str, torch.Tensor] = {}
        guards: list[torch.Tensor] = []
        for name, tensor in plain.items():
            outputs[name], beside = self._guarded(tensor, pitch_of(problem, name))
            guards += beside
        return outputs, guards

    def _guarded(self, plain: torch.Tensor, pitch: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Fill with NaN and place it between guards: on the GPU, and between pixels if the output has a pitch.

        On the twin, the checks know the bounds.
        """
        if pitch:
            output, between = with_pitch(plain, pitch, _CANARY)
            return poison(output), (between,)
        if self.device.type != "cuda" or plain.numel() == 0:
            return poison(plain), ()
        size = plain.numel() * plain.element_size()
        memory = torch.full((size + 2 * GUARD_BYTES,), _CANARY, dtype=torch.uint8, device=self.device)
        inside = memory[GUARD_BYTES : GUARD_BYTES + size].view(plain.dtype)
        output = inside.as_strided(plain.size(), plain.stride(), inside.storage_offset())
        return poison(output), (memory[:GUARD_BYTES], memory[GUARD_BYTES + size :])


def _require_memory(problem: Any, device: torch.device) -> None:
    """Raise OutOfMemory if the float64 reference does not fit into host memory; for GPUs, PyTorch raises."""
    if device.type == "cpu":
        exact = problem.bytes * torch.float64.itemsize // ELEMENT_BYTES[problem.dtype]
        host_memory.require(exact, f"{problem.name} in float64")


def poison(result: torch.Tensor) -> torch.Tensor:
    """Fill with NaN, or with an integer near the maximum, so that missing writes are noticed."""
    return result.fill_(math.nan if result.is_floating_point() else torch.iinfo(result.dtype).max - 1)


def max_peer_error(operation: Operation[Any], problem: Any) -> float:
    """Return the cap on PyTorch's own error in tolerances: an inaccurate cuDNN algorithm does not excuse a rung.

    Roundings to the dtype are independent, one unit roundoff each; fp32 sums may have twice the error of plain
    summation. Integers are rounded to steps of one, whatever their size, and saturate: there is no such cap.
    """
    result = operation.output(problem, torch.device("meta"))
    if not result.dtype.is_floating_point:
        return math.inf
    unit = max(_rounding(result.dtype) / 2, UNIT_ROUNDOFF[problem.dtype])
    return unit * math.sqrt(operation.roundings(problem)) + 2 * problem.rounding


def compare(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> tuple[str, float]:
    """Return what is wrong with the output (empty if nothing), and its relative error.

    The tolerance holds for many elements. Few elements may all happen to be small, so they are allowed more
    (`CHANCE`). A single element is treated as two: it is usually a loss, whose terms have one sign.
    """
    if output.shape != expected.shape:
        return f"the result has shape {tuple(output.shape)} instead of {tuple(expected.shape)}", math.nan
    error = relative_error(output, expected)
    tolerance *= CHANCE ** (-1 / max(2, output.numel()))
    unwritten = int(torch.isnan(output.double()).sum())
    if unwritten:
        return f"{unwritten} of {output.numel()} outputs are NaN: unwritten, or computed from nothing", error
    if not error <= tolerance:
        return f"its error is {error:.2e}, more than the {tolerance:.2e} allowed", error
    if not output.numel():
        return "", error
    return _standing_out(output, expected, tolerance), error


def compare_all(
    outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> str:
    """Return the first failure among the outputs of an operation, by name; empty if all are right."""
    for name, right in expected.items():
        failure, _ = compare(outputs[name], right, tolerance)
        if failure:
            return failure if name == "y" else f"of {name}: {failure}"
    return ""


def _standing_out(output: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str:
    """Describe an element or row whose error is an outlier; empty if there is none."""
    rounding = _rounding(output.dtype)
    rows = expected.shape[0] if expected.dim() else 1
    length = expected.numel() // rows
    off = (output.double() - expected).abs_()
    sizes, strayed = (_row_means(tensor) for tensor in (expected, off))
    typical = float(torch.linalg.vector_norm(sizes)) / rows**0.5
    scale = sizes.clamp(min=typical)
    allowed = (WORST_ELEMENT * tolerance * scale).view(-1, *[1] * (expected.dim() - 1))
    beyond = off - expected.abs().mul_(rounding) - allowed
    if float(beyond.max()) > 0:
        worst = float(off.flatten()[beyond.argmax()])
        return f"one output is off by {worst:.2e}, where a typical one is {typical:.2e}"
    limit = max(WORST_ROW, WORST_ELEMENT / length**0.5) * tolerance
    beyond = strayed - rounding * sizes - limit * scale
    row = int(beyond.argmax())
    if float(beyond[row]) > 0:
        worst = float(strayed[row])
        return f"row {row} of {rows} is off by {worst:.2e} an output, where a typical one is {typical:.2e}"
    return ""


def _row_means(tensor: torch.Tensor) -> torch.Tensor:
    """Return the root mean square per index of the first dimension."""
    if tensor.dim() < 2:
        return tensor.abs().view(-1)
    norms = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim())))
    return norms / (tensor.numel() / tensor.shape[0]) ** 0.5


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative spacing of the type's numbers: the error of two roundings."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Like `torch.equal`, which does not support 8-bit floats."""
    if one.dtype.itemsize == 1:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


def in_layout(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a copy in the layout, which concerns 4-dimensional tensors (images and filters) only."""
    channels_last = layout == "nhwc" and tensor.dim() == 4
    return tensor.clone(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def poisoned_workspaces(recipe: Recipe, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate workspaces filled with 0xFF, a NaN in every float type, except those that must be zero."""
    return {
        workspace.name: torch.full((workspace.bytes,), 0xFF, dtype=torch.uint8, device=device)
        for workspace in recipe.workspaces
        if not workspace.zeroed
    }


def default_problems(operation: Operation[Any], device: torch.device) -> tuple[Any, ...]:
    small = tuple(operation.small_problems)
    return small + tuple(operation.problems) if device.type == "cuda" else small


@dataclass(frozen=True)
class VerificationJob:
    """One rung and config on one problem (in its dtype and layout), or the reason to skip it."""

    problem: Any
    rung: Rung[Any]
    config: Config | None
    refusal: str = ""
    failure: str = ""


def jobs(
    operation: Operation[Any],
    device: torch.device,
    *,
    problems: Sequence[Any] | None = None,
    rungs: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    layouts: Sequence[str] | None = None,
    configs: str = "default",
    card: Card | None = None,
) -> list[VerificationJob]:
    """Return all jobs, ordered by problem and dtype.

    `configs` is `default` or `all`. `card` selects configs for another card, without running them.
    """
    if card is None:
        for problem in problems or ():
            _require_memory(problem, device)
    chosen = tuple(operation.ladder.rung(name) for name in rungs) if rungs else tuple(operation.ladder)
    return [
        job
        for problem in (default_problems(operation, device) if problems is None else problems)
        for dtype in dtypes or operation.dtypes
        for layout in layouts or operation.layouts
        for rung in chosen
        for job in rung_jobs(
            rung, replace(problem, dtype=dtype, layout=layout), card or Card.of(device), configs
        )
    ]


def rung_jobs(rung: Rung[Any], problem: Any, card: Card, configs: str = "default") -> list[VerificationJob]:
    try:
        rung = rung.on(card)
        sentence = rung.refusal(problem)
        if sentence:
            return [VerificationJob(problem, rung, None, refusal=sentence)]
        offered = rung.configs(problem)
    except Exception as error:  # a broken rung fails its own job, not the run
        return [VerificationJob(problem, rung, None, failure=f"{type(error).__name__}: {error}")]
    return [
        VerificationJob(problem, rung, config) for config in (offered if configs == "all" else offered[:1])
    ]


def run(
    operation: Operation[Any],
    device: torch.device,
    planned: Sequence[VerificationJob],
    seed: int = 0,
    options: TwinOptions = TwinOptions(),
) -> Iterator[Outcome]:
    """Yield the outcomes in order. Consecutive jobs of one problem and dtype share inputs and reference."""
    case: VerificationCase | None = None
    for job in planned:
        if job.config is None:
            yield Outcome(job.rung.name, job.problem, None, False, refusal=job.refusal, failure=job.failure)
            continue
        if case is None or replace(case.problem, layout=job.problem.layout) != job.problem:
            case = None  # free the old tensors before allocating new ones
            case = VerificationCase(operation, job.problem, device, seed)
        yield case.check(job.rung, job.problem.layout, job.config, options)


def verify(
    operation: Operation[Any],
    device: torch.device,
    *,
    seed: int = 0,
    options: TwinOptions = TwinOptions(),
    **which: Any,
) -> Iterator[Outcome]:
    """Verify every rung on every problem, dtype and layout, or those selected by `which` (see `jobs`)."""
    return run(operation, device, jobs(operation, device, **which), seed, options)


def programs(planned: Iterable[VerificationJob]) -> list[Program]:
    """Return the programs of these jobs, without duplicates. Errors of rungs are left for the run to report."""
    found: dict[Program, None] = {}
    for job in planned:
        if job.config is None:
            continue
        try:
            recipe = job.rung.recipe(job.problem, job.config)
        except Exception:
            continue
        found.update(dict.fromkeys(recipe.programs))
    return list(found)


def outputs_of(operation: Operation[Any], problem: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Allocate all outputs, by buffer name."""
    return {"y": operation.output(problem, device), **operation.extra_outputs(problem, device)}
