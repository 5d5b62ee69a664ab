"""Whole training steps by PyTorch: eager, as one CUDA graph, or compiled into one.

A step is forward, loss, backward and fused SGD with momentum and weight decay, and in fp16 the loss scale. All systems
start from the same weights. After a few steps the losses, the momenta (sums of gradients), and the changes of
parameters and buffers are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import nn

from escalade.device.recording import capture_into
from escalade.device.timing import on_gpu
from escalade_apps.train.steps import Loss
from escalade_bench.peers.network import FORMATS, Maker, NetworkPeer, Peak, Replay, waiting
from escalade_bench.peers.torch_network import MODES, compile_model, repeat, require_cuda, warm_up

STEPS = 3
"""Steps before the comparison: the last one depends on weights and momenta of the earlier ones."""
MOMENTUM, DECAY = 0.9, 1e-2
"""The weight decay is large, so that a step without it is detected."""
MIXED = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Autocast dtype per dtype of a lesson."""
Call = Callable[[], Any]


@dataclass(frozen=True)
class Lesson:
    """Initial state and batch of a training step, shared by all systems."""

    model: nn.Module
    """The model on the device, in fp32 and training mode; never modified."""
    loss: Loss
    x: torch.Tensor
    """The batch on the device, in fp32, NCHW."""
    target: torch.Tensor
    """Second argument of the loss; x itself for an autoencoder."""
    dtype: str
    rate: float
    scale: float
    """Initial loss scale of fp16."""
    _models: dict[str, nn.Module] = field(default_factory=dict)

    def model_in(self, layout: str) -> nn.Module:
        """Return the model with its weights in a layout; cached, so that it does not count as a system's memory."""
        if layout not in self._models:
            placed = copy.deepcopy(self.model).to(memory_format=FORMATS[layout])  # type: ignore[call-overload]
            self._models[layout] = placed
        return self._models[layout]

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts to try, the one for tensor cores last; rows have only one."""
        return ("nchw", "nhwc") if self.x.dim() == 4 else ("flat",)

    @property
    def names(self) -> tuple[str, ...]:
        """Kind and name of every tensor that is compared, in the order of `Pupil.after`."""
        parameters = [name for name, _ in self.model.named_parameters()]
        buffers = [name for name, buffer in self.model.named_buffers() if buffer.is_floating_point()]
        return (
            "loss",
            *(f"{kind} of {name}" for kind in ("gradient", "update") for name in parameters),
            *(f"buffer {name}" for name in buffers),
        )

    def batch(self, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the batch and its targets into a layout; they stay one tensor if they are one."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.clone(memory_format=FORMATS[layout] if tensor.dim() == 4 else torch.preserve_format)

        x = copied(self.x)
        return x, x if self.target is self.x else copied(self.target)


class Pupil:
    """A copy of a lesson's model with an optimizer, which can be reset to the start."""

    def __init__(
        self, lesson: Lesson, layout: str, dtype: torch.dtype = torch.float32, fused: bool = False
    ) -> None:
        begin = lesson.model_in(layout)
        self.model = copy.deepcopy(begin).to(dtype)
        self._begin, self._own = _changed(begin), _changed(self.model)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(
            parameters, lesson.rate, momentum=MOMENTUM, weight_decay=DECAY, fused=fused
        )
        self._momenta = [torch.zeros_like(one).detach() for one in parameters]
        for one, momentum in zip(parameters, self._momenta, strict=True):
            self.optimizer.state[one]["momentum_buffer"] = momentum

    def restart(self) -> None:
        """Restore the initial weights, buffers and momenta in place, in two launches."""
        torch._foreach_copy_(self._own, self._begin)
        torch._foreach_zero_(self._momenta)

    def after(self, first: torch.Tensor, step: Call) -> list[torch.Tensor]:
        """Take the remaining steps after the one with the first loss; return the tensors to compare."""
        losses = torch.stack([first, *(step() for _ in range(STEPS - 1))])
        return [losses, *self._momenta, *torch._foreach_sub(self._own, self._begin)]

    def peer(
        self, system: str, layout: str, call: Call, restart: Call | None = None, **others: Any
    ) -> NetworkPeer:
        """Return a step as a system that is verified by the model's state after a few steps."""
        wait, results = waiting(self._momenta[0].device), partial(self.after, step=call)
        return NetworkPeer(system, layout, call, results, wait, restart=restart or self.restart, **others)


def _changed(model: nn.Module) -> list[torch.Tensor]:
    """Return the floating-point parameters and buffers themselves, not copies."""
    tensors = (*model.parameters(), *model.buffers())
    return [one.detach() for one in tensors if one.is_floating_point()]


