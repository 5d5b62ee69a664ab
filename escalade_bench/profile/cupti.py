"""Times without counters: PyTorch's profiler, which reads them through CUPTI, and its trace."""

from __future__ import annotations

import json
import pathlib
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.profiler import ProfilerActivity, profile

from escalade import files
from escalade.errors import EscaladeError
from escalade_bench.profile.counters import Counters
from escalade_bench.profile.target import Part, Target

REPEATS = 10
HOW = f"times by CUPTI, medians of {REPEATS} runs over warm caches"


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
        raise EscaladeError(f"{repeats} runs launched {len(found)} kernels and copies: they were not alike")
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
