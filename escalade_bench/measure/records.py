"""Measurements as JSON lines: `results/<gpu>/<workload>.jsonl`, one record per line.

A record holds what was measured, its time and error, and the command that repeats it. A new record replaces an older
one with the same key.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from escalade import files, parsing, subprocesses
from escalade.device.nvrtc import compiler_version
from escalade.errors import EscaladeError
from escalade.version import VERSION

SWEEPS = "_sweep.jsonl"
"""Suffix of other files in the folders of records: the samples of `escalade.tune`."""
_WORKLOAD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
_TWIN = "twin on"
"""Prefix of the names of CPUs."""
_OUTPUT_OPTIONS = ("--results", "--json", "--plot", "--output", "-o")


class StoreError(EscaladeError, ValueError):
    """A file of results is malformed."""


@dataclass(frozen=True)
class Provenance:
    """Provenance of a figure: hardware, versions, commit, and the command that repeats it."""

    gpu: str
    driver: str
    versions: dict[str, str]
    commit: str
    date: str
    command: str


@dataclass(frozen=True)
class Record:
    """One measurement. Times are in microseconds; None means not applicable or not measured."""

    workload: str
    problem: str
    dtype: str
    layout: str
    batch: int
    system: str
    """The timed system: `escalade`, or a peer."""
    rung: str
    """The rung of Escalade's ladder; empty for a peer."""
    config: dict[str, Any] = field(default_factory=dict)
    timing: str = ""
    """`graph`, `eager`, `calls`, `cpu` or `twin`: see `escalade.device.timing`."""
    samples: int = 0
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    wall_us: float | None = None
    """Median wall-clock time of one call as a user makes it, until its result is complete."""
    images_per_s: float | None = None
    tflops: float | None = None
    """Operations of the direct algorithm over the median time, whichever algorithm the rung uses."""
    gbps: float | None = None
    """Compulsory traffic over the median time."""
    floor_us: float | None = None
    peak_pct: float | None = None
    """`tflops` in percent of a large matrix product of the same dtype, measured in the same run."""
    copy_pct: float | None = None
    """`gbps` in percent of the rate of a copy, measured in the same run."""
    error: float | None = None
    tolerance: float | None = None
    accuracy: float | None = None
    """Top-1 accuracy on a data set."""
    predicted_gain: float | None = None
    gain: float | None = None
    gain_over: str = ""
    """The rung, dtype and layout that `gain` compares with."""
    peer_gain: float | None = None
    peer: str = ""
    """The fastest peer of the same dtype, which `peer_gain` compares with."""
    registers: int | None = None
    spill_bytes: int | None = None
    occupancy: float | None = None
    """Resident threads of an SM over its maximum of 2,048."""
    workspace_bytes: int | None = None
    peak_bytes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """Counts by the twin, or by a profiler under the same names: see docs/twin.md."""
    failure: str = ""
    """Reason for a missing time: a wrong result or an error. A failed record has no times."""
    note: str = ""
    conditions: dict[str, Any] = field(default_factory=dict)
    """State of the card meanwhile: see `escalade.device.nvml.GpuConditions`; empty if unknown."""
    case: str = ""
    """Name of the campaign's unit that measured it."""
    plan: str = ""
    """Digest of the rung, config and problem of every step that ran; empty for a peer."""
    code: dict[str, str] = field(default_factory=dict)
    """Digests of the machine code that ran, by kernel source; empty for a peer."""
    older: str = ""
    """Reason why the figure is stale: the kernel or plan that has changed since. Empty if it is current."""
    checked: str = ""
    """Digest of the package when `older` was last decided: as long as it is equal, nothing has to be planned."""
    gpu: str = ""
    driver: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    command: str = ""

    @property
    def is_peer(self) -> bool:
        return self.system != "escalade"

    @property
    def is_on_twin(self) -> bool:
        """True if the kernels ran on a CPU: such a record has counts, and its times mean nothing."""
        return self.gpu.startswith(_TWIN)

    @property
    def throttled(self) -> str:
        """Return why the card throttled meanwhile; empty if it did not."""
        return str(self.conditions.get("throttled", ""))

    @property
    def key(self) -> tuple[str, ...]:
        """Key by which a later record replaces this one; a peer has one per problem, whatever its layout."""
        layout = "" if self.is_peer else self.layout
        return (self.workload, self.problem, self.dtype, layout, self.system, self.rung)

    @property
    def comparison(self) -> tuple[str, str, str]:
        """Key of its comparison: the records of all systems on the same problem and dtype."""
        return self.workload, self.problem, self.dtype

    @property
    def time(self) -> float:
        """The median; raises if the record was not timed."""
        if self.median_us is None:
            raise StoreError(
                f"the record of {' '.join(self.key)} has no time: {self.failure or 'it was not timed'}"
            )
        return self.median_us

    def stamped(self, provenance: Provenance) -> Record:
        return dataclasses.replace(self, **dataclasses.asdict(provenance))