class TorchStep:
    """A training step as PyTorch users write it, over a fixed batch."""

    def __init__(
        self,
        lesson: Lesson,
        layout: str,
        batch: tuple[torch.Tensor, torch.Tensor],
        *,
        mode: str | None = None,
        exact: bool = False,
    ) -> None:
        """Compile the step if there is a `mode`; compute in float64 if `exact`."""
        self.pupil = Pupil(
            lesson, layout, torch.float64 if exact else torch.float32, fused=lesson.device.type == "cuda"
        )
        self._batch = batch
        cast = None if exact else MIXED.get(lesson.dtype)
        scaled = not exact and lesson.dtype == "fp16"
        self._scaler = torch.amp.GradScaler(lesson.device.type, init_scale=lesson.scale, enabled=scaled)
        self._first_scale = lesson.scale
        model, loss, kind = self.pupil.model, lesson.loss, lesson.device.type

        def forward(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with torch.autocast(kind, cast or torch.float16, enabled=cast is not None):
                return loss(model(x), target)

        self._forward = compile_model(forward, mode) if mode else forward

    def __call__(self) -> torch.Tensor:
        """Take one step; return its loss."""
        self.pupil.optimizer.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self._forward(*self._batch)
            self._scaler.scale(loss).backward()
        self._scaler.step(self.pupil.optimizer)
        self._scaler.update()
        return loss.detach()

    def restart(self) -> None:
        """Restore in place all that a step changes: the model, the momenta and the loss scale."""
        self.pupil.restart()
        scale = getattr(self._scaler, "_scale", None)  # from the first step on, if the loss is scaled
        if scale is not None:
            scale.fill_(self._first_scale)
            self._scaler._growth_tracker.zero_()  # type: ignore[union-attr]


def results_of(lesson: Lesson, x: torch.Tensor | None = None, *, exact: bool = False) -> list[torch.Tensor]:
    """Return PyTorch's tensors to compare, in the lesson's dtype or float64, over its batch or another x."""
    layout = lesson.layouts[0 if exact else -1]
    batch = lesson.batch(layout)
    if x is not None:
        batch = x.to(memory_format=FORMATS[layout]), batch[1]
    if exact:
        wide = {one: one.double() if one.is_floating_point() else one for one in batch}
        batch = wide[batch[0]], wide[batch[1]]
    step = TorchStep(lesson, layout, batch, exact=exact)
    return step.pupil.after(step(), step)


def makers(lesson: Lesson) -> dict[str, Maker]:
    """Return PyTorch's systems for this step, each in the layouts to try; tensor cores are fastest in nhwc."""
    layouts = lesson.layouts if lesson.dtype == "fp32" else lesson.layouts[-1:]
    systems: dict[str, Callable[[Lesson, str], NetworkPeer]] = {
        "torch-eager": _eager,
        **{name: partial(_graphed, system=name) for name in ("torch-graph", *MODES)},
    }

    def maker(make: Callable[[Lesson, str], NetworkPeer]) -> Maker:
        return lambda task: [make(lesson, layout) for layout in layouts]

    return {name: maker(make) for name, make in systems.items()}


def _eager(lesson: Lesson, layout: str) -> NetworkPeer:
    batch = lesson.batch(layout)
    peak = Peak(lesson.device)
    step = TorchStep(lesson, layout, batch)
    with on_gpu():  # cuDNN chooses by timing
        if lesson.device.type == "cuda":
            repeat(step)
        _, peak_bytes = peak.of(step)
    return step.pupil.peer("torch-eager", layout, step, restart=step.restart, peak_bytes=peak_bytes)


def _graphed(lesson: Lesson, layout: str, system: str) -> NetworkPeer:
    """Make the whole step as one CUDA graph; a call copies its batch in and replays it."""
    require_cuda(system, lesson.device)
    mode = MODES.get(system)
    if mode:
        torch._dynamo.reset()
    given = lesson.batch(layout)
    peak = Peak(lesson.device)
    own = lesson.batch(layout)
    step = TorchStep(lesson, layout, own, mode=mode)
    pupil = step.pupil
    graph = torch.cuda.CUDAGraph()

    def capture() -> torch.Tensor:
        with capture_into(graph):
            return step()

    with on_gpu(lazily=bool(mode)), functorch.patch(force_non_lazy_backward_lowering=True):
        warm_up(step)  # compiles both directions before either runs
        pupil.optimizer.zero_grad(set_to_none=True)
        loss, peak_bytes = peak.of(capture)
    pairs = list({id(mine): (mine, theirs) for mine, theirs in zip(own, given, strict=True)}.values())

    def copy_batch() -> None:
        for mine, theirs in pairs:
            mine.copy_(theirs)

    def replay() -> torch.Tensor:
        graph.replay()
        return loss.clone()

    def call() -> torch.Tensor:
        copy_batch()
        return replay()

    def fill() -> None:
        step.restart()  # which also keeps the loss scale alive, whose memory the graph reads
        copy_batch()

    inputs, config = [mine for mine, _ in pairs if mine.is_floating_point()], {"mode": mode} if mode else {}
    alone = Replay(fill, graph.replay, inputs, [loss], lambda: pupil.after(loss.clone(), replay))
    return pupil.peer(
        system, layout, call, replay=alone, restart=step.restart, peak_bytes=peak_bytes, config=config
    )
