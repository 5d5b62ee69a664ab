"""Sweep results: measured candidates as JSON lines."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from escalade import files, ops, parsing
from escalade.errors import EscaladeError


class SamplesError(EscaladeError):
    """File that does not hold sweep results."""


@dataclass(frozen=True)
class Sample:
    """Measurement of one rung and config on one problem."""

    operation: str
    problem: str
    dtype: str
    layout: str
    architecture: str
    rung: str
    config: Mapping[str, Any]
    us: float | None
    """Time in microseconds; None if `failure` is set."""
    failure: str
    of: int
    """Number of samples of the problem."""

    @property
    def key(self) -> str:
        return f"{self.operation} {self.problem} {self.dtype} {self.layout}"

    def parsed(self) -> Any:
        return replace(
            ops.operation(self.operation).parse(self.problem), dtype=self.dtype, layout=self.layout
        )


def load(path: pathlib.Path) -> dict[str, list[Sample]]:
    """Load the samples by problem, without problems that an interrupted run left incomplete."""
    lines = _lines(path, files.read(path) or b"")
    return {key: [sample for sample, _ in pairs] for key, pairs in lines.items()}


def append(path: pathlib.Path, samples: Iterable[Sample]) -> None:
    """Append the samples of a problem atomically. Safe with several processes."""
    more = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples).encode()
    files.update(path, lambda contents: (contents or b"") + more)


def resume(path: pathlib.Path) -> dict[str, list[Sample]]:
    """Load the samples, and drop incomplete problems from the file."""
    if not path.exists():
        return {}
    files.update(path, lambda contents: _whole(path, contents or b""))
    return load(path)


def _whole(path: pathlib.Path, contents: bytes) -> bytes:
    lines = _lines(path, contents)
    return b"".join(line + b"\n" for pairs in lines.values() for _, line in pairs)


def _lines(path: pathlib.Path, contents: bytes) -> dict[str, list[tuple[Sample, bytes]]]:
    """Return samples with their lines, of the complete problems."""
    found: dict[str, list[tuple[Sample, bytes]]] = {}
    *ended, last = contents.split(b"\n")
    if last and not _is_beginning(last):
        ended.append(last)
    for number, line in enumerate(ended, start=1):
        if not line.strip():
            continue
        try:
            sample = parsing.parse_dataclass(Sample, parsing.parse(line.decode()))
            if sample.of < 1:
                raise ValueError(f"has {sample.of} as its of, which must be at least 1")
        except ValueError as error:
            raise SamplesError(f"{path}, line {number}, is not a measured candidate: {error}") from error
        found.setdefault(sample.key, []).append((sample, line))
    # If two processes have measured the same problem, the last one counts.
    counts = {key: pairs[-1][0].of for key, pairs in found.items()}
    return {key: pairs[-counts[key] :] for key, pairs in found.items() if len(pairs) >= counts[key]}


def _is_beginning(line: bytes) -> bool:
    """Return True if the line is a truncated sample, and not the only line of some other file."""
    begin = json.dumps({"operation": ""})[:-2].encode()
    return line.startswith(begin) or begin.startswith(line)