def gpu_folder(gpu: str) -> str:
    """`NVIDIA H200` becomes `h200`."""
    name = re.sub(r"\b(nvidia|geforce)\b", " ", gpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "unknown"


def to_line(record: Record) -> str:
    """Round figures to six digits: more than any clock resolves."""
    values = {name: _shortened(value) for name, value in dataclasses.asdict(record).items()}
    return json.dumps(values, sort_keys=False, allow_nan=False)


def _shortened(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value and abs(value) != float("inf") else None
    return value


def load(path: pathlib.Path) -> list[Record]:
    """Return every record of a file; an invalid line raises an error with its number."""
    contents = files.read(path)
    if contents is None:
        raise StoreError(f"there is no file {path}")
    return [record for record, _ in _lines(path, contents)]


def require_file(path: pathlib.Path) -> None:
    """Raise if records cannot be added to a file: it cannot be created, or holds something else."""
    files.require_writable_file(path)
    if path.exists():
        load(path)


def load_folder(folder: pathlib.Path) -> dict[str, list[Record]]:
    """Return all records under `results`, by GPU folder."""
    if not folder.is_dir():
        return {}
    found = {
        gpu.name: [
            record
            for path in sorted(gpu.glob("*.jsonl"))
            if not path.name.endswith(SWEEPS)
            for record in load(path)
        ]
        for gpu in sorted(folder.iterdir())
        if gpu.is_dir()
    }
    return {gpu: records for gpu, records in found.items() if records}


def write(path: pathlib.Path, records: Sequence[Record]) -> None:
    """Add records to a file, each replacing an older one with the same key; other lines are unchanged.

    Safe for concurrent processes: none loses another's records.
    """
    newest = {record.key: to_line(record).encode() for record in records}

    def merge(contents: bytes | None) -> bytes:
        # The first line of a key is replaced; duplicates are removed.
        lines: dict[object, bytes] = {
            old.key if old.key in newest else number: line
            for number, (old, line) in enumerate(_lines(path, contents or b""))
        }
        return b"".join(line + b"\n" for line in (lines | newest).values())

    files.update(path, merge)


def file_away(folder: pathlib.Path, records: Iterable[Record]) -> list[pathlib.Path]:
    """Write each record to the file of its GPU and workload; return the files."""
    groups: dict[pathlib.Path, list[Record]] = {}
    for record in records:
        path = folder / gpu_folder(record.gpu) / file_name(record.workload)
        groups.setdefault(path, []).append(record)
    for path, group in groups.items():
        write(path, group)
    return list(groups)


def file_name(workload: str) -> str:
    """Return the file name for a workload's records; raises for names that would escape the folder."""
    name = f"{workload}.jsonl"
    if not _WORKLOAD.fullmatch(workload) or name.endswith(SWEEPS):
        raise StoreError(
            f"no file can be named after the workload {workload[:200]!r}: up to 100 letters, digits and any of _ . + - "
            "may be in its name, it begins with a letter or digit, and it does not end in _sweep"
        )
    return name


def _lines(path: pathlib.Path, contents: bytes) -> list[tuple[Record, bytes]]:
    """Yield each record with its line."""
    return [
        (_parse(line, f"{path}, line {number}"), line.strip())
        for number, line in enumerate(contents.split(b"\n"), start=1)
        if line.strip()
    ]


def _parse(line: bytes, where: str) -> Record:
    try:
        values = parsing.parse(line.decode())
    except UnicodeDecodeError as error:
        raise StoreError(f"{where} is no text in UTF-8 ({error}); mend or delete the line") from error
    except ValueError as error:
        raise StoreError(f"{where} is not JSON ({error}); mend or delete the line") from error
    try:
        return parsing.parse_dataclass(Record, values)
    except ValueError as error:
        raise StoreError(f"{where} {error}") from error


def provenance(device: torch.device, command: str | None = None) -> Provenance:
    """Return the provenance of this process."""
    on_gpu = device.type == "cuda"
    return Provenance(
        gpu=torch.cuda.get_device_name(device) if on_gpu else f"{_TWIN} {platform.machine()}",
        driver=driver_version() if on_gpu else "",
        versions=versions(),
        commit=commit(),
        date=now(),
        command=command or shlex.join(["escalade", *_without_outputs(sys.argv[1:])]),
    )


def now() -> str:
    """Return the date for a new record."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _without_outputs(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without the output folder, which does not affect the figures."""
    kept: list[str] = []
    given = iter(arguments)
    for argument in given:
        if argument in _OUTPUT_OPTIONS:
            next(given, None)
        elif not argument.startswith(tuple(f"{option}=" for option in _OUTPUT_OPTIONS)):
            kept.append(argument)
    return kept


def versions() -> dict[str, str]:
    found = {
        "escalade": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version() or "none") if torch.cuda.is_available() else "none",
    }
    try:
        found["nvrtc"] = compiler_version().removeprefix("nvrtc ")
    except Exception:  # a missing library may raise anything; `escalade doctor` gives advice
        found["nvrtc"] = "none"
    return found


@cache
def driver_version() -> str:
    asked = subprocesses.output(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", timeout=20
    )
    if asked.strip():
        return asked.splitlines()[0].strip()
    kernel_module = pathlib.Path("/proc/driver/nvidia/version")
    found = re.search(r"\b\d+\.\d+(\.\d+)?\b", kernel_module.read_text()) if kernel_module.is_file() else None
    return found[0] if found else "unknown"


@cache
def commit() -> str:
    """Return the checkout's commit, with `+changes` if the package differs from it.

    `ESCALADE_COMMIT` takes precedence: a copy of the sources on another machine may be outside a checkout, or in an old
    one.
    """
    if given := os.environ.get("ESCALADE_COMMIT"):
        return given
    # Read-only: nothing in the checkout is written, and no hook or filter of it is run.
    quiet = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
    git = (*quiet, "-C", pathlib.Path(__file__).parents[2])
    name = subprocesses.output(*git, "rev-parse", "--short=12", "HEAD", timeout=20).strip()
    if not name:
        return "unknown"
    changed = subprocesses.output(*git, "status", "--porcelain", "--", "escalade*/", timeout=20).strip()
    return name + ("+changes" if changed else "")
