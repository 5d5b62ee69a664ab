"""Host time of calling an operator: ours and PyTorch's verified, timed in turns, and verified again.

A row of calls, each with its own tensors, is shorter than a stream's queue; synchronization is not timed. With
gradients, one backward pass follows all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from escalade.device.timing import HostSampler, Sampler, Timing
from escalade.ops.base.switches import precision
from escalade.tune.refusal import reason
from escalade.tune.verification import compare
from escalade_bench.calls.catalogue import BATCH, STORAGE, Call, Function, New
from escalade_bench.measure.figures import with_times
from escalade_bench.measure.records import Record
from escalade_bench.networks.measurement import time_by_clock
from escalade_bench.peers.layer import AGREEMENT
from escalade_bench.peers.network import waiting

FORWARD, WITH_GRADIENT = "calls", "calls_with_gradient"
"""Workloads: results without autograd, and results with all gradients."""
SYSTEMS = ("escalade", "torch")
COPIES = 16
"""Calls in a row."""
_CLEAR_OF_ZERO = 0.05
"""Least size of a result, relative to the largest, with a gradient: the sign of smaller ones depends on rounding."""

Tensors = Sequence[torch.Tensor]


def _surroundings(call: Call, dtype: str, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, STORAGE[dtype]) if call.autocast else nullcontext()


@dataclass(frozen=True)
class _Case:
    """A call in one dtype and layout, with its tensors."""

    call: Call
    dtype: str
    layout: str
    device: torch.device
    sets: list[tuple[Any, ...]]
    expected: list[torch.Tensor]
    """The result of the first set in float64, and its gradients."""
    seed: torch.Tensor
    """Gradient of the result, in its dtype and layout."""

    def function(self, system: str) -> Function:
        return self.call.ours if system == "escalade" else self.call.theirs

    def made(self, function: Function, sets: Sequence[tuple[Any, ...]]) -> list[torch.Tensor]:
        with _surroundings(self.call, self.dtype, self.device):
            return [function(*given) for given in sets]

    def gradients(self, function: Function, sets: Sequence[tuple[Any, ...]]) -> Tensors:
        """Return the results of all calls, followed by their gradients."""
        found = self.made(function, sets)
        asked = [one for given in sets for one in learnt(given)]
        return [*found, *torch.autograd.grad(found, asked, [self.seed] * len(found))]

    def failure(self, system: str) -> tuple[str, float]:
        """Return the failure of a system's result and gradients, or an empty string; and the largest error."""
        fresh = tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in self.sets[0])
        worst = 0.0
        for found, right in zip(self.gradients(self.function(system), [fresh]), self.expected, strict=True):
            failure, error = compare(found.detach(), right, AGREEMENT[self.dtype])
            worst = max(worst, error)
            if failure:
                return failure, worst
        return "", worst


def learnt(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a call that have gradients."""
    return [one for one in given if one.requires_grad]


def measure(
    call: Call, dtype: str, device: torch.device, seconds: float, seed: int = 0
) -> Iterator[list[Record]]:
    """Yield records of both systems in every layout that the call has in the dtype."""
    for layout in call.layouts[dtype]:
        with precision(dtype):
            new = New(dtype, layout, device, torch.Generator(device).manual_seed(seed))
            sets = [call.tensors(new) for _ in range(COPIES)]
            with _surroundings(call, dtype, device), torch.no_grad():
                like = call.theirs(*(one.clone() for one in sets[0]))
            expected, asked = _exact(call, sets[0], new.generator)
            gradient = torch.empty_like(like).copy_(asked)
            records = _measured(_Case(call, dtype, layout, device, sets, expected, gradient), seconds)
        yield records


def _exact(call: Call, given: Tensors, generator: torch.Generator) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return a call's result and gradients in float64, and the gradient of the result."""
    wide = [
        one.detach().double().requires_grad_(one.requires_grad) if one.is_floating_point() else one
        for one in given
    ]
    y = call.theirs(*wide)
    sizes = y.detach().abs()
    seed = torch.randn(y.shape, generator=generator, device=y.device) * (sizes > _CLEAR_OF_ZERO * sizes.max())
    # Rounded once, so that all systems get the same.
    seed = seed.half().to(y.dtype)
    gradients = torch.autograd.grad(y, learnt(wide), seed)
    return [y.detach(), *gradients], seed


def _measured(case: _Case, seconds: float) -> list[Record]:
    blank = Record(
        FORWARD, case.call.name, case.dtype, case.layout, BATCH, "", "", tolerance=AGREEMENT[case.dtype]
    )
    failures: dict[str, str] = {}
    errors: dict[str, float] = {}
    for system in SYSTEMS:
        try:
            failures[system], errors[system] = case.failure(system)
        except Exception as broken:  # a system may fail in any way: the other goes on
            failures[system] = reason(broken)
    right = [system for system in SYSTEMS if not failures[system]]

    def timed(work: Callable[[Function, Sequence[tuple[Any, ...]]], object]) -> dict[str, Timing]:
        wait = waiting(case.device)
        samplers: dict[str, Sampler] = {
            name: HostSampler(partial(work, case.function(name), case.sets), wait, COPIES) for name in right
        }
        time_by_clock(samplers, 0.0)  # compiles and allocates
        return time_by_clock(samplers, seconds)

    with torch.no_grad():
        plain = timed(case.made)
    learning = timed(case.gradients)
    for system in right:
        failure, _ = case.failure(system)
        failures[system] = f"after it was timed {failure}" if failure else ""
    records = []
    for workload, timings in ((FORWARD, plain), (WITH_GRADIENT, learning)):
        for system in SYSTEMS:
            record = replace(
                blank, workload=workload, system=system, failure=failures[system], error=errors.get(system)
            )
            records.append(record if record.failure else with_times(record, timings[system]))
    return records
