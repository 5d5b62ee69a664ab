"""Nsight Compute: a process of its own that launches what is asked for, with counters read kernel by kernel."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from escalade import files, outside
from escalade.errors import EscaladeError, UnsupportedError
from escalade.profile.counters import COUNTS, METRICS, STALLS
from escalade.profile.parts import Part, Target
from escalade.profile.readings import Reading, parse

SECONDS = 300.0
"""The most that one run may take."""
_PERMISSION = "ERR_NVGPUCTRPERM"
_UNKNOWN = re.compile(r"Failed to find metric (.*)")
_PLACES = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
"""Where its installers put it, on the PATH or not."""


class NoCounters(EscaladeError):
    """Nsight Compute gave no counters, and why."""


def find() -> str | None:
    """The program, if it is here."""
    found = outside.find("ncu")
    if found is not None:
        return found
    elsewhere = sorted(
        path for place in _PLACES for path in pathlib.Path(place).glob("**/ncu") if path.is_file()
    )
    return str(elsewhere[-1]) if elsewhere else None


def command(program: str, metrics: Sequence[str], log: pathlib.Path) -> list[str]:
    """The command in front of what is profiled: metrics of the kernels between the profiler's start and stop.

    Clocks are left alone; caches are emptied before each kernel, and its passes.
    """
    options = {
        "--metrics": ",".join(metrics),
        "--page": "raw",
        "--print-units": "base",
        "--replay-mode": "kernel",
        "--cache-control": "all",
        "--clock-control": "none",
        "--profile-from-start": "off",
        "--target-processes": "application-only",
        "--log-file": str(log),
    }
    return [program, "--csv", *(word for option in options.items() for word in option)]


def profiled(
    program: str, function: str, asked: str, counts: bool = False
) -> tuple[str, list[Part], list[Reading]]:
    """The title of what `function` launches in a process under Nsight Compute, its parts, and what was counted.

    With `counts` what the twin counts is among that.

    The function finds what is asked in `sys.argv`, and calls `launch`. In the place of metrics that
    this version or architecture does not have come others, or none.
    """
    known = [*METRICS.values(), (STALLS,)]
    if counts:
        known += [(name,) for names in COUNTS.values() for name in names]
    while True:
        wanted = list(dict.fromkeys(names[0] for names in known if names))
        said, told = _run(program, wanted, function, asked)
        unknown = unknown_metrics(said, wanted)
        if not unknown:
            break
        known = [tuple(name for name in names if name not in unknown) for names in known]
    if "refusal" in told:
        raise UnsupportedError(told["refusal"])
    if _PERMISSION in said:
        raise NoCounters(
            f"ncu may not read the card's counters ({_PERMISSION}): the driver keeps them for root, unless its module "
            "is loaded with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if not told:
        raise NoCounters(f"under ncu nothing was launched: {_complaint(said)}")
    try:
        readings = parse(said)
    except EscaladeError as error:
        raise NoCounters(f"{error}: {_complaint(said)}") from error
    return told["title"], [Part(**each) for each in told["parts"]], readings


def _run(program: str, metrics: Sequence[str], function: str, asked: str) -> tuple[str, dict[str, Any]]:
    """What ncu said, and what the process in it told."""
    with tempfile.TemporaryDirectory(prefix="escalade-profile-") as folder:
        log, told = pathlib.Path(folder) / "metrics.csv", pathlib.Path(folder) / "told.json"
        try:
            done = outside.python_under(command(program, metrics, log), function, [asked, str(told)], SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCounters(f"ncu did not come to an end: {error}") from error
        said = done.stdout + done.stderr + (files.read(log) or b"").decode(errors="replace")
        return said, json.loads(files.read(told) or b"{}")


def launch(make: Callable[[], Target]) -> None:
    """What the process under Nsight Compute does: everything once to load it, and once to be counted."""
    told: dict[str, Any]
    try:
        target = make()
        target.run()
        target.wait()
        torch.cuda.profiler.start()
        parts = target.run()
        target.wait()
        torch.cuda.profiler.stop()
        told = {"title": target.title, "parts": [asdict(part) for part in parts]}
    except EscaladeError as error:
        told = {"refusal": str(error)}
    files.replace(pathlib.Path(sys.argv[2]), json.dumps(told).encode())


def unknown_metrics(said: str, wanted: Sequence[str]) -> list[str]:
    """The metrics that ncu refuses, of those that were asked for."""
    refused = [match.replace("\\", "") for match in _UNKNOWN.findall(said)]
    return [
        name for name in wanted if any(name in line or name.split(".")[0] + "." in line for line in refused)
    ]


def _complaint(said: str) -> str:
    """The line that says what is wrong, or the last one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    wrong = [line for line in lines if "==ERROR==" in line]
    return (wrong or lines or [""])[-1].removeprefix("==ERROR==").strip()
