"""Threads that each call one engine and wait for their results: `python -m tests.gpu.service`.

Prints calls per second of ResNet-18, one image, fp16, with 1, 2, 4 and 8 threads on separate streams, for an engine
with one set of buffers and with eight; and of the minimum work, a replay of a CUDA graph and the wait
for it. `--results results` stores a record of each rate.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

import escalade
from escalade import models
from escalade.engine.calls import BufferedCalls
from escalade.engine.plan.kernel_program import KernelProgram
from escalade_bench.measure import records as store
from escalade_bench.report.pages.records import SERVICE

THREADS = (1, 2, 4, 8)
_SECONDS = 1.0

Call = Callable[[], object]


def rate(prepare: Callable[[int], Call], threads: int) -> float:
    """Return calls per second of several threads; each prepares its call on its stream and waits for every call."""
    counts = [0] * threads
    ready, stop = threading.Barrier(threads + 1), threading.Event()

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            call = prepare(number)
            for _ in range(20):
                call()
            stream.synchronize()
            ready.wait()
            while not stop.is_set():
                call()
                stream.synchronize()
                counts[number] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    time.sleep(_SECONDS)
    stop.set()
    for worker in workers:
        worker.join()
    return sum(counts) / (time.perf_counter() - began)


def rates(what: str, prepare: Callable[[int], Call]) -> list[store.Record]:
    """One record per number of threads, printed on one line."""
    found = {threads: rate(prepare, threads) for threads in THREADS}
    print(f"{what}:", *(f"{each:,.0f}" for each in found.values()))
    return [
        store.Record(
            SERVICE, f"resnet18, {n} threads", "fp16", "nhwc", 1, "escalade", what, images_per_s=each
        )
        for n, each in found.items()
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, help="a folder like results/ to file records in")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no GPU here, and calls of one are what this measures")
        return 1
    model, x = models.model("resnet18")
    model, x = model.cuda(), x.cuda()
    print("calls a second by", ", ".join(map(str, THREADS)), "threads")
    records: list[store.Record] = []
    for buffers in (1, max(THREADS)):
        engine = escalade.compile(model, x, dtype="fp16", buffers=buffers)

        def own_input(number: int, engine: escalade.Engine = engine) -> Call:
            mine = x.clone()
            return lambda: engine(mine)

        records += rates(f"{buffers} sets of buffers", own_input)
    calls = engine.calls((x,))
    assert isinstance(calls, BufferedCalls)
    programs = [each.program for each in calls._sets]

    def own_graph(number: int) -> Call:
        program = programs[number % len(programs)]
        assert isinstance(program, KernelProgram) and program._graph is not None
        return program._graph.replay

    records += rates("replays alone", own_graph)
    if asked.results:
        origin = store.provenance(torch.device("cuda", 0), "python -m tests.gpu.service")
        store.file_away(asked.results, [record.stamped(origin) for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
