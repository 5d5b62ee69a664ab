"""One step of training: the network forwards and backwards, and the step of plain gradient descent."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from escalade.bench.networks.contender import Contender, Entry, Maker, Replay, waiting
from escalade.bench.networks.judging import Standard
from escalade.bench.networks.torch_peers import repeat, require_cuda
from escalade.engine.graph.forms import STORAGE
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.precision import precision

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
RATE = 1e-3
MOST = 4.0
"""Times the most that is allowed of a network: gradients come through every layer twice, and their sums over a batch
cancel in part."""


def standard(
    model: nn.Module, x: torch.Tensor, dtype: str, loss: Loss, expected: Sequence[torch.Tensor]
) -> Standard:
    """Each parameter's gradient by itself, and how far PyTorch's is from it in that dtype."""
    with precision(dtype):
        its = gradients(model, x, loss, len(x), STORAGE[dtype])
    own = tuple(relative_error(one, right) for one, right in zip(its, expected, strict=True))
    return Standard(dtype, tuple(expected), own, MOST)


def gradients(
    model: nn.Module, x: torch.Tensor, loss: Loss, chunk: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """Of all parameters."""
    its = copy.deepcopy(model).to(x.device, dtype)
    with torch.enable_grad():
        for part in x.split(chunk):
            loss(its, part.to(dtype)).backward()
    return _gradients(its)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    return [gradient for gradient in found if gradient is not None]


class Trainer:
    """A model, and steps of it over the same rows."""

    def __init__(self, model: nn.Module, entry: Entry, loss: Loss) -> None:
        self._model = copy.deepcopy(model).to(entry.device, STORAGE[entry.dtype]).train()
        self._start = copy.deepcopy(self._model.state_dict())
        self._loss = loss
        self._optimizer = torch.optim.SGD(self._model.parameters(), RATE / len(entry.x))
        self._begin: Callable[[], None] = lambda: None
        self.x = entry.input("flat")

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
        return _gradients(self._model)

    def restart(self) -> None:
        """From the weights of the start, so that the next gradients are those of the reference."""
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
        with torch.cuda.graph(graph):
            self._learn()
        self.restart()
        return graph


def plain(system: str, loss: Loss) -> Maker:
    """The steps as a user writes them, launched one by one."""

    def make(entry: Entry) -> list[Contender]:
        return [_called(system, Trainer(entry.model, entry, loss), entry)]

    return make


def graphed(system: str, loss: Loss) -> Maker:
    """The step as one CUDA graph, which is also what a call replays."""

    def make(entry: Entry) -> list[Contender]:
        require_cuda(system, entry.device)
        return [_replayed(system, Trainer(entry.model, entry, loss), entry)]

    return make


def compiled(system: str, loss: Loss) -> Maker:
    """By `torch.compile`: the step captured here to be timed as the others' are; a call has graphs of its own."""

    def make(entry: Entry) -> list[Contender]:
        require_cuda(system, entry.device)
        torch._dynamo.reset()
        graph, call = Trainer(entry.model, entry, loss), Trainer(entry.model, entry, loss)
        graph.compile("max-autotune-no-cudagraphs")
        call.compile("max-autotune")
        return [_both(_replayed(system, graph, entry), _called(system, call, entry))]

    return make


def fused(system: str, model: nn.Module, loss: Loss) -> Maker:
    """The same steps by another model of the same parameters; on a GPU also as one CUDA graph, for its time there."""

    def make(entry: Entry) -> list[Contender]:
        call = _called(system, Trainer(model, entry, loss), entry)
        if entry.device.type != "cuda":
            return [call]
        return [_both(_replayed(system, Trainer(model, entry, loss), entry), call)]

    return make


def _called(system: str, trainer: Trainer, entry: Entry) -> Contender:
    if entry.device.type == "cuda":
        repeat(trainer)
        trainer.restart()
    return Contender(
        system, "flat", trainer, lambda _: trainer.gradients(), waiting(entry.device), restart=trainer.restart
    )


def _replayed(system: str, trainer: Trainer, entry: Entry) -> Contender:
    graph, x = trainer.captured(), entry.input("flat")

    def fill() -> None:
        trainer.x.copy_(x)

    def call() -> None:
        fill()
        graph.replay()

    gradients = trainer.gradients()  # a replay writes to these
    return Contender(
        system, "flat", call, lambda _: gradients, waiting(entry.device),
        Replay(fill, graph.replay, (trainer.x,), gradients), trainer.restart,
    )  # fmt: skip


def _both(replayed: Contender, called: Contender) -> Contender:
    """The times of one on the GPU, and the calls of the other."""

    def restart() -> None:
        replayed.restart()
        called.restart()

    return replace(called, replay=replayed.replay, restart=restart)
