"""Batches from host memory: order, sizes, failures, early ends, and constant memory use."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from escalade.device.staging import StagingBuffer
from escalade.engine import Engine, compile
from escalade.engine.streaming import THREAD
from escalade.errors import UnsupportedError

LONGEST = 60
"""Seconds until a hanging test fails. None passes by waiting for it."""
UNIT = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    return compile(model.eval(), torch.zeros(2, 3, 6, 6, dtype=torch.uint8), device="cpu", normalize=UNIT)


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[StagingBuffer]:
    """Live staging memory."""
    alive: weakref.WeakSet[StagingBuffer] = weakref.WeakSet()

    def make(*arguments: Any) -> StagingBuffer:
        made = StagingBuffer(*arguments)
        alive.add(made)
        return made

    monkeypatch.setattr("escalade.engine.streaming.StagingBuffer", make)
    return alive


def batch(number: int, size: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size, 3, 6, 6), dtype=torch.uint8, generator=generator)


def feeders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def check(engine: Engine, results: list[torch.Tensor], batches: list[torch.Tensor]) -> None:
    assert len(results) == len(batches)
    for result, given in zip(results, batches, strict=True):
        assert torch.equal(result, engine(given))
    assert not feeders()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_come_in_order_for_batches_of_any_size(engine: Engine, depth: int) -> None:
    batches = [batch(number, size) for number, size in enumerate((4, 4, 1, 7, 3, 7, 2))]
    check(engine, list(engine.stream(batches, depth=depth)), batches)


def test_arrays_and_layouts(engine: Engine) -> None:
    images = np.random.default_rng(1).integers(0, 256, (2, 6, 6, 3), dtype=np.uint8)
    frozen = images.copy()
    frozen.flags.writeable = False
    last = torch.from_numpy(images).permute(0, 3, 1, 2)
    batches = [images.transpose(0, 3, 1, 2), frozen.transpose(0, 3, 1, 2), last, last.float(), last.half()]
    for result in engine.stream(batches):
        torch.testing.assert_close(result, engine(last), rtol=1e-3, atol=1e-3)
    mirrored = images.transpose(0, 3, 1, 2)[..., ::-1]
    wide = torch.zeros(2, 3, 6, 12, dtype=torch.uint8)
    wide[..., ::2] = last
    results = list(engine.stream([mirrored, wide[..., ::2]]))
    check(engine, results, [last.flip(3), last])


def test_structure_and_several_inputs() -> None:
    class Both(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sum": x + y, "ramp": torch.relu(x)}

    engine = compile(Both(), (torch.zeros(2, 4), torch.zeros(2, 4)), device="cpu")
    batches = [(torch.randn(2, 4), torch.randn(2, 4)) for _ in range(3)]
    for given, result in zip(batches, engine.stream(batches), strict=True):
        expected = engine(*given)
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[key], expected[key]) for key in expected)


def test_a_producer_may_fill_the_same_memory_again(engine: Engine) -> None:
    batches = [batch(number) for number in range(9)]

    def produce() -> Iterator[torch.Tensor]:
        memory = torch.empty_like(batches[0])
        for given in batches:
            memory.copy_(given)
            yield memory

    check(engine, list(engine.stream(produce())), batches)


def test_results_are_the_callers_own(engine: Engine) -> None:
    batches = [batch(number) for number in range(5)]
    results = []
    for result in engine.stream(batches):
        results.append(result.clone())
        result.zero_()
    check(engine, results, batches)


def test_work_on_results_is_returned_in_their_place(engine: Engine) -> None:
    batches = [batch(number, 1 + number % 3) for number in range(6)]
    found = list(engine.stream(batches, then=lambda y: {"best": y.topk(2), "whole": y}))
    for each, given in zip(found, batches, strict=True):
        expected = engine(given)
        assert torch.equal(each["whole"], expected) and torch.equal(
            each["best"].indices, expected.topk(2).indices
        )
    assert not feeders()


def test_a_failing_result_raises_in_its_place(engine: Engine) -> None:
    def then(y: torch.Tensor) -> torch.Tensor:
        if len(y) == 3:
            raise LookupError("no such class")
        return y

    results = engine.stream([batch(0), batch(1, 3)], then=then)
    next(results)
    with pytest.raises(LookupError, match="no such class"):
        next(results)
    with pytest.raises(UnsupportedError, match="then returned a int; it must return a tensor"):
        list(engine.stream([batch(0)], then=len))
    assert not feeders()


def test_a_slow_producer_is_waited_for(engine: Engine) -> None:
    batches = [batch(number) for number in range(4)]

    def produce() -> Iterator[torch.Tensor]:
        for given in batches:
            time.sleep(0.02)
            yield given

    check(engine, list(engine.stream(produce())), batches)


def test_the_producer_works_ahead_and_not_further_than_depth(engine: Engine) -> None:
    pulled = 0

    def produce() -> Iterator[torch.Tensor]:
        nonlocal pulled
        for number in range(50):
            pulled += 1
            yield batch(number)

    results = engine.stream(produce(), depth=3)
    next(results)
    deadline = time.monotonic() + LONGEST
    while pulled < 4 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert pulled >= 4, "three batches are staged while the first is looked at"
    time.sleep(0.05)  # for one that would continue
    assert pulled <= 5, "four slots, one of which has been freed once"
    results.close()
    assert not feeders()


def test_an_error_of_the_producer_comes_after_earlier_results(engine: Engine) -> None:
    def produce() -> Iterator[torch.Tensor]:
        yield batch(0)
        yield batch(1)
        raise LookupError("the disk is gone")

    results = []
    with pytest.raises(LookupError, match="the disk is gone"):
        for result in engine.stream(produce()):
            results.append(result)
    check(engine, results, [batch(0), batch(1)])


def test_a_failure_leaves_no_memory(engine: Engine, slots: weakref.WeakSet[StagingBuffer]) -> None:
    gc.collect()
    gc.disable()  # a reference cycle would be collected eventually, but holds memory until then
    try:
        with contextlib.suppress(UnsupportedError):
            list(engine.stream([batch(0), torch.zeros(1)]))
        with contextlib.suppress(UnsupportedError):
            list(engine.stream(None))  # type: ignore[arg-type]
        assert not feeders() and not slots
    finally:
        gc.enable()


def test_a_refusal_of_the_engine_is_raised_in_its_place(engine: Engine) -> None:
    for wrong, sentence in (
        (torch.zeros(3, 5, 6, dtype=torch.uint8), "has shape"),
        (torch.zeros(2, 3, 6, 6, dtype=torch.int32), "engines support"),
        ("two", "call the engine with"),
        ((batch(0), batch(1)), "call the engine with"),
    ):
        results = []
        with pytest.raises(UnsupportedError, match=sentence):
            for result in engine.stream([batch(0), wrong, batch(1)]):
                results.append(result)
        check(engine, results, [batch(0)])


def test_stopping_early_leaves_no_thread_and_no_memory(
    engine: Engine, slots: weakref.WeakSet[StagingBuffer]
) -> None:
    def endless() -> Iterator[torch.Tensor]:
        number = 0
        while True:
            yield batch(number)
            number += 1

    results = engine.stream(endless())
    for _ in range(3):
        next(results)
    assert len(feeders()) == 1 and slots
    results.close()
    assert not feeders()
    for result in engine.stream(endless()):
        assert result.shape == (2, 5)
        break
    with pytest.raises(KeyError):
        for _ in engine.stream(endless()):
            raise KeyError("of the consumer")
    gc.collect()
    assert not feeders() and not slots


class Blocked:
    """A producer of two batches that then waits until released."""

    def __init__(self) -> None:
        self.is_blocked, self.go, self.is_closed = threading.Event(), threading.Event(), threading.Event()

    def batches(self) -> Iterator[torch.Tensor]:
        try:
            yield batch(0)
            yield batch(1)
            self.is_blocked.set()
            self.go.wait(LONGEST)
            yield batch(2)
        finally:
            self.is_closed.set()

    def release(self) -> None:
        """The rest of it ends, and is closed in the thread that ran it."""
        (thread,) = feeders()
        assert thread.daemon
        self.go.set()
        thread.join(LONGEST)
        assert not thread.is_alive() and self.is_closed.is_set()


def interrupt() -> None:
    """Raise like Ctrl-C, from any thread."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def leave_by_close(engine: Engine, given: Blocked) -> None:
    results = engine.stream(given.batches())
    next(results)
    assert given.is_blocked.wait(LONGEST)
    results.close()


