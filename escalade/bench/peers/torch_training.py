"""A step of training by PyTorch, and by a model of ours: launched one by one, as a CUDA graph, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from escalade.bench.peers.network import Maker, NetworkPeer, Replay, Task, waiting
from escalade.bench.peers.torch_network import repeat, require_cuda
from escalade.device.recording import recorded
from escalade.engine.graph.forms import STORAGE

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
RATE = 1e-3


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    """The gradients of all parameters that have one, where they are."""
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


class Trainer:
    """A model, and steps of it over the same rows."""

    def __init__(self, model: nn.Module, task: Task, loss: Loss) -> None:
        self._model = copy.deepcopy(model).to(task.device, STORAGE[task.dtype]).train()
        self._start = copy.deepcopy(self._model.state_dict())
        self._loss = loss
        self._optimizer = torch.optim.SGD(self._model.parameters(), RATE / len(task.x))
        self._begin: Callable[[], None] = lambda: None
        self.x = task.input("flat")

    def compile(self, mode: str) -> None:
        self._loss = torch.compile(self._loss, mode=mode, dynamic=False)
        if (
            mode == "max-autotune"
        ):  # it has CUDA graphs of its own, which must know when the last step is over
            self._begin = torch.compiler.cudagraph_mark_step_begin

    def __call__(self) -> None:
        self._begin()
        self._optimizer.zero_grad(set_to_none=True)
        self._learn()

    def _learn(self) -> None:
        with torch.enable_grad():
            self._loss(self._model, self.x).backward()
        self._optimizer.step()

    def gradients(self) -> list[torch.Tensor]:
        return gradients_of(self._model)

    def restart(self) -> None:
        """Goes back to the weights of the start, so that the next gradients are those of the reference."""
        self._model.load_state_dict(self._start)

    def captured(self) -> torch.cuda.CUDAGraph:
        """A step as one CUDA graph; gradients that are not there yet are written, not added to."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            repeat(self)
        torch.cuda.current_stream().wait_stream(side)
        self._optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with recorded(graph):
            self._learn()
        self.restart()
        return graph


def plain(system: str, loss: Loss) -> Maker:
    """The steps as a user writes them, launched one by one."""

    def make(task: Task) -> list[NetworkPeer]:
        return [_called(system, Trainer(task.model, task, loss), task)]

    return make


def graphed(system: str, loss: Loss) -> Maker:
    """The step as one CUDA graph, which is also what a call replays."""

    def make(task: Task) -> list[NetworkPeer]:
        require_cuda(system, task.device)
        return [_replayed(system, Trainer(task.model, task, loss), task)]

    return make


def compiled(system: str, loss: Loss) -> Maker:
    """A maker by `torch.compile`: the step captured here to be timed as the others' are; a call has graphs of its
    own."""

    def make(task: Task) -> list[NetworkPeer]:
        require_cuda(system, task.device)
        torch._dynamo.reset()
        graph, call = Trainer(task.model, task, loss), Trainer(task.model, task, loss)
        graph.compile("max-autotune-no-cudagraphs")
        call.compile("max-autotune")
        return [_both(_replayed(system, graph, task), _called(system, call, task))]

    return make


def fused(system: str, model: nn.Module, loss: Loss) -> Maker:
    """A maker of the same steps by another model of the same parameters; on a GPU also as one CUDA graph, for its time
    there."""

    def make(task: Task) -> list[NetworkPeer]:
        call = _called(system, Trainer(model, task, loss), task)
        if task.device.type != "cuda":
            return [call]
        return [_both(_replayed(system, Trainer(model, task, loss), task), call)]

    return make


def _called(system: str, trainer: Trainer, task: Task) -> NetworkPeer:
    if task.device.type == "cuda":
        repeat(trainer)
        trainer.restart()
    return NetworkPeer(
        system, "flat", trainer, lambda _: trainer.gradients(), waiting(task.device), restart=trainer.restart
    )


def _replayed(system: str, trainer: Trainer, task: Task) -> NetworkPeer:
    graph, x = trainer.captured(), task.input("flat")

    def fill() -> None:
        trainer.x.copy_(x)

    def call() -> None:
        fill()
        graph.replay()

    gradients = trainer.gradients()  # a replay writes to these
    return NetworkPeer(
        system, "flat", call, lambda _: gradients, waiting(task.device),
        Replay(fill, graph.replay, (trainer.x,), gradients), trainer.restart,
    )  # fmt: skip


def _both(replayed: NetworkPeer, called: NetworkPeer) -> NetworkPeer:
    """The times of one on the GPU, and the calls of the other."""

    def restart() -> None:
        replayed.restart()
        called.restart()

    return replace(called, replay=replayed.replay, restart=restart)
