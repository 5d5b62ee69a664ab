"""The course of a run: lines of JSON, and TensorBoard's files if they are asked for."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, Protocol

from escalade import files, parsing
from escalade.errors import UnsupportedError

STEP, EVALUATION = "step", "evaluation"


class Log(Protocol):
    """Where what happens is written down."""

    def write(self, event: str, step: int, **values: Any) -> None: ...

    def keep(self) -> None:
        """What has been written survives the end of the process, and of the machine."""

    def close(self) -> None: ...


def read(path: pathlib.Path) -> list[dict[str, Any]]:
    """The lines of a log; one that was cut short when the process ended is left out."""
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
    """A line of JSON for each step and each evaluation."""

    def __init__(self, path: pathlib.Path, since: int) -> None:
        """A run that goes on behind step `since` forgets what an earlier process did after it."""
        kept = [line for line in read(path) if line["step"] <= since] if since else []
        files.replace(path, "".join(json.dumps(line) + "\n" for line in kept).encode())
        self._file = open(path, "a")  # noqa: SIM115 - closed by `close`

    def write(self, event: str, step: int, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "step": step, **values}) + "\n")

    def keep(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.keep()
        self._file.close()


class TensorBoardLog:
    """Files for TensorBoard, which has to be installed."""

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

    def keep(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
