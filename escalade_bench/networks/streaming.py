"""Images from host memory through `Engine.stream`, compared with its bounds: compute alone and copies alone.

All are verified before and after timing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from escalade.device.nvml import ConditionMonitor, LoadMonitor
from escalade.device.timing import Timing, summarize
from escalade.engine.engine import Engine
from escalade_bench.campaign.units import Say, Session
from escalade_bench.measure.figures import with_times
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import Standard, spoil

_DISTINCT = 4
"""Distinct host batches, passed in turns; each is larger than a CPU's caches."""
_REPETITIONS = 5
_SHORT_REPETITIONS = 25
"""Repetitions of streams that take only milliseconds."""
_MOST_BATCHES = 400
_LOAD_SECONDS = 0.4
"""Seconds of streaming over which utilization and PCIe traffic are sampled, apart from the timing."""

Known = Callable[[torch.Tensor], Standard]
"""Computes the expected results of a host batch."""


def measure_stream(
    workload: str,
    engine: Engine,
    batch: int,
    item: tuple[int, ...],
    session: Session,
    say: Say,
    known: Known,
    total: int | None = None,
) -> list[Record]:
    """Measure an engine that normalizes uint8 images itself; with `total`, also `total` images from first to last."""
    say(f"{workload} stream of batches of {batch}")
    generator = torch.Generator().manual_seed(session.seed)
    pageable = [
        torch.randint(0, 256, (batch, *item), dtype=torch.uint8, generator=generator)
        for _ in range(_DISTINCT)
    ]
    pinned = [images.pin_memory() for images in pageable]
    blank = Record(
        f"{workload}_stream", f"{item[-1]}_b{batch}_uint8", engine.dtype, "nchw", batch, "escalade", ""
    )
    given = {"stream, pinned": pinned, "stream, pageable": pageable}
    standards = {number: known(pageable[number]) for number in (0, _DISTINCT - 1)}
    x = pinned[0].to(engine.device)
    program, arrived = engine.program(x), torch.empty_like(x)
    bounds: dict[str, Callable[[], object]] = {
        "compute alone": program.run,
        "copies alone": lambda: arrived.copy_(pinned[0], non_blocking=True),
    }

    def alone(call: Callable[[], object], count: int) -> None:
        """Call a bound `count` times. Only the first replay has its inputs filled: the others run over memory that
        later values may share, and time does not depend on contents."""
        program.inputs[0].copy_(x)
        for _ in range(count):
            call()
        torch.cuda.synchronize(engine.device)

    def stream(batches: list[torch.Tensor], count: int) -> None:
        for _ in engine.stream(itertools.islice(itertools.cycle(batches), count)):
            pass
        torch.cuda.synchronize(engine.device)

    runs = {name: partial(alone, call) for name, call in bounds.items()}
    runs |= {name: partial(stream, batches) for name, batches in given.items()}

    def wrong() -> list[Record]:
        """Return failures as records without a time."""
        spoil((*program.inputs, *program.outputs, arrived))
        for name in reversed(bounds):  # compute last: refilling inputs may overwrite outputs
            runs[name](1)
        found = {
            "compute alone": standards[0].judge(program.outputs)[1],
            "copies alone": "" if torch.equal(arrived.cpu(), pinned[0]) else "what was copied did not arrive",
        }
        for name, batches in given.items():
            results = list(engine.stream(batches))
            found[name] = f"it gave {len(results)} results for {len(batches)} batches"
            if len(results) == len(batches):
                judged = (right.judge((results[number],))[1] for number, right in standards.items())
                found[name] = next(filter(None, judged), "")
        return [replace(blank, rung=name, failure=failure) for name, failure in found.items() if failure]

    def timed(name: str, count: int, repetitions: int = _REPETITIONS) -> Timing:
        return _clocked(partial(runs[name], count), count, repetitions)

    def load(name: str, count: int) -> dict[str, Any]:
        end = time.monotonic() + _LOAD_SECONDS
        with LoadMonitor() as watch:
            while time.monotonic() < end:
                runs[name](count)
        return asdict(watch.load)

    if failures := wrong():
        return failures
    slower = max(timed(name, 2 * _DISTINCT, 1).median_us for name in bounds)
    count = min(_MOST_BATCHES, max(2 * _DISTINCT, int(session.seconds * 1e6 / slower)))
    subjects = {
        name: timed(name, count) for name in runs
    }  # the same clock and count for streams and their bounds
    slower = max(subjects[name].median_us for name in bounds)
    if total:
        name = f"{total:,} images, pinned"
        subjects[name] = timed("stream, pinned", max(1, total // batch), _SHORT_REPETITIONS)
    loads = {name: load(name, count) for name in given}
    return wrong() or [
        replace(
            with_times(replace(blank, rung=name), timing),
            config=loads.get(name, {}),
            images_per_s=1e6 * batch / timing.median_us,
            floor_us=slower,
        )
        for name, timing in subjects.items()
    ]


def _clocked(run: Callable[[], None], batches: int, repetitions: int) -> Timing:
    """Return microseconds per batch by the wall clock, without the first run."""
    samples = []
    watch = ConditionMonitor()
    for _ in range(repetitions + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        samples.append((time.perf_counter() - began) * 1e6 / batches)
        watch.sample()
    return summarize(samples[1:], "calls", conditions=watch.conditions)
