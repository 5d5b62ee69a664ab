"""Images from host memory through `Engine.stream`, beside what bounds it: the compute alone and the copies alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from escalade.bench.networks.workload import Say
from escalade.bench.store import Record
from escalade.bench.timing import EventSampler, ReplaySampler, Timing, interleave, keep_busy, summarize
from escalade.engine.engine import Engine

_DISTINCT = 4
"""Host batches that are given in turns; each is larger than a CPU's caches."""
_REPETITIONS = 5
_SHORT_REPETITIONS = 25
"""Of streams that are over in milliseconds."""
_MOST_BATCHES = 400


def measure_stream(
    workload: str,
    engine: Engine,
    batch: int,
    item: tuple[int, ...],
    seconds: float,
    seed: int,
    say: Say,
    total: int | None = None,
) -> list[Record]:
    """For an engine that normalises uint8 images itself; with `total` also so many images from first to last."""
    say(f"{workload} stream of batches of {batch}")
    generator = torch.Generator().manual_seed(seed)
    pageable = [
        torch.randint(0, 256, (batch, *item), dtype=torch.uint8, generator=generator)
        for _ in range(_DISTINCT)
    ]
    pinned = [images.pin_memory() for images in pageable]
    compute, copy = _bounds(engine, pinned[0], seconds)
    slower = max(compute.median_us, copy.median_us)
    count = min(_MOST_BATCHES, max(2 * _DISTINCT, int(seconds * 1e6 / slower)))

    def streamed(batches: list[torch.Tensor], count: int, repetitions: int = _REPETITIONS) -> Timing:
        def run() -> None:
            for _ in engine.stream(itertools.islice(itertools.cycle(batches), count)):
                pass
            torch.cuda.synchronize(engine.device)

        return _clocked(run, count, repetitions)

    arms = {
        "compute alone": compute,
        "copies alone": copy,
        "stream, pinned": streamed(pinned, count),
        "stream, pageable": streamed(pageable, count),
    }
    if total:
        arms[f"{total:,} images, pinned"] = streamed(pinned, max(1, total // batch), _SHORT_REPETITIONS)
    blank = Record(
        f"{workload}_stream", f"{item[-1]}_b{batch}_uint8", engine.dtype, "nchw", batch, "escalade", ""
    )
    return [
        replace(
            blank, rung=name, timing=timing.how, samples=timing.samples, median_us=timing.median_us,
            p20_us=timing.p20_us, p80_us=timing.p80_us, images_per_s=1e6 * batch / timing.median_us,
            floor_us=slower,
        )
        for name, timing in arms.items()
    ]  # fmt: skip


def _bounds(engine: Engine, images: torch.Tensor, seconds: float) -> tuple[Timing, Timing]:
    x = images.to(engine.device)
    program = engine.program(x)
    room = torch.empty_like(x)
    found = interleave(
        {
            "compute": ReplaySampler(lambda: program.inputs[0].copy_(x), program.run),
            "copy": EventSampler(lambda: room.copy_(images, non_blocking=True), 1, "eager"),
        },
        seconds_per_arm=seconds,
        min_rounds=5,
        max_rounds=200,
        before_round=keep_busy,
    )
    return found["compute"], found["copy"]


def _clocked(run: Callable[[], None], batches: int, repetitions: int) -> Timing:
    """Microseconds a batch, by the wall clock, the first run left out."""
    samples = []
    for _ in range(repetitions + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        samples.append((time.perf_counter() - began) * 1e6 / batches)
    return summarize(samples[1:], "calls")
