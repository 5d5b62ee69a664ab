"""Whole steps of training by PyTorch, at its best: launched one by one, as one CUDA graph, compiled into one.

A step is forward, loss, backward and SGD with momentum, in one launch for all parameters, and in fp16 the loss scale.
All systems begin with the same weights, and what they have after a few steps is compared: the losses, the momenta,
which are sums of gradients, the parameters and the buffers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from escalade.bench.peers.network import FORMATS, Maker, NetworkPeer, Peak, Replay, Task, waiting
from escalade.bench.peers.torch_network import (
    DEFAULT,
    MAX_AUTOTUNE,
    WITHOUT_GRAPHS,
    compile_system,
    repeat,
    require_cuda,
)
from escalade.device.recording import recorded
from escalade.train.steps import Loss

STEPS = 3
"""Steps after which results are compared: the last has gone through weights and momenta that the others have left."""
MOMENTUM = 0.9
MIXED = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""What autocast multiplies in, by dtype."""


@dataclass(frozen=True)
class Lesson:
    """What is learned in a step: all that every system begins with."""

    model: nn.Module
    """The model on the device, in fp32 and training mode; nobody changes it."""
    loss: Loss
    x: torch.Tensor
    """The batch on the device, in fp32, NCHW."""
    target: torch.Tensor
    """What the loss takes behind the model's result; x itself where the model is to give its input."""
    dtype: str
    rate: float
    scale: float
    """The loss scale that fp16 begins with."""
    whole: bool = False
    """True to compare all momenta as one tensor and all weights as another. The gradient of a bias in front of a
    BatchNorm is zero but for rounding, so by itself it has no relative error."""
    _models: dict[str, nn.Module] = field(default_factory=dict)

    def model_in(self, layout: str) -> nn.Module:
        """The model with its weights in a layout: made once, so that it is no part of what a system needs."""
        if layout not in self._models:
            placed = copy.deepcopy(self.model).to(memory_format=FORMATS[layout])  # type: ignore[call-overload]
            self._models[layout] = placed
        return self._models[layout]

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts that a system may be fastest in, the one for tensor cores last; rows have only one."""
        return ("nchw", "nhwc") if self.x.dim() == 4 else ("flat",)

    def batch(self, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch and its targets, copied into a layout; one tensor if they are one."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone(memory_format=FORMATS[layout] if tensor.dim() == 4 else torch.preserve_format)

        x = copied(self.x)
        return x, x if self.target is self.x else copied(self.target)


class Pupil:
    """A copy of a lesson's model with an optimiser, which can begin again."""

    def __init__(
        self, lesson: Lesson, layout: str, dtype: torch.dtype = torch.float32, fused: bool = False
    ) -> None:
        self._whole = lesson.whole
        begin = lesson.model_in(layout)
        self.model = copy.deepcopy(begin).to(dtype)
        self._begin, self._own = _changed(begin), _changed(self.model)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(parameters, lesson.rate, momentum=MOMENTUM, fused=fused)
        self._momenta = [torch.zeros_like(one).detach() for one in parameters]
        for one, momentum in zip(parameters, self._momenta, strict=True):
            self.optimizer.state[one]["momentum_buffer"] = momentum

    def restart(self) -> None:
        """Goes back to the weights of the start, in two launches. The loss scale stays as it is: nothing depends on
        it."""
        torch._foreach_copy_(self._own, self._begin)
        torch._foreach_zero_(self._momenta)

    def after(self, losses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What is compared after the steps that had these losses."""
        if self._whole:
            return [torch.stack(list(losses)), _joined(self._momenta), _joined(self._own)]
        return [torch.stack(list(losses)), *self._momenta, *self._own]


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _changed(model: nn.Module) -> list[torch.Tensor]:
    """The parameters and the buffers of floating-point numbers, where they are."""
    tensors = (*model.parameters(), *model.buffers())
    return [one.detach() for one in tensors if one.is_floating_point()]


class TorchStep:
    """A step as PyTorch's users write it, over a batch that lies still."""

    def __init__(
        self,
        lesson: Lesson,
        layout: str,
        batch: tuple[torch.Tensor, torch.Tensor],
        *,
        mode: str | None = None,
        exact: bool = False,
    ) -> None:
        """Compiled in a `mode`, if there is one. `exact` is in float64."""
        self.pupil = Pupil(
            lesson, layout, torch.float64 if exact else torch.float32, fused=lesson.device.type == "cuda"
        )
        self._batch = batch
        cast = None if exact else MIXED.get(lesson.dtype)
        scaled = not exact and lesson.dtype == "fp16"
        self._scaler = torch.amp.GradScaler(lesson.device.type, init_scale=lesson.scale, enabled=scaled)
        model, loss, kind = self.pupil.model, lesson.loss, lesson.device.type

        def forward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with torch.autocast(kind, cast or torch.float16, enabled=cast is not None):
                return loss(model(x), target)

        self._forward = torch.compile(forward, mode=mode, dynamic=False) if mode else forward

    def __call__(self) -> torch.Tensor:
        """One step; the loss before it."""
        self.pupil.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self._forward(*self._batch)
            self._scaler.scale(loss).backward()
        self._scaler.step(self.pupil.optimizer)
        self._scaler.update()
        return loss.detach()

    def results(self, first: torch.Tensor) -> list[torch.Tensor]:
        """What is compared after all steps, of which one has been taken."""
        return self.pupil.after([first, *(self() for _ in range(STEPS - 1))])


def results_of(lesson: Lesson, x: torch.Tensor | None = None, *, exact: bool = False) -> list[torch.Tensor]:
    """What PyTorch has after the steps: in the lesson's dtype or in float64, over its batch or another x."""
    layout = lesson.layouts[0 if exact else -1]
    batch = lesson.batch(layout)
    if x is not None:
        batch = x.to(memory_format=FORMATS[layout]), batch[1]
    if exact:
        wide = {one: one.double() if one.is_floating_point() else one for one in batch}
        batch = wide[batch[0]], wide[batch[1]]
    step = TorchStep(lesson, layout, batch, exact=exact)
    return step.results(step())


def makers(lesson: Lesson) -> dict[str, Maker]:
    """PyTorch's ways to take such steps, each in the layouts that may be its fastest: tensor cores want nhwc."""
    layouts = lesson.layouts if lesson.dtype == "fp32" else lesson.layouts[-1:]
    ways: dict[str, Callable[[Lesson, str], NetworkPeer]] = {
        "torch-eager": _eager,
        "torch-graph": partial(_graphed, system="torch-graph"),
        **{compile_system(mode): partial(_compiled, mode=mode) for mode in (MAX_AUTOTUNE, DEFAULT)},
    }

    def made(way: Callable[[Lesson, str], NetworkPeer]) -> Maker:
        def make(task: Task) -> list[NetworkPeer]:
            return [way(lesson, layout) for layout in layouts]

        return make

    return {system: made(way) for system, way in ways.items()}


def _eager(lesson: Lesson, layout: str) -> NetworkPeer:
    batch = lesson.batch(layout)
    peak = Peak(lesson.device)
    step = TorchStep(lesson, layout, batch)
    if lesson.device.type == "cuda":
        repeat(step)
    _, peak_bytes = peak.of(step)
    return NetworkPeer(
        "torch-eager", layout, step, step.results, waiting(lesson.device), restart=step.pupil.restart,
        peak_bytes=peak_bytes,
    )  # fmt: skip


def _compiled(lesson: Lesson, layout: str, mode: str) -> NetworkPeer:
    system = compile_system(mode)
    require_cuda(system, lesson.device)
    torch._dynamo.reset()
    return _graphed(lesson, layout, system, WITHOUT_GRAPHS[mode])


def _graphed(lesson: Lesson, layout: str, system: str, mode: str | None = None) -> NetworkPeer:
    """The whole step as one CUDA graph, which a call fills with its batch and replays."""
    require_cuda(system, lesson.device)
    given = lesson.batch(layout)
    peak = Peak(lesson.device)
    own = lesson.batch(layout)
    step = TorchStep(lesson, layout, own, mode=mode)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        repeat(step)
    torch.cuda.current_stream().wait_stream(side)
    step.pupil.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()

    def capture() -> torch.Tensor:
        with recorded(graph):
            return step()

    loss, peak_bytes = peak.of(capture)
    pairs = list({id(mine): (mine, theirs) for mine, theirs in zip(own, given, strict=True)}.values())

    def bring_in() -> None:
        for mine, theirs in pairs:
            mine.copy_(theirs)

    def replayed() -> torch.Tensor:
        graph.replay()
        return loss.clone()

    def call() -> torch.Tensor:
        bring_in()
        return replayed()

    def fill() -> None:
        step.pupil.restart()
        bring_in()

    return NetworkPeer(
        system, layout, call,
        lambda first: step.pupil.after([first, *(call() for _ in range(STEPS - 1))]),
        waiting(lesson.device),
        Replay(
            fill, graph.replay, [mine for mine, _ in pairs if mine.is_floating_point()], [loss],
            lambda: step.pupil.after([loss.clone(), *(replayed() for _ in range(STEPS - 1))]),
        ),
        step.pupil.restart, peak_bytes, config={"mode": mode} if mode else {},
    )  # fmt: skip
