"""Host time of an operator call, next to PyTorch's for the same layer, on tensors too small to fill a GPU.

Both systems are verified, timed in turns, and verified again. A row of calls, each with its own tensors, is shorter
than a stream's queue; synchronization is not timed. With gradients, one backward pass follows all calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F

from escalade import ops
from escalade.device.timing import HostSampler, Sampler, Timing
from escalade.errors import UnsupportedError
from escalade.ops.base.switches import precision
from escalade.tune.refusal import failure_reason
from escalade.tune.verification import compare
from escalade_bench.campaign.units import TIMED, Say, Session, Unit, command
from escalade_bench.measure.figures import with_times
from escalade_bench.measure.records import Record
from escalade_bench.networks.measurement import time_by_clock
from escalade_bench.peers.layer import AGREEMENT
from escalade_bench.peers.network import waiting

BATCH, SIDE, WIDTH, CLASSES = 2, 8, 64, 10
"""Images, their rows and columns, channels or features, and classes."""
_SPREAD = 0.3
STORAGE = {"fp16": torch.float16, "fp32": torch.float32}
_MLP = f"{WIDTH}-{WIDTH}bg_{WIDTH}-32b"
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class New:
    """Makes the tensors of a call."""

    dtype: str
    layout: str
    device: torch.device
    generator: torch.Generator

    def __call__(self, *size: int, learns: bool = True, dtype: str = "") -> torch.Tensor:
        """Return random numbers, in the call's dtype unless another is named; images in the call's layout."""
        made = torch.randn(size, generator=self.generator, device=self.device) * _SPREAD
        made = made.to(STORAGE[dtype or self.dtype])
        if len(size) == 4 and self.layout == "nhwc":
            made = made.contiguous(memory_format=torch.channels_last)
        return made.requires_grad_(learns)

    def image(self, channels: int = WIDTH, learns: bool = True) -> torch.Tensor:
        return self(BATCH, channels, SIDE, SIDE, learns=learns)

    def convolution(self, channels: int, filters: int, dtype: str = "") -> tuple[torch.Tensor, ...]:
        """Return filters and their bias."""
        return self(filters, channels, 3, 3, dtype=dtype), self(filters, dtype=dtype)


@dataclass(frozen=True)
class Call:
    """An operator call: a maker of its tensors, and the function of each system."""

    name: str
    tensors: Callable[[New], tuple[torch.Tensor, ...]]
    ours: Function
    theirs: Function
    layouts: Mapping[str, tuple[str, ...]]
    """Layouts by dtype."""
    autocast: bool = False
    """True to call it under autocast to the dtype."""


def _normed(new: New) -> tuple[torch.Tensor, ...]:
    """Return an image, BatchNorm's weight and bias, and its statistics."""
    device = new.device
    learnt = new(WIDTH, dtype="fp32"), new(WIDTH, dtype="fp32")
    return new.image(), *learnt, torch.zeros(WIDTH, device=device), torch.ones(WIDTH, device=device)


def _classified(new: New) -> tuple[torch.Tensor, ...]:
    return new(BATCH, CLASSES), torch.arange(1, BATCH + 1, device=new.device)


def _chained(new: New) -> tuple[torch.Tensor, ...]:
    return new(BATCH, WIDTH), new(WIDTH, WIDTH), new(WIDTH), new(32, WIDTH), new(32)


def _their_chain(x: torch.Tensor, *learnt: torch.Tensor) -> torch.Tensor:
    return F.linear(F.gelu(F.linear(x, *learnt[:2])), *learnt[2:])


def _their_loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss with sums in fp32 at least, as ours has."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.mse_loss(x.to(wide), target.to(wide))


def _convolution(new: New) -> tuple[torch.Tensor, ...]:
    return new.image(), *new.convolution(WIDTH, WIDTH)


