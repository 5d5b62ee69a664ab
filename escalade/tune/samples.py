"""Measured candidates as JSON lines: what a sweep writes, goes on from, and is judged by."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from escalade import ops
from escalade.errors import EscaladeError


class SamplesError(EscaladeError):
    """A file that holds something else."""


@dataclass(frozen=True)
class Sample:
    """One rung and config on one problem."""

    operation: str
    problem: str
    dtype: str
    layout: str
    architecture: str
    rung: str
    config: Mapping[str, Any]
    us: float | None
    """None if it was not timed: `failure` says why."""
    failure: str
    of: int
    """Samples that the problem has in all."""

    @property
    def key(self) -> str:
        return f"{self.operation} {self.problem} {self.dtype} {self.layout}"

    def parsed(self) -> Any:
        return replace(
            ops.operation(self.operation).parse(self.problem), dtype=self.dtype, layout=self.layout
        )


def load(path: pathlib.Path) -> dict[str, list[Sample]]:
    """The samples of every problem that has all of them, by problem; a run that was cut off may have left some."""
    if not path.exists():
        return {}
    found: dict[str, list[Sample]] = {}
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            sample = Sample(**json.loads(line))
        except (ValueError, TypeError) as error:
            if number == len(lines):
                break
            raise SamplesError(f"{path}, line {number}, is no measured candidate: {error}") from error
        found.setdefault(sample.key, []).append(sample)
    return {key: samples for key, samples in found.items() if len(samples) == samples[0].of}


def append(path: pathlib.Path, samples: Iterable[Sample]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(json.dumps(asdict(sample)) + "\n" for sample in samples))


def resume(path: pathlib.Path) -> dict[str, list[Sample]]:
    """What there is already; the rest of a problem that was cut off is dropped from the file."""
    found = load(path)
    if path.exists():
        whole = path.with_name(f".{path.name}.whole")
        whole.unlink(missing_ok=True)
        append(whole, (sample for samples in found.values() for sample in samples))
        os.replace(whole, path)
    return found
