"""Images from host memory through `Engine.stream`, beside its bounds: compute alone and copies alone.

All of them are verified before they are timed, and after.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from escalade.device.nvml import LoadWatch, Watch
from escalade.device.timing import Timing, summarize
from escalade.engine.engine import Engine
from escalade_bench.measure.figures import with_times
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import Standard, spoil
from escalade_bench.networks.workload import Say

_DISTINCT = 4
"""Distinct host batches, passed in turns; each is larger than a CPU's caches."""
_REPETITIONS = 5
_SHORT_REPETITIONS = 25
"""Repetitions of streams that are over in milliseconds."""
_MOST_BATCHES = 400
_LOAD_SECONDS = 0.4
"""Seconds of streaming over which utilization and PCIe traffic are sampled, apart from the timing."""

Known = Callable[[torch.Tensor], Standard]
"""Makes the expected results of a host batch."""


def measure_stream(
    workload: str,
    engine: Engine,
    batch: int,
    item: tuple[int, ...],
    seconds: float,
    seed: int,
    say: Say,
    known: Known,
    total: int | None = None,
) -> list[Record]:
    """Measure an engine that normalizes uint8 images itself; with `total`, also `total` images from first to last."""
    say(f"{workload} stream of batches of {batch}")
    generator = torch.Generator().manual_seed(seed)
    pageable = [
        torch.randint(0, 256, (batch, *item), dtype=torch.uint8, generator=generator)
        for _ in range(_DISTINCT)
    ]
    pinned = [images.pin_memory() for images in pageable]
    blank = Record(
        f"{workload}_stream", f"{item[-1]}_b{batch}_uint8", engine.dtype, "nchw", batch, "escalade", ""
    )
    given = {"stream, pinned": pinned, "stream, pageable": pageable}
    bounds = _Bounds(engine, pinned[0])
    standards = {number: known(pageable[number]) for number in (0, _DISTINCT - 1)}

    def wrong() -> list[Record]:
        """Return failures as records without a time."""
        found = bounds.wrong(standards[0])
        for name, batches in given.items():
            results = list(engine.stream(batches))
            found[name] = f"it gave {len(results)} results for {len(batches)} batches"
            if len(results) == len(batches):
                judged = (right.judge((results[number],))[1] for number, right in standards.items())
                found[name] = next(filter(None, judged), "")
        return [replace(blank, rung=name, failure=failure) for name, failure in found.items() if failure]

    failures = wrong()
    if failures:
        return failures

    def alone(count: int, repetitions: int = _REPETITIONS) -> dict[str, Timing]:
        return {name: _clocked(bounds.repeated(name, count), count, repetitions) for name in bounds.calls}

    def stream(batches: list[torch.Tensor], count: int) -> None:
        for _ in engine.stream(itertools.islice(itertools.cycle(batches), count)):
            pass
        torch.cuda.synchronize(engine.device)

    def streamed(batches: list[torch.Tensor], count: int, repetitions: int = _REPETITIONS) -> Timing:
        return _clocked(partial(stream, batches, count), count, repetitions)

    def load(batches: list[torch.Tensor], count: int) -> dict[str, Any]:
        end = time.monotonic() + _LOAD_SECONDS
        with LoadWatch() as watch:
            while time.monotonic() < end:
                stream(batches, count)
        return asdict(watch.load)

    slower = max(timing.median_us for timing in alone(2 * _DISTINCT, 1).values())
    count = min(_MOST_BATCHES, max(2 * _DISTINCT, int(seconds * 1e6 / slower)))
    subjects = alone(count)  # by the same clock and over as many batches as the streams that they bound
    slower = max(timing.median_us for timing in subjects.values())
    subjects |= {name: streamed(batches, count) for name, batches in given.items()}
    if total:
        subjects[f"{total:,} images, pinned"] = streamed(pinned, max(1, total // batch), _SHORT_REPETITIONS)
    loads = {name: load(batches, count) for name, batches in given.items()}
    return wrong() or [
        replace(
            with_times(replace(blank, rung=name), timing),
            config=loads.get(name, {}),
            images_per_s=1e6 * batch / timing.median_us,
            floor_us=slower,
        )
        for name, timing in subjects.items()
    ]


class _Bounds:
    """The graph of one batch, and its copy to the device."""

    def __init__(self, engine: Engine, images: torch.Tensor) -> None:
        self._x = x = images.to(engine.device)
        self._program = program = engine.program(x)
        self._images = images
        self._room = room = torch.empty_like(x)
        self.calls: dict[str, Callable[[], object]] = {
            "compute alone": program.run,
            "copies alone": lambda: room.copy_(images, non_blocking=True),
        }

    def wrong(self, standard: Standard) -> dict[str, str]:
        """Return the failure of either by name; empty if it is right."""
        spoil((*self._program.inputs, *self._program.outputs, self._room))
        self._fill()
        for call in self.calls.values():
            call()
        arrived = torch.equal(self._room.cpu(), self._images)
        return {
            "compute alone": standard.judge(self._program.outputs)[1],
            "copies alone": "" if arrived else "what was copied did not arrive",
        }

    def repeated(self, name: str, count: int) -> Callable[[], None]:
        """Return a function that makes `count` calls in a row. Only the first replay has its inputs filled: the others
        run over memory that later values may share, and time does not depend on contents."""
        call = self.calls[name]

        def run() -> None:
            self._fill()
            for _ in range(count):
                call()
            torch.cuda.synchronize(self._x.device)

        return run

    def _fill(self) -> None:
        self._program.inputs[0].copy_(self._x)


def _clocked(run: Callable[[], None], batches: int, repetitions: int) -> Timing:
    """Return microseconds per batch by the wall clock, without the first run."""
    samples = []
    watch = Watch()
    for _ in range(repetitions + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        samples.append((time.perf_counter() - began) * 1e6 / batches)
        watch.look()
    return summarize(samples[1:], "calls", conditions=watch.conditions)
