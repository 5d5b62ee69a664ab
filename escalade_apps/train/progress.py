"""What a run says of its steps, seldom enough that it costs no time: each look at a loss waits for the GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from escalade.errors import EscaladeError
from escalade_apps.train import logs

_UNTOLD = 256
"""Losses that may wait on the device."""
_SECONDS = 0.2
"""How long they may wait there."""


class DivergedError(EscaladeError, ArithmeticError):
    """The loss is no number any more."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int
    total: int
    loss: float
    images_per_second: float


class Teller:
    """Collects the losses of steps, then logs all of them and tells of the last."""

    def __init__(
        self,
        device: torch.device,
        batch: int,
        total: int,
        written: Sequence[logs.Log],
        watch: Callable[[Progress], None],
    ) -> None:
        self._batch, self._total, self._logs, self._watch = batch, total, written, watch
        self._losses = torch.empty(_UNTOLD, device=device)
        self._waiting: list[tuple[int, float]] = []
        self._since = time.perf_counter()

    def restart(self) -> None:
        """The clock begins anew: what came before was no step."""
        self._since = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, rate: float) -> None:
        """A step that was taken, counted from 1, with its learning rate."""
        self._losses[len(self._waiting)].copy_(loss)
        self._waiting.append((step, rate))
        if len(self._waiting) == _UNTOLD or time.perf_counter() - self._since > _SECONDS:
            self.tell()

    def tell(self) -> None:
        if not self._waiting:
            return
        losses = self._losses[: len(self._waiting)].tolist()
        now = time.perf_counter()
        speed = self._batch * len(losses) / (now - self._since)
        for (step, rate), loss in zip(self._waiting, losses, strict=True):
            if not math.isfinite(loss):
                raise DivergedError(
                    f"the loss is {loss} at step {step:,}: the steps are too large; try a smaller --lr, or --dtype "
                    "bf16 or fp32. The last checkpoint is from before it"
                )
            for log in self._logs:
                log.write(logs.STEP, step, loss=loss, lr=rate)
        self._watch(Progress(self._waiting[-1][0], self._total, losses[-1], speed))
        self._waiting.clear()
        self._since = now
