"""A network prepared by one system, ready to be verified and timed."""

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
"""PyTorch's memory format per layout; `flat` is for inputs that are not images."""
TO_MAKE = "seconds_to_make"
"""Config key of a peer's record: the seconds that tracing and compiling it took."""


class Unavailable(EscaladeError):
    """The system cannot run here; the message gives the reason."""


@dataclass(frozen=True)
class Task:
    """The model and inputs that a system runs, before it converts them."""

    model: nn.Module
    """The model on the CPU, in fp32."""
    x: torch.Tensor
    """The input on the device, in fp32, NCHW if it is images."""
    dtype: str
    images: str = "nhwc"
    """Layout of Escalade's images."""

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def layout(self) -> str:
        """Layout of Escalade's inputs."""
        return self.images if self.x.dim() == 4 else "flat"

    def input(self, layout: str | None = None) -> torch.Tensor:
        """Return the input in the task's dtype and a layout (default: Escalade's). It is a copy, because images of one
        channel would keep their old strides otherwise."""
        return self.x.to(STORAGE[self.dtype], memory_format=FORMATS[layout or self.layout], copy=True)


@dataclass(frozen=True)
class Replay:
    """A CUDA graph over its own memory."""

    fill: Callable[[], object]
    """Fills its inputs before every replay, since they may share memory with later values."""
    run: Callable[[], None]
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    results: Callable[[], Sequence[torch.Tensor]] | None = None
    """Returns the tensors to compare after a replay, if not the outputs: those of several training steps."""


@dataclass(frozen=True)
class NetworkPeer:
    """A prepared system: a user's `call`, with inputs already on the device, and if possible a `replay` of its CUDA
    graph."""

    system: str
    layout: str
    call: Callable[[], Any]
    results: Callable[[Any], Sequence[torch.Tensor]]
    """Returns the tensors of a call to compare."""
    wait: Callable[[], None]
    replay: Replay | None = None
    restart: Callable[[], object] = lambda: None
    """Restores the state that a call or a replay changes, so that the next one has the same results."""
    peak_bytes: int | None = None
    note: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings for the record, such as a compiler's mode and duration."""

    @property
    def name(self) -> str:
        return f"{self.system} {self.layout}"


Maker = Callable[[Task], list[NetworkPeer]]
"""Prepares a system; one peer per layout, of which the fastest counts."""


class Budget:
    """Total seconds for preparing slow peers; None is unlimited."""

    def __init__(self, seconds: float | None = None) -> None:
        self._limit = seconds
        self._spent = 0.0

    def limited(self, system: str, make: Maker) -> Maker:
        """Wrap a maker: refuse once the budget is spent, and record the seconds in the config of its peers."""

        def made(task: Task) -> list[NetworkPeer]:
            if self._limit is not None and self._spent >= self._limit:
                raise Unavailable(
                    f"{system} was not prepared: the {self._limit:g} s for slow peers were spent"
                )
            began = time.perf_counter()
            try:
                found = make(task)
            finally:
                seconds = time.perf_counter() - began
                self._spent += seconds
            took = {TO_MAKE: round(seconds, 1)}
            return [replace(peer, config={**peer.config, **took}) for peer in found]

        return made


def tensors(result: Any) -> list[torch.Tensor]:
    """Return all tensors of a result of any structure."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def waiting(device: torch.device) -> Callable[[], None]:
    """Return a function that waits for the device."""
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else (lambda: None)


class Peak:
    """Peak of PyTorch's memory in one run, with all allocated since construction (weights, inputs)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._before = torch.cuda.memory_allocated(device) if self._on_gpu else 0

    def of(self, run: Callable[[], Any]) -> tuple[Any, int | None]:
        """Return the result of a run, and the bytes."""
        if not self._on_gpu:
            return run(), None
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        result = run()
        torch.cuda.synchronize(self._device)
        return result, torch.cuda.max_memory_allocated(self._device) - self._before