def leave_by_break(engine: Engine, given: Blocked) -> None:
    for _ in engine.stream(given.batches()):
        assert given.is_blocked.wait(LONGEST)
        break


def leave_by_an_exception(engine: Engine, given: Blocked) -> None:
    with pytest.raises(LookupError, match="of the consumer"):
        for _ in engine.stream(given.batches()):
            assert given.is_blocked.wait(LONGEST)
            raise LookupError("of the consumer")


def leave_by_an_interrupt(engine: Engine, given: Blocked) -> None:
    """Ctrl-C while waiting for the next result."""
    results = engine.stream(given.batches())
    next(results)
    next(results)
    assert given.is_blocked.wait(LONGEST)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, interrupt).start()
        next(results)


def leave_by_forgetting(engine: Engine, given: Blocked) -> None:
    results = engine.stream(given.batches())
    next(results)
    assert given.is_blocked.wait(LONGEST)
    del results
    gc.collect()


@pytest.mark.parametrize(
    "leave",
    [leave_by_close, leave_by_break, leave_by_an_exception, leave_by_an_interrupt, leave_by_forgetting],
)
def test_a_producer_that_blocks_blocks_nothing_else(
    leave: Callable[[Engine, Blocked], None], engine: Engine, slots: weakref.WeakSet[StagingBuffer]
) -> None:
    given = Blocked()
    leave(engine, given)
    assert not given.is_closed.is_set(), "it was left while the producer was blocked"
    gc.collect()
    assert not slots, "its thread keeps none of the memory"
    given.release()
    assert not feeders()