_HALF = {"fp16": ("nhwc",)}
_BOTH = {"fp16": ("nhwc", "nchw")}
_EVERY = {"fp16": ("nhwc",), "fp32": ("nchw", "nhwc")}
_FLAT = {"fp16": ("flat",), "fp32": ("flat",)}
_convolve, _theirs = partial(ops.conv2d, padding=1), partial(F.conv2d, padding=1)
# fmt: off
_ALL = (
    Call("conv2d", _convolution, _convolve, _theirs, _EVERY),
    Call("conv2d_relu", _convolution, partial(_convolve, relu=True), lambda *given: F.relu(_theirs(*given)), _HALF),
    Call("conv2d_autocast", lambda new: (new.image(), *new.convolution(WIDTH, WIDTH, "fp32")), _convolve, _theirs,
         _HALF, autocast=True),
    Call("conv2d_of_an_image", lambda new: (new.image(3, learns=False), *new.convolution(3, 256)), _convolve, _theirs,
         _HALF),
    Call("max_pool2d", lambda new: (new.image(),), lambda x: ops.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2), _BOTH),
    Call("avg_pool2d", lambda new: (new.image(),), lambda x: ops.avg_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), _HALF),
    Call("upsample2d", lambda new: (new.image(),), lambda x: ops.upsample2d(x, 2 * SIDE),
         lambda x: F.interpolate(x, size=(2 * SIDE, 2 * SIDE)), _HALF),
    Call("relu", lambda new: (new.image(),), ops.relu, F.relu, _HALF),
    Call("add_relu", lambda new: (new.image(), new.image()), partial(ops.add, relu=True), lambda x, y: F.relu(x + y),
         _HALF),
    Call("linear", lambda new: (new(BATCH, WIDTH), new(WIDTH, WIDTH), new(WIDTH)), ops.linear, F.linear, _FLAT),
    Call("batch_norm_training", _normed, lambda x, w, b, m, v: ops.batch_norm(x, w, b, m, v, True),
         lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, True), _HALF),
    Call("batch_norm", _normed, lambda x, w, b, m, v: ops.batch_norm(x, w, b, m, v, False),
         lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b, False), _HALF),
    Call("mse_loss", lambda new: (new.image(), new.image(learns=False)), ops.mse_loss, _their_loss, _EVERY),
    Call("cross_entropy", _classified, ops.cross_entropy, F.cross_entropy, {"fp32": ("flat",)}),
    Call("mlp", _chained, lambda x, *learnt: ops.mlp(x, learnt, _MLP), _their_chain, {"fp16": ("flat",)}),
)
# fmt: on
CALLS = {call.name: call for call in _ALL}
"""Every call by its name."""


def chosen(names: tuple[str, ...]) -> dict[str, Call]:
    """Return the calls of these names; all without any."""
    for name in names:
        if name not in CALLS:
            raise UnsupportedError(f"there is no call {name!r}; known: {', '.join(CALLS)}")
    return {name: CALLS[name] for name in names} if names else dict(CALLS)


FORWARD, WITH_GRADIENT = "calls", "calls_with_gradient"
"""Workloads: results without autograd, and results with all gradients."""
SYSTEMS = ("escalade", "torch")
COPIES = 16
"""Calls in a row."""
_CLEAR_OF_ZERO = 0.05
"""Least size of a result, relative to the largest, with a gradient: the sign of smaller ones depends on rounding."""

Sets = Sequence[tuple[Any, ...]]


