"""A network made ready by one system, to be verified and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from escalade.engine.graph.forms import STORAGE
from escalade.errors import EscaladeError

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last, "flat": torch.contiguous_format}
"""How PyTorch calls the layouts; `flat` is what is not an image."""


class Unavailable(EscaladeError):
    """A system that cannot take part here; the sentence says why."""


@dataclass(frozen=True)
class Task:
    """What a system is asked to run: the model and its inputs, as they are before it converts them."""

    model: nn.Module
    """The model on the CPU, in fp32."""
    x: torch.Tensor
    """The input on the device, in fp32, NCHW if it is images."""
    dtype: str
    images: str = "nhwc"
    """The layout in which images come to Escalade."""

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def layout(self) -> str:
        """The one in which Escalade has its inputs."""
        return self.images if self.x.dim() == 4 else "flat"

    def input(self, layout: str | None = None) -> torch.Tensor:
        """The input in the dtype, and in a layout, without one as Escalade has it. It is a copy: images of one channel
        would otherwise keep the strides that they have."""
        return self.x.to(STORAGE[self.dtype], memory_format=FORMATS[layout or self.layout], copy=True)


@dataclass(frozen=True)
class Replay:
    """A CUDA graph over memory of its own."""

    fill: Callable[[], object]
    """Fills its inputs. They may share memory with later values, so a replay needs them anew."""
    run: Callable[[], None]
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    results: Callable[[], Sequence[torch.Tensor]] | None = None
    """What is judged after a replay, where that is more than its outputs: several steps of training."""


@dataclass(frozen=True)
class NetworkPeer:
    """`call` is what a user writes, with inputs that are on the device already; `replay` a CUDA graph of it alone."""

    system: str
    layout: str
    call: Callable[[], Any]
    results: Callable[[Any], Sequence[torch.Tensor]]
    """The results of a call, to be compared."""
    wait: Callable[[], None]
    replay: Replay | None = None
    restart: Callable[[], object] = lambda: None
    """Puts back what a call or a replay changes, so that the next one gives what is expected."""
    peak_bytes: int | None = None
    note: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What it was told: the mode of a compiler, the seconds that it took."""

    @property
    def name(self) -> str:
        return f"{self.system} {self.layout}"


Maker = Callable[[Task], list[NetworkPeer]]
"""Makes a system ready; several peers if it may do it in several layouts, of which the fastest counts."""


class Budget:
    """Seconds that peers which are slow to make may take together; without a limit, as many as they need."""

    def __init__(self, seconds: float | None = None) -> None:
        self._limit = seconds
        self._spent = 0.0

    def limited(self, system: str, make: Maker) -> Maker:
        """The maker, which refuses once the budget is spent, and says in its peers' config how long they took."""

        def made(task: Task) -> list[NetworkPeer]:
            if self._limit is not None and self._spent >= self._limit:
                raise Unavailable(f"{system} was not made: the {self._limit:g} s for slow peers were spent")
            began = time.perf_counter()
            try:
                found = make(task)
            finally:
                seconds = time.perf_counter() - began
                self._spent += seconds
            return [
                replace(peer, config={**peer.config, "seconds_to_make": round(seconds, 1)}) for peer in found
            ]

        return made


def tensors(result: Any) -> list[torch.Tensor]:
    """The results of a network, one or several in whichever structure."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def waiting(device: torch.device) -> Callable[[], None]:
    """A call that waits until the device has nothing left to do."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


class Peak:
    """PyTorch's memory from here on: what is allocated at most in one run, weights and inputs included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._before = torch.cuda.memory_allocated(device) if self._on_gpu else 0

    def of(self, run: Callable[[], Any]) -> tuple[Any, int | None]:
        """What the run gives, and the bytes."""
        if not self._on_gpu:
            return run(), None
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = run()
        torch.cuda.synchronize(self._device)
        return result, torch.cuda.max_memory_allocated(self._device) - self._before
