"""Measurements as JSON lines: `results/<gpu>/<workload>.jsonl`, one record a line.

A record says what was measured, how fast it was, how right it was, and how to repeat it. A new
measurement of the same thing replaces the old one.
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
"""How the names of files end that lie beside the records and hold something else: the samples of `escalade.tune`."""
_WORKLOAD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}")
_TWIN = "twin on"
"""How the names of processors begin that are no GPUs."""
_OUTPUT_OPTIONS = ("--results", "--json", "--plot", "--output", "-o")


class StoreError(EscaladeError, ValueError):
    """A file of results does not hold what it should."""


@dataclass(frozen=True)
class Provenance:
    """The circumstances that a figure comes from, and the command that repeats it."""

    gpu: str
    driver: str
    versions: dict[str, str]
    commit: str
    date: str
    command: str


@dataclass(frozen=True)
class Record:
    """One measurement. Times are microseconds; None stands for what does not apply or was not measured."""

    workload: str
    problem: str
    dtype: str
    layout: str
    batch: int
    system: str
    """The system that was timed: `escalade`, or the peer."""
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
    """The median by the wall clock of one call as a user makes it, until its result is there."""
    images_per_s: float | None = None
    tflops: float | None = None
    """Operations of the plain algorithm over the median time, whatever a rung really does."""
    gbps: float | None = None
    """The fewest bytes over the median time."""
    floor_us: float | None = None
    peak_pct: float | None = None
    """`tflops` in percent of a large matrix product of the same dtype, measured in the same run."""
    copy_pct: float | None = None
    """`gbps` in percent of the rate of a copy, measured in the same run."""
    error: float | None = None
    tolerance: float | None = None
    accuracy: float | None = None
    """The share of a data set's items that were given their right class."""
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
    """Resident threads of an SM over the 2,048 it has room for."""
    workspace_bytes: int | None = None
    peak_bytes: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    """What the twin counted, or a profiler by the same names: see docs/twin.md."""
    failure: str = ""
    """Why there is no time: a wrong result, an error. A failed record has no times."""
    note: str = ""
    conditions: dict[str, Any] = field(default_factory=dict)
    """What the card was like meanwhile: see `escalade.device.nvml.GpuConditions`; empty where nobody could say."""
    case: str = ""
    """Name of the campaign's unit that measured it."""
    plan: str = ""
    """Digest of the rung, config and problem of every step that ran; empty for a peer."""
    code: dict[str, str] = field(default_factory=dict)
    """Digests of the machine code that ran, by kernel source; empty for a peer."""
    older: str = ""
    """Why the figure is no longer current: the kernel or the plan that changed since. Empty if it is current."""
    checked: str = ""
    """Digest of the package by which `older` was decided last: as long as it is the same, nothing has to be planned."""
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
        """Whether the kernels ran on a CPU: then it has counts, and no times that mean anything."""
        return self.gpu.startswith(_TWIN)

    @property
    def throttled(self) -> str:
        """Why the card held its clock down meanwhile, or nothing."""
        return str(self.conditions.get("throttled", ""))

    @property
    def key(self) -> tuple[str, ...]:
        """What a later record of the same takes the place of; a peer has one for a problem, whatever its layout."""
        layout = "" if self.is_peer else self.layout
        return (self.workload, self.problem, self.dtype, layout, self.system, self.rung)

    @property
    def comparison(self) -> tuple[str, str, str]:
        """The comparison it belongs to: the records of all systems on the same problem and dtype."""
        return self.workload, self.problem, self.dtype

    @property
    def time(self) -> float:
        """The median, of a record that was timed."""
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
    """Figures with six digits: more than any clock gives."""
    values = {name: _shortened(value) for name, value in dataclasses.asdict(record).items()}
    return json.dumps(values, sort_keys=False, allow_nan=False)


def _shortened(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if value == value and abs(value) != float("inf") else None
    return value


def load(path: pathlib.Path) -> list[Record]:
    """Every record of a file; a line that is none is an error that names it."""
    contents = files.read(path)
    if contents is None:
        raise StoreError(f"there is no file {path}")
    return [record for record, _ in _lines(path, contents)]


def require_file(path: pathlib.Path) -> None:
    """Refuses a place that records cannot be added to: none can be there, or the one that is holds something else."""
    files.require_writable_file(path)
    if path.exists():
        load(path)


def load_folder(folder: pathlib.Path) -> dict[str, list[Record]]:
    """All records under `results`, by GPU folder."""
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
    """Add records to a file, each in place of an older one of the same key; other lines stay as and where they are.

    Several processes may write to a file at once: none loses what another has written.
    """
    newest = {record.key: to_line(record).encode() for record in records}

    def merge(contents: bytes | None) -> bytes:
        # A key's first line has its place; one that was there twice is not afterwards.
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
    """The name of the file for a workload's records; a name that would lead elsewhere is refused."""
    name = f"{workload}.jsonl"
    if not _WORKLOAD.fullmatch(workload) or name.endswith(SWEEPS):
        raise StoreError(
            f"no file can be named after the workload {workload[:200]!r}: up to 100 letters, digits and any of _ . + - "
            "may be in its name, it begins with a letter or digit, and it does not end in _sweep"
        )
    return name


def _lines(path: pathlib.Path, contents: bytes) -> list[tuple[Record, bytes]]:
    """Each record, and the line that it was read from."""
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
    """The provenance of what runs now, in this process."""
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
    """The date of a record that is made now."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _without_outputs(arguments: Sequence[str]) -> list[str]:
    """The arguments without where the records went, which is no part of how they were made."""
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
    except Exception:  # whatever a missing library raises; `escalade doctor` says what to do
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
    """The checkout's commit, with `+changes` when the package differs from it.

    `ESCALADE_COMMIT` comes first: a copy of the sources on another machine may lie in no checkout, or in an older one.
    """
    if given := os.environ.get("ESCALADE_COMMIT"):
        return given
    # A look at the checkout: nothing is written to it, and no program that it names is run.
    quiet = ("git", "--no-optional-locks", "-c", "core.fsmonitor=false")
    git = (*quiet, "-C", pathlib.Path(__file__).parents[2])
    name = subprocesses.output(*git, "rev-parse", "--short=12", "HEAD", timeout=20).strip()
    if not name:
        return "unknown"
    changed = subprocesses.output(*git, "status", "--porcelain", "--", "escalade*/", timeout=20).strip()
    return name + ("+changes" if changed else "")
