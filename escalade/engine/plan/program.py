"""The interface of programs, which run a plan on the tensors of a call or on memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from escalade.engine.plan.plan import Plan

Tensors = Sequence[torch.Tensor]
Dtypes = Sequence[torch.dtype]
OutTensors = Tensors | None
"""The caller's tensors for results, each with the shape and dtype of its result."""


class PlanProgram(Protocol):
    """A runnable plan.

    `call` runs on the tensors of a call. To run on the program's own memory: fill `inputs`, `run`, read `outputs`.
    """

    plan: Plan

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def outputs(self) -> tuple[torch.Tensor, ...]: ...
    def run(self) -> None: ...
    def call(self, tensors: Tensors, types: Dtypes, out: OutTensors = None) -> list[torch.Tensor]:
        """Run on these inputs and return the results in these dtypes: new tensors, or `out`."""

    def call_isolated(self, tensors: Tensors, types: Dtypes, out: OutTensors) -> list[torch.Tensor]:
        """Like `call`, without any memory that other calls write: for capture in the caller's CUDA graph, whose replays
        may overlap other calls."""

    def clone(self) -> PlanProgram:
        """Return a program that shares the weights but no buffers, so that both can run at once."""

    def record_stream(self, stream: torch.cuda.Stream) -> None: ...
    def repack(self) -> None:
        """Derive everything that is packed from constants again, after those were written to."""


def copy_into(out: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy results into `out`, skipping those that were written there already, and return `out`."""
    for tensor, result in zip(out, results, strict=True):
        if tensor is not result:
            # PyTorch refuses writes to an inference tensor outside inference mode.
            with torch.inference_mode() if tensor.is_inference() else nullcontext():
                tensor.copy_(result)
    return list(out)
