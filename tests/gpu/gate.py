"""`make gpu-test`: the GPU tests, then every kernel source under compute-sanitizer, and a record of both.

Fails if a test fails, if the sanitizer is missing, if it finds an error, or if it does not report success.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from escalade_bench.measure import records as store
from escalade_bench.report.pages.records import GPU_TEST as WORKLOAD
from tests.gpu import sanitize

ROOT = pathlib.Path(__file__).parent.parent.parent
SUITE_SECONDS, TOOL_SECONDS = 480, 150
"""Time limits of the tests, and of each tool."""
TOOLS = {
    # Errors of the driver's calls are exceptions in Python already; cuda-bindings asks every driver for functions that
    # only newer ones have, and each refusal would count.
    "memcheck": ("--leak-check", "no", "--report-api-errors", "no"),
    "racecheck": ("--num-cuda-barriers", "256"),
    "initcheck": (),
    "synccheck": ("--num-cuda-barriers", "256"),
}
"""Tools of compute-sanitizer and their options."""
JOB_OPTIONS = {"initcheck": (sanitize.RAW,)}
"""Options of `tests.gpu.sanitize` per tool: initcheck counts memory filled with a pattern as initialized."""
_FOUND = 86
"""Exit status if it found an error."""
_SUMMARY = re.compile(r"========= (?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
_FINDING = re.compile(r"========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|\s)(.+)")
_MOST_SAID = 200
"""Characters kept of a failed test's message."""
_LIKELY = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")


@dataclass(frozen=True)
class Part:
    """The outcome of one part of the run, as stored in a record."""

    name: str
    system: str
    counts: dict[str, Any]
    seconds: float
    failure: str = ""


def find_sanitizer() -> str | None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_LIKELY])
    return shutil.which("compute-sanitizer", path=path)


# --- the tests


def run_suite(workers: int, seed: int) -> Part:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-n", str(workers), "--dist", "loadgroup",
                   "--seed", str(seed), f"--junitxml={report}"]  # fmt: skip
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=SUITE_SECONDS).returncode
            failure = "" if code == 0 else f"pytest ended with {code}"
        except subprocess.TimeoutExpired:
            failure = f"the tests took longer than {SUITE_SECONDS} s"
        counts = counted(report.read_text()) if report.is_file() else {}
    if not failure and not counts.get("passed"):
        failure = "no test ran"
    if counts.get("wrong"):
        failure += ": " + ", ".join(counts["wrong"])
    return Part("tests", "pytest", counts, time.monotonic() - began, failure)


def counted(report: str) -> dict[str, Any]:
    """Parse pytest's report: how many tests passed, failed and were skipped, which failed, and why others were
    skipped."""
    wrong, reasons, total = [], Counter[str](), 0
    for case in xml.fromstring(report).iter("testcase"):
        total += 1
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name', '')}"
        if (failed := case.find("failure")) is not None or (failed := case.find("error")) is not None:
            said = (failed.get("message") or "").strip().splitlines()
            wrong.append(f"{name}: {said[0][:_MOST_SAID]}" if said else name)
        elif (skipped := case.find("skipped")) is not None:
            reasons[skipped.get("message", "")] += 1
    skips = sum(reasons.values())
    passed = total - len(wrong) - skips
    return {
        "passed": passed,
        "failed": len(wrong),
        "skipped": skips,
        "wrong": wrong,
        "reasons": dict(reasons),
    }


# --- the sanitizer


def run_tool(tool: str, sanitizer: str, jobs: Sequence[sanitize.AnyJob], processes: int) -> Part:
    """Run every job once, spread over separate processes."""
    began = time.monotonic()
    shares = [share for start in range(processes) if (share := jobs[start::processes])]
    with ThreadPoolExecutor(len(shares)) as pool:
        results = list(pool.map(lambda share: _run_share(tool, sanitizer, share), shares))
    findings = [finding for found, _ in results for finding in found]
    done = sum(count for _, count in results)
    if done != len(jobs):
        findings.append(f"{len(jobs) - done} of {len(jobs)} jobs did not end with a right result")
    counts = {
        "passed": done, "failed": len(jobs) - done, "skipped": 0,
        "sources": len(set[str]().union(*(job.sources for job in jobs))), "findings": findings,
    }  # fmt: skip
    return Part(tool, _version(sanitizer), counts, time.monotonic() - began, "; ".join(findings[:5]))


