"""What runs a plan: over the tensors of a call, or over memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from escalade.engine.plan.plan import Plan

Rooms = Sequence[torch.Tensor] | None
"""Where the caller wants the results, each of its size and type."""


class Program(Protocol):
    """What an engine runs, over the tensors of a call; or over its own: `inputs` are filled, then `run`, then `outputs`
    hold the results.
    """

    plan: Plan

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def outputs(self) -> tuple[torch.Tensor, ...]: ...
    def run(self) -> None: ...
    def over(
        self,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        rooms: Rooms = None,
    ) -> list[torch.Tensor]:
        """Runs over these inputs; the results, of these types, are the caller's own, in the caller's rooms if there are
        any."""

    def apart(
        self, tensors: Sequence[torch.Tensor], types: Sequence[torch.dtype], rooms: Rooms
    ) -> list[torch.Tensor]:
        """Runs over these with nothing that other calls write: for a CUDA graph of the caller's, which may run at any
        time.
        """

    def another(self) -> Program:
        """A program of this plan over other buffers, with these weights: both may run at once."""

    def used_on(self, stream: torch.cuda.Stream) -> None: ...


def settled(rooms: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rooms with the results in them; those that were written there are there."""
    for room, result in zip(rooms, results, strict=True):
        if room is not result:
            with torch.inference_mode() if room.is_inference() else nullcontext():  # where it may be written
                room.copy_(result)
    return list(rooms)
