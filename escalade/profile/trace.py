"""Times without counters: PyTorch's profiler, which reads them through CUPTI, and the trace that it writes."""

from __future__ import annotations

import json
import pathlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.profiler import ProfilerActivity, profile

from escalade import files
from escalade.errors import EscaladeError
from escalade.profile.counters import Counters
from escalade.profile.parts import Part, Target, shared_out, together

REPEATS = 10
_ON_THE_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Launched:
    """What a trace says of one launch."""

    kernel: str
    us: float
    registers: int | None
    shared_bytes: int | None
    occupancy_pct: float | None


def traced(target: Target, keep: pathlib.Path | None = None) -> tuple[list[Part], list[list[Counters]]]:
    """The parts with the median times of their kernels over several runs, caches warm; `keep` gets the trace."""
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
    return timed(parts, launches(json.loads(contents)), REPEATS)


def launches(trace: Mapping[str, Any]) -> list[Launched]:
    """The kernels and copies of a trace, in the order in which they were launched."""
    found = [each for each in trace["traceEvents"] if each.get("cat") in _ON_THE_GPU]
    found.sort(key=lambda each: (each["args"].get("correlation", 0), each["ts"]))
    return [
        Launched(
            each["name"],
            float(each["dur"]),
            each["args"].get("registers per thread"),
            each["args"].get("shared memory"),
            each["args"].get("est. achieved occupancy %"),
        )
        for each in found
    ]


def timed(
    parts: Sequence[Part], launched: Sequence[Launched], repeats: int
) -> tuple[list[Part], list[list[Counters]]]:
    """The parts, and of each its kernels with the medians of their times: all runs launch the same."""
    if not launched:
        raise EscaladeError(
            "PyTorch's profiler saw no kernels: CUPTI does not work here, or another profiler uses it"
        )
    parts = together(parts)
    each, left_over = divmod(len(launched), repeats)
    if left_over:
        raise EscaladeError(
            f"{repeats} runs launched {len(launched)} kernels and copies: they were not alike"
        )
    rounds = [launched[start : start + each] for start in range(0, len(launched), each)]
    owners = shared_out(parts, [one.kernel for one in rounds[0]])
    found: list[list[Counters]] = [[] for _ in parts]
    for number, owner in enumerate(owners):
        one = rounds[0][number]
        found[owner].append(
            Counters(
                kernel=one.kernel,
                us=statistics.median(turn[number].us for turn in rounds),
                registers=one.registers,
                shared_bytes=one.shared_bytes,
                occupancy_pct=one.occupancy_pct,
            )
        )
    return parts, found