def _run_share(tool: str, sanitizer: str, jobs: Sequence[sanitize.AnyJob]) -> tuple[list[str], int]:
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", str(_FOUND), sys.executable, "-m",
               "tests.gpu.sanitize", *JOB_OPTIONS.get(tool, ())]  # fmt: skip
    given = "".join(f"{job}\n" for job in jobs)
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", timeout=TOOL_SECONDS,
        )  # fmt: skip
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        raw = late.stdout or b""
        text = (raw if isinstance(raw, str) else raw.decode(errors="replace")) + "\n"
        findings, right, _ = read(text)
        return [*findings, f"it took longer than {TOOL_SECONDS} s"], right
    findings, right, said = read(text)
    if code and not findings:
        findings.append(f"it ended with {code}: {text.strip().splitlines()[-1] if text.strip() else ''}")
    if not said:
        findings.append("the sanitizer gave no summary")
    if findings:
        print(text, flush=True)
    return findings, right


def read(text: str) -> tuple[list[str], int, bool]:
    """Parse a sanitizer's output: findings with their jobs; jobs that ended right; whether it printed a summary."""
    findings: list[str] = []
    job, right, said = "", 0, False
    for line in text.splitlines():
        if line.startswith("begins "):
            job = line.removeprefix("begins ")
        elif line.startswith("right "):
            right += 1
        elif line.startswith("wrong "):
            findings.append(line.removeprefix("wrong "))
        elif summary := _SUMMARY.match(line):
            said = True
            count = int(summary[1] or summary[2])
            if count and not findings:
                findings.append(line.removeprefix("========= "))
        elif (finding := _FINDING.match(line)) and f"{job}: {finding[1]}" not in findings:
            findings.append(f"{job}: {finding[1]}")
    return findings, right, said


def _version(sanitizer: str) -> str:
    text = subprocess.run([sanitizer, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"Version (\S+)", text)
    return f"compute-sanitizer {found[1] if found else 'of unknown version'}"


# --- the record


def records(parts: Sequence[Part], device: torch.device) -> list[store.Record]:
    origin = store.provenance(device, "make gpu-test")
    return [
        store.Record(
            WORKLOAD, part.name, "", "", 0, part.system, "",
            config={**part.counts, "seconds": round(part.seconds)}, failure=part.failure,
        ).stamped(origin)
        for part in parts
    ]  # fmt: skip


def run(workers: int, seed: int, processes: int) -> Iterator[Part]:
    """Run one part after another."""
    yield run_suite(workers, seed)
    sanitizer = find_sanitizer()
    jobs, views = sanitize.covering(), sanitize.views_of_the_day()
    for tool in TOOLS:
        if sanitizer is None:
            missing = "compute-sanitizer is not on the PATH; it comes with the CUDA toolkit"
            yield Part(tool, "compute-sanitizer", {}, 0.0, missing)
        else:
            yield run_tool(tool, sanitizer, [*jobs, *(views if tool == "memcheck" else ())], processes)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "results")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the tests")
    parser.add_argument("--processes", type=int, default=8, help="processes under the sanitizer")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu-test needs a GPU, and PyTorch finds none; `make test` needs none")
        return 2
    parts = []
    for part in run(options.workers, options.seed, options.processes):
        # At once: the next part may be cut off.
        filed = store.file_away(options.results, records([part], torch.device("cuda", 0)))
        parts.append(part)
    for part in parts:
        counts = ", ".join(f"{part.counts.get(name, 0)} {name}" for name in ("passed", "failed", "skipped"))
        print(f"{part.name}: {counts}, {part.seconds:.0f} s{': ' + part.failure if part.failure else ''}")
    print(f"recorded in {', '.join(map(str, filed))}; `escalade report tables` brings the docs up to date")
    return 1 if any(part.failure for part in parts) else 0


if __name__ == "__main__":
    sys.exit(main())
