"""Streaming on the GPU: the results match plain calls for all memory kinds, sizes and concurrent work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from escalade.engine import Engine, compile
from escalade.engine.streaming import THREAD, stream
from escalade.errors import UnsupportedError

pytestmark = pytest.mark.gpu

SIDE = 32
NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Network(nn.Module):
    """Two results, one of them an image as large as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.classify = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.relu(self.first(x))
        return self.second(features), self.classify(features.mean((2, 3)))


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def engine(request: pytest.FixtureRequest) -> Engine:
    torch.manual_seed(0)
    example = torch.zeros(8, 3, SIDE, SIDE, dtype=torch.uint8)
    return compile(Network().eval(), example, dtype=request.param, device="cuda", normalize=NORMALIZE)


def batch(number: int, size: int = 8, channels_last: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    images = torch.randint(0, 256, (size, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
    return images.to(memory_format=torch.channels_last) if channels_last else images


def feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def check(
    engine: Engine, results: list[tuple[torch.Tensor, torch.Tensor]], batches: list[torch.Tensor]
) -> None:
    assert len(results) == len(batches)
    for result, given in zip(results, batches, strict=True):
        for found, expected in zip(result, engine(given.cuda()), strict=True):
            assert found.device.type == "cpu" and not found.is_pinned() and found.dtype == expected.dtype
            assert torch.equal(found, expected.cpu())
    assert not feeders()


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
def test_results_are_those_of_calls(engine: Engine, depth: int, pinned: bool, channels_last: bool) -> None:
    batches = [batch(number, 8, channels_last) for number in range(20)]
    given = (images.pin_memory() for images in batches) if pinned else iter(batches)
    check(engine, list(engine.stream(given, depth=depth)), batches)


def test_sizes_types_and_layouts_may_vary(engine: Engine) -> None:
    """New plans are made and captured while older batches are in flight."""
    batches = [batch(number, size) for number, size in enumerate((8, 8, 3, 16, 8, 1))]
    batches += [batch(7).float(), batch(8, 5, channels_last=True), batch(9, 16)[::2]]
    check(engine, list(engine.stream(batches)), batches)


def test_work_on_results_runs_on_the_gpu(engine: Engine) -> None:
    batches = [batch(number, 8) for number in range(12)]
    places: set[str] = set()

    def best(results: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        places.update(each.device.type for each in results)
        return [each.float().flatten(1).topk(2).indices for each in results]

    for found, given in zip(engine.stream(batches, then=best), batches, strict=True):
        for each, expected in zip(found, best(engine(given.cuda())), strict=True):
            assert each.device.type == "cpu" and torch.equal(each, expected.cpu())
    assert places == {"cuda"}


def test_a_producer_may_fill_ordinary_memory_again(engine: Engine) -> None:
    batches = [batch(number) for number in range(30)]

    def produce() -> Iterator[torch.Tensor]:
        memory = torch.empty_like(batches[0])
        for images in batches:
            memory.copy_(images)
            yield memory

    check(engine, list(engine.stream(produce())), batches)


def test_failures_come_in_their_place(engine: Engine) -> None:
    def produce() -> Iterator[torch.Tensor]:
        yield batch(0)
        raise LookupError("the disk is gone")

    wrong = torch.zeros(3, SIDE, SIDE, dtype=torch.uint8)
    for batches, error in (
        (produce(), LookupError),
        ([batch(0), wrong], UnsupportedError),
        ([batch(0), wrong.cuda()], UnsupportedError),
    ):
        results = []
        with pytest.raises(error):
            for result in engine.stream(batches):
                results.append(result)
        check(engine, results, [batch(0)])


def test_stopping_early_leaves_no_thread_and_no_device_memory(engine: Engine) -> None:
    def endless() -> Iterator[torch.Tensor]:
        number = 0
        while True:
            yield batch(number)
            number += 1

    list(engine.stream([batch(0)]))  # the plan is made
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = engine.stream(endless())
    for _ in range(5):
        next(results)
    assert torch.cuda.memory_allocated() > before
    results.close()
    assert not feeders() and torch.cuda.memory_allocated() == before


def test_device_memory_does_not_depend_on_the_number_of_batches(engine: Engine) -> None:
    """Peak memory. How many slots are full at once depends on timing, so that much may differ; keeping an input or a
    result per batch would exceed it. Requested bytes count, not allocated ones.
    """
    depth, slots = 2, 4

    def peak(count: int) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in engine.stream((batch(number) for number in range(count)), depth=depth):
            pass
        return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])

    x = batch(0).to("cuda")
    result = sum(part.nbytes for part in engine(x))
    in_slots = slots * (x.nbytes + result)
    few = 8
    many = few + 2 * in_slots // min(x.nbytes, result)
    peak(2)  # the plan is made
    assert peak(many) <= peak(few) + in_slots


def test_results_are_the_callers_own(engine: Engine) -> None:
    """All results are kept: later ones are written elsewhere."""
    batches = [batch(number) for number in range(12)]
    results = list(engine.stream(batches))
    places = {tensor.data_ptr() for result in results for tensor in result}
    assert len(places) == 2 * len(batches)
    check(engine, results, batches)


def test_copies_in_and_back_wait_for_a_busy_device(engine: Engine) -> None:
    """Each stream of the iteration has much pending work when it gets the next."""
    batches = [batch(number) for number in range(12)]

    class Busy:
        def __init__(self, engine: Engine) -> None:
            self.device, self.flatten, self.unflatten = engine.device, engine.flatten, engine.unflatten

        def calls(self, tensors: Any) -> Any:
            torch.cuda._sleep(2_000_000)  # on the current stream; the next line on those of the iteration
            calls = engine.calls(tensors)

            def call(given: Any) -> Any:
                torch.cuda._sleep(20_000_000)
                return calls.call(given)

            return SimpleNamespace(call=call, plan=calls.plan)

    check(engine, list(stream(Busy(engine), batches)), batches)


def test_a_producer_that_blocks_blocks_nothing_else(engine: Engine) -> None:
    list(engine.stream([batch(0)]))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    go, is_blocked = threading.Event(), threading.Event()

    def produce() -> Iterator[torch.Tensor]:
        yield batch(0)
        is_blocked.set()
        go.wait(60)
        yield batch(1)

    results = engine.stream(produce())
    next(results)
    assert is_blocked.wait(10)
    began = time.monotonic()
    results.close()
    assert time.monotonic() - began < 5 and torch.cuda.memory_allocated() == before
    (thread,) = feeders()
    go.set()
    thread.join(10)
    assert not feeders()


def test_other_threads_may_call_the_engine_meanwhile(engine: Engine) -> None:
    batches = [batch(number) for number in range(60)]
    alone = batch(1000)
    expected = [result.cpu() for result in engine(alone.cuda())]
    wrong: list[int] = []
    stop = threading.Event()

    def call() -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            images = alone.cuda()
            while not stop.is_set():
                results = [result.cpu() for result in engine(images)]
                if not all(map(torch.equal, results, expected)):
                    wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        results = list(engine.stream(batches))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong
    check(engine, results, batches)
