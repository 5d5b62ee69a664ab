"""Report training progress in batches of steps, because reading a loss synchronizes with the GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from escalade.errors import EscaladeError
from escalade_apps.train import logs

_MAX_PENDING = 256
"""Losses buffered on the device."""
_MAX_SECONDS = 0.2
"""Time until buffered losses are reported."""


class DivergedError(EscaladeError, ArithmeticError):
    """The loss is infinite or NaN."""


@dataclass(frozen=True)
class Progress:
    """Last reported step of a run, of `total`."""

    step: int
    total: int
    loss: float
    images_per_second: float


class ProgressReporter:
    """Buffers the losses of steps on the device, then logs all of them and reports the last."""

    def __init__(
        self,
        device: torch.device,
        batch: int,
        total: int,
        written: Sequence[logs.Log],
        watch: Callable[[Progress], None],
    ) -> None:
        self._batch, self._total, self._logs, self._watch = batch, total, written, watch
        self._losses = torch.empty(_MAX_PENDING, device=device)
        self._pending: list[tuple[int, float]] = []
        self._since = time.perf_counter()

    def restart_clock(self) -> None:
        """Exclude the time since the last report, which was spent on something other than steps."""
        self._since = time.perf_counter()

    def add(self, step: int, loss: torch.Tensor, rate: float) -> None:
        """Add a finished step, counted from 1, with its learning rate."""
        self._losses[len(self._pending)].copy_(loss)
        self._pending.append((step, rate))
        if len(self._pending) == _MAX_PENDING or time.perf_counter() - self._since > _MAX_SECONDS:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        losses = self._losses[: len(self._pending)].tolist()
        now = time.perf_counter()
        speed = self._batch * len(losses) / (now - self._since)
        for (step, rate), loss in zip(self._pending, losses, strict=True):
            if not math.isfinite(loss):
                raise DivergedError(
                    f"the loss is {loss} at step {step:,}: training diverged; try a smaller --lr, or --dtype bf16 or "
                    "fp32. The last checkpoint is from before this step"
                )
            for log in self._logs:
                log.write(logs.STEP, step, loss=loss, lr=rate)
        self._watch(Progress(self._pending[-1][0], self._total, losses[-1], speed))
        self._pending.clear()
        self._since = now
