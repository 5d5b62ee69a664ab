"""Training logs (JSON lines, and optionally CSV files and TensorBoard), and progress.

Progress is reported in batches of steps, because reading a loss synchronizes with the GPU.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from escalade import files, parsing
from escalade.errors import EscaladeError, UnsupportedError

STEP, EVALUATION = "step", "evaluation"
_MAX_PENDING = 256
"""Losses buffered on the device."""
_MAX_SECONDS = 0.2
"""Time until buffered losses are reported."""


class Log(Protocol):
    """Sink for steps and evaluations."""

    def write(self, event: str, step: int, **values: Any) -> None: ...

    def flush(self) -> None:
        """Write buffered events to disk."""

    def close(self) -> None: ...


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """Return the lines of a log, without a last one that was cut off when the process was killed."""
    lines = []
    for text in (files.read(path) or b"").splitlines():
        try:
            line = parsing.parse(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


class JsonLog:
    """One line of JSON per step and evaluation."""

    def __init__(self, path: pathlib.Path, since: int) -> None:
        """Open for appending. A run resumed after step `since` drops later lines of the interrupted process."""
        kept = [line for line in read(path) if line["step"] <= since] if since else []
        files.replace(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(path, "a")  # noqa: SIM115 - closed by `close`

    def write(self, event: str, step: int, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        self._file.close()


class CsvLog:
    """One CSV file for steps and one for evaluations, with a column per value."""

    def __init__(self, folder: pathlib.Path, since: int) -> None:
        """Open for appending. A run resumed after step `since` drops later rows of the interrupted process."""
        self._folder = folder
        self._rows: dict[str, list[dict[str, Any]]] = {event: [] for event in (STEP, EVALUATION)}
        """Rows that are not on disk yet, by event."""
        self._columns: dict[str, list[str]] = {}
        for event in self._rows:
            kept = [row for row in self.read(event) if int(row["step"]) <= since] if since else []
            self._write_all(event, kept)

    def path(self, event: str) -> pathlib.Path:
        return self._folder / f"{event}s.csv"

    def read(self, event: str) -> list[dict[str, Any]]:
        """Return the rows on disk, without a last one that was cut off when the process was killed."""
        text = (files.read(self.path(event)) or b"").decode(errors="replace")
        rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        return [row for row in rows if (row.get("step") or "").isdecimal() and None not in row.values()]

    def write(self, event: str, step: int, **values: Any) -> None:
        self._rows[event].append({"step": step, **values})

    def flush(self) -> None:
        for event, rows in self._rows.items():
            new = {name for row in rows for name in row} - {*self._columns[event]}
            if new:  # the header changes, so the file is written again
                self._write_all(event, [*self.read(event), *rows])
            elif rows:
                with open(self.path(event), "a", newline="") as file:
                    csv.DictWriter(file, self._columns[event]).writerows(rows)
                    file.flush()
                    os.fsync(file.fileno())
            rows.clear()

    def close(self) -> None:
        self.flush()

    def _write_all(self, event: str, rows: list[dict[str, Any]]) -> None:
        columns = self._columns[event] = [*dict.fromkeys(["step", *(name for row in rows for name in row)])]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(rows)
        files.replace(self.path(event), text.getvalue().encode())


class TensorBoardLog:
    """TensorBoard event files. Needs the package tensorboard."""

    def __init__(self, folder: pathlib.Path, since: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UnsupportedError(
                "--tensorboard needs the package tensorboard: pip install 'escalade[train]'"
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=since + 1 if since else None)

    def write(self, event: str, step: int, **values: Any) -> None:
        for name, value in values.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{event}/{name}", value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


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
        written: Sequence[Log],
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
                log.write(STEP, step, loss=loss, lr=rate)
        self._watch(Progress(self._pending[-1][0], self._total, losses[-1], speed))
        self._pending.clear()
        self._since = now
