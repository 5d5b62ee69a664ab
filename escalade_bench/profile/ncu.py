"""Nsight Compute: run a target in a process under `ncu`, and read the counters of each launch."""

from __future__ import annotations

import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from escalade import files, subprocesses
from escalade.errors import EscaladeError, UnsupportedError
from escalade.terminal_text import counted
from escalade_bench.profile.counters import COUNTS, METRICS, STALLS, Counters, names, parse
from escalade_bench.profile.target import Part, Target

SECONDS = 300.0
"""Time limit of one run."""
HOW = "counters by ncu, caches empty before each kernel"
_PERMISSION = "ERR_NVGPUCTRPERM"
_UNKNOWN = re.compile(r"Failed to find metric (.*)")
_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
"""Folders of its installers, which may not be on the PATH."""
_OPTIONS = (
    "--csv --page raw --print-units base --replay-mode kernel --cache-control all --clock-control none "
    "--profile-from-start off --target-processes application-only"
)


class NoCounters(EscaladeError):
    """Nsight Compute read no counters; the message gives the reason."""


def find() -> str | None:
    """Return the path of `ncu`, or None."""
    found = [path for folder in _FOLDERS for path in pathlib.Path(folder).glob("**/ncu") if path.is_file()]
    return subprocesses.find_program("ncu") or (str(max(found)) if found else None)


def profiled(
    program: str, function: Callable[[], None], asked: str, counts: bool = False
) -> tuple[str, list[Part], list[Counters]]:
    """Run `function` under ncu; return its target's title, parts and the counters of each launch.

    The function reads `asked` from `sys.argv[1]` and calls `launch`. `counts` adds the counts of the twin. Metrics that
    this ncu or architecture does not have are replaced by their alternatives, or left out.
    """
    figures = (*METRICS.values(), *(COUNTS.values() if counts else ()))
    known = [*(each for expression in figures for each in names(expression)), (STALLS,)]
    while True:
        wanted = list(dict.fromkeys(each[0] for each in known if each))
        output, told = _run(program, wanted, function, asked)
        unknown = unknown_metrics(output, wanted)
        if not unknown:
            break
        known = [tuple(name for name in each if name not in unknown) for each in known]
    if "refusal" in told:
        raise UnsupportedError(told["refusal"])
    if _PERMISSION in output:
        raise NoCounters(
            f"ncu may not read the card's counters ({_PERMISSION}): the driver keeps them for root, unless its module "
            "is loaded with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if not told:
        raise NoCounters(f"under ncu nothing was launched: {_complaint(output)}")
    try:
        launches = parse(output)
    except EscaladeError as error:
        raise NoCounters(f"{error}: {_complaint(output)}") from error
    return told["title"], [Part(**each) for each in told["parts"]], launches


def _run(
    program: str, metrics: Sequence[str], function: Callable[[], None], asked: str
) -> tuple[str, dict[str, Any]]:
    """Return the output of ncu, and the JSON of `launch`."""
    with tempfile.TemporaryDirectory(prefix="escalade-profile-") as folder:
        log, told = pathlib.Path(folder) / "metrics.csv", pathlib.Path(folder) / "told.json"
        command = [program, *_OPTIONS.split(), "--metrics", ",".join(metrics), "--log-file", str(log)]
        name = f"{function.__module__}.{function.__name__}"
        try:
            done = subprocesses.run_python_under(command, name, [asked, str(told)], SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCounters(f"ncu did not finish: {error}") from error
        output = done.stdout + done.stderr + (files.read(log) or b"").decode(errors="replace")
        return output, json.loads(files.read(told) or b"{}")


def launch(make: Callable[[], Target]) -> None:
    """Runs in the process under ncu: run a target once to load its kernels, and once to be counted."""
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


def unknown_metrics(output: str, wanted: Sequence[str]) -> list[str]:
    """Return the metrics that ncu does not know."""
    refused = [match.replace("\\", "") for match in _UNKNOWN.findall(output)]
    return [
        name for name in wanted if any(name in line or name.split(".")[0] + "." in line for line in refused)
    ]


def _complaint(output: str) -> str:
    """Return the last error of ncu, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "==ERROR==" in line]
    return (errors or lines or [""])[-1].removeprefix("==ERROR==").strip()


REPEATS = 10
TIMES = f"times by CUPTI, medians of {REPEATS} runs over warm caches"


def traced(target: Target, keep: pathlib.Path | None = None) -> tuple[list[Part], list[Counters]]:
    """Run a target several times; return its parts and the median time of each launch. `keep` gets the trace."""
    target.run()
    target.wait()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPEATS):
            parts = target.run()
        target.wait()
    with tempfile.TemporaryDirectory(prefix="escalade-profile-") as folder:
        path = pathlib.Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        contents = path.read_bytes()
    if keep is not None:
        files.replace(keep, contents)
    return parts, launches(json.loads(contents), REPEATS)


def launches(trace: Mapping[str, Any], repeats: int) -> list[Counters]:
    """Return the kernels and copies of one run in launch order, with median times over `repeats` equal runs."""
    found = [one for one in trace["traceEvents"] if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not found:
        raise EscaladeError(
            "PyTorch's profiler saw no kernels: CUPTI does not work here, or another profiler uses it"
        )
    found.sort(key=lambda one: (one["args"].get("correlation", 0), one["ts"]))
    each, left_over = divmod(len(found), repeats)
    if left_over:
        raise EscaladeError(
            f"{counted(repeats, 'run')} launched {counted(len(found), 'kernel')} and copies: they were not alike"
        )
    return [
        replace(
            _counters(found[number]), us=statistics.median(float(one["dur"]) for one in found[number::each])
        )
        for number in range(each)
    ]


def _counters(event: Mapping[str, Any]) -> Counters:
    args = event["args"]
    return Counters(
        event["name"],
        registers=args.get("registers per thread"),
        shared_bytes=args.get("shared memory"),
        occupancy_pct=args.get("est. achieved occupancy %"),
    )