def learnt(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a call that have gradients."""
    return [one for one in given if one.requires_grad]


@dataclass(frozen=True)
class _Case:
    """A call in one dtype and layout, with its tensors."""

    call: Call
    dtype: str
    device: torch.device
    sets: Sets
    generator: torch.Generator

    def function(self, system: str) -> Function:
        return self.call.ours if system == "escalade" else self.call.theirs

    def results(self, function: Function, sets: Sets) -> list[torch.Tensor]:
        autocast = torch.autocast(self.device.type, STORAGE[self.dtype], enabled=self.call.autocast)
        with autocast:
            return [function(*given) for given in sets]

    def gradients(self, function: Function, sets: Sets) -> list[torch.Tensor]:
        """Return the results of all calls, followed by their gradients."""
        found = self.results(function, sets)
        asked = [one for given in sets for one in learnt(given)]
        return [*found, *torch.autograd.grad(found, asked, [self.seed] * len(found))]

    @cached_property
    def seed(self) -> torch.Tensor:
        """Gradient of the result, in its dtype and layout."""
        with torch.no_grad():
            (like,) = self.results(self.call.theirs, [tuple(one.clone() for one in self.sets[0])])
        return torch.empty_like(like).copy_(self.exact[1])

    @cached_property
    def exact(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The result of the first set and its gradients in float64, and the gradient of the result."""
        wide = [
            one.detach().double().requires_grad_(one.requires_grad) if one.is_floating_point() else one
            for one in self.sets[0]
        ]
        y = self.call.theirs(*wide)
        sizes, noise = y.detach().abs(), torch.randn(y.shape, generator=self.generator, device=y.device)
        # Rounded once, so that all systems get the same.
        seed = (noise * (sizes > _CLEAR_OF_ZERO * sizes.max())).half().to(y.dtype)
        return [y.detach(), *torch.autograd.grad(y, learnt(wide), seed)], seed

    def failure(self, system: str) -> tuple[str, float]:
        """Return the failure of a system's result and gradients, or an empty string; and the largest error."""
        fresh = tuple(one.detach().clone().requires_grad_(one.requires_grad) for one in self.sets[0])
        worst = 0.0
        for found, right in zip(self.gradients(self.function(system), [fresh]), self.exact[0], strict=True):
            failure, error = compare(found.detach(), right, AGREEMENT[self.dtype])
            worst = max(worst, error)
            if failure:
                return failure, worst
        return "", worst

    def times(
        self, work: Callable[[Function, Sets], object], systems: Sequence[str], seconds: float
    ) -> dict[str, Timing]:
        wait = waiting(self.device)
        samplers: dict[str, Sampler] = {
            name: HostSampler(partial(work, self.function(name), self.sets), wait, COPIES) for name in systems
        }
        time_by_clock(samplers, 0.0)  # compiles and allocates
        return time_by_clock(samplers, seconds)


def measure(call: Call, dtype: str, session: Session, say: Say) -> Iterator[list[Record]]:
    """Yield records of both systems in every layout that the call has in the dtype."""
    for layout in call.layouts[dtype]:
        say(f"{call.name} {dtype} {layout}: verifying and timing")
        with precision(dtype, algorithms=0):
            new = New(
                dtype, layout, session.device, torch.Generator(session.device).manual_seed(session.seed)
            )
            case = _Case(
                call, dtype, session.device, [call.tensors(new) for _ in range(COPIES)], new.generator
            )
            blank = Record(FORWARD, call.name, dtype, layout, BATCH, "", "", tolerance=AGREEMENT[dtype])
            records = _measured(case, blank, session.seconds)
        yield records


def _measured(case: _Case, blank: Record, seconds: float) -> list[Record]:
    failures: dict[str, str] = {}
    errors: dict[str, float] = {}
    case.seed  # noqa: B018  # before any system runs
    for system in SYSTEMS:
        try:
            failures[system], errors[system] = case.failure(system)
        except Exception as broken:  # a system may fail in any way: continue with the other
            failures[system] = failure_reason(broken)
    right = [system for system in SYSTEMS if not failures[system]]
    with torch.no_grad():
        plain = case.times(case.results, right, seconds)
    learning = case.times(case.gradients, right, seconds)
    for system in right:
        failure, _ = case.failure(system)
        failures[system] = f"after it was timed {failure}" if failure else ""
    records = []
    for workload, timings in ((FORWARD, plain), (WITH_GRADIENT, learning)):
        for system in SYSTEMS:
            told = {"failure": failures[system], "error": errors.get(system)}
            record = replace(blank, workload=workload, system=system, **told)  # type: ignore[arg-type]
            records.append(record if record.failure else with_times(record, timings[system]))
    return records


_SECONDS = 3.0


def units() -> Iterator[Unit]:
    """A unit for each call and dtype, in all its layouts."""
    for call in CALLS.values():
        for dtype, layouts in call.layouts.items():
            yield Unit(
                f"calls/{call.name}/{dtype}",
                f"host time of {call.name} and of PyTorch's call",
                command("bench", "calls", call.name, "-t", dtype, *TIMED),
                _SECONDS,
                partial(measure, call, dtype),
                declared=(*SYSTEMS, str(COPIES), *layouts),
                alone=True,
            )
