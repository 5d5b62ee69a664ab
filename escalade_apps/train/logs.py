"""Training logs: JSON lines, and optionally TensorBoard."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, Protocol

from escalade import files, parsing
from escalade.errors import UnsupportedError

STEP, EVALUATION = "step", "evaluation"


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
