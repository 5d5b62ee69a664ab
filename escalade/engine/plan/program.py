"""The interface of programs, which run a plan on the tensors of a call or on memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from escalade.engine.plan.plan import Plan

Tensors = Sequence[torch.Tensor]
OutTensors = Tensors | None
"""The caller's tensors for results, each with the shape and dtype of its result."""


class PlanProgram(Protocol):
    """A plan on memory of its own: fill `inputs`, `run`, read `outputs`."""

    plan: Plan

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def outputs(self) -> tuple[torch.Tensor, ...]: ...
    def run(self) -> None: ...
    def repack(self) -> None:
        """Derive everything that is packed from constants again, after those were written to."""


class BufferedProgram(PlanProgram, Protocol):
    """A program that also runs on the tensors of a call, with buffers that only one call can use at a time."""

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        """Run on these inputs and return the results in the model's dtypes: new tensors, or `out`."""

    def call_isolated(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        """Like `call`, without any memory that other calls write: for capture in the caller's CUDA graph, whose replays
        may overlap other calls."""

    def clone(self) -> BufferedProgram:
        """Return a program that shares the weights but no buffers, so that both can run at once."""

    def record_stream(self, stream: torch.cuda.Stream) -> None: ...


def copy_into(out: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy results into `out`, skipping those that were written there already, and return `out`."""
    for tensor, result in zip(out, results, strict=True):
        if tensor is not result:
            # PyTorch refuses writes to an inference tensor outside inference mode.
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                tensor.copy_(result)
    return list(out)
