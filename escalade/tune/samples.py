"""Measured candidates as JSON lines: what a sweep writes, goes on from, and is judged by."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from escalade import files, ops, parsing
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
    lines = _lines(path, files.read(path) or b"")
    return {key: [sample for sample, _ in pairs] for key, pairs in lines.items()}


def append(path: pathlib.Path, samples: Iterable[Sample]) -> None:
    """A problem's samples, all or none of them: other processes may do the same with theirs."""
    more = "".join(json.dumps(asdict(sample)) + "\n" for sample in samples).encode()
    files.update(path, lambda contents: (contents or b"") + more)


def resume(path: pathlib.Path) -> dict[str, list[Sample]]:
    """What there is already; the rest of a problem that was cut off is dropped from the file."""
    if not path.exists():
        return {}
    files.update(path, lambda contents: _whole(path, contents or b""))
    return load(path)


def _whole(path: pathlib.Path, contents: bytes) -> bytes:
    lines = _lines(path, contents)
    return b"".join(line + b"\n" for pairs in lines.values() for _, line in pairs)


def _lines(path: pathlib.Path, contents: bytes) -> dict[str, list[tuple[Sample, bytes]]]:
    """Samples and their lines, of the problems that have all of them."""
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
                raise ValueError(f"has {sample.of} as its of, which is no number of samples")
        except ValueError as error:
            raise SamplesError(f"{path}, line {number}, is no measured candidate: {error}") from error
        found.setdefault(sample.key, []).append((sample, line))
    # Two processes may have measured the same problem: then the last counts.
    counts = {key: pairs[-1][0].of for key, pairs in found.items()}
    return {key: pairs[-counts[key] :] for key, pairs in found.items() if len(pairs) >= counts[key]}


def _is_beginning(line: bytes) -> bool:
    """Whether the line is the beginning of a sample that was cut off; another file that happens to have one line is not
    to be taken for that."""
    begin = json.dumps({"operation": ""})[:-2].encode()
    return line.startswith(begin) or begin.startswith(line)