def test_a_producer_that_blocks_before_its_first_batch_blocks_nothing_else(engine: Engine) -> None:
    """Fails when asked for its iterator."""
    go = threading.Event()

    class Slow:
        def __iter__(self) -> Iterator[torch.Tensor]:
            interrupt()
            go.wait(LONGEST)
            return iter([batch(0)])

    results = engine.stream(Slow())
    with pytest.raises(KeyboardInterrupt):
        next(results)
    (thread,) = feeders()
    go.set()
    thread.join(LONGEST)
    assert not feeders()


def test_a_generator_is_closed_and_nothing_else_is(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    class Own:
        """An iterator that the caller may continue."""

        is_closed = False

        def __iter__(self) -> Own:
            return self

        def __next__(self) -> torch.Tensor:
            return batch(0)

        def close(self) -> None:
            self.is_closed = True

    own = Own()
    next(results := engine.stream(own))
    results.close()
    assert not own.is_closed

    def careless() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield batch(0)
        finally:
            raise LookupError("nothing left to tidy")

    next(results := engine.stream(careless()))
    results.close()
    assert "raised when it was closed" in caplog.text and "nothing left to tidy" in caplog.text
    assert not feeders()


def test_a_refusal_comes_before_the_producer_is_closed(engine: Engine) -> None:
    go = threading.Event()

    def produce() -> Iterator[torch.Tensor]:
        try:
            yield torch.zeros(1)
        finally:
            go.wait(LONGEST)

    with pytest.raises(UnsupportedError):
        list(engine.stream(produce()))
    (thread,) = feeders()  # still closing the producer
    go.set()
    thread.join(LONGEST)
    assert not feeders()


def test_an_unused_iterator_starts_nothing(engine: Engine) -> None:
    results = engine.stream([batch(0)])
    assert not feeders()
    del results


def test_memory_does_not_depend_on_the_number_of_batches(
    engine: Engine, slots: weakref.WeakSet[StagingBuffer]
) -> None:
    most = {}
    for count in (4, 40):
        seen = []
        for _ in engine.stream((batch(number) for number in range(count)), depth=2):
            seen.append((len(slots), sum(slot.bytes for slot in slots)))
        most[count] = max(seen)
    assert most[4] == most[40]
    assert most[40][0] == 3, "two staged and one being computed"


def test_two_iterations_and_calls_at_once(engine: Engine) -> None:
    batches = [batch(number) for number in range(12)]
    expected = [engine(given) for given in batches]
    for (first, second), wanted in zip(
        zip(engine.stream(batches), engine.stream(batches), strict=True), expected, strict=True
    ):
        assert torch.equal(first, wanted) and torch.equal(second, wanted)
        assert torch.equal(engine(batches[0]), expected[0])
    assert not feeders()


def test_mistakes_are_named(engine: Engine) -> None:
    for depth in (0, 10**9):
        with pytest.raises(UnsupportedError, match=f"depth={depth}"):
            engine.stream([batch(0)], depth=depth)
    with pytest.raises(UnsupportedError, match="then=3: pass a function"):
        engine.stream([batch(0)], then=3)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="in host memory"):
        list(engine.stream([torch.zeros(2, 3, 6, 6, dtype=torch.uint8, device="meta")]))
    with pytest.raises(UnsupportedError, match="of type int; pass a list or an iterator"):
        list(engine.stream(3))  # type: ignore[arg-type]
