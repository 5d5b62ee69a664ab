"""The caller's state is unchanged while other threads use it, or compile too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import nn

from escalade.engine.capture.export import capture
from tests.engine.capture import callers_models
from tests.engine.capture.callers_models import (
    ASIDE,
    MODELS,
    SIZE,
    STORE,
    TABLES,
    Model,
    OfTheClass,
    made,
    shared,
    table,
)
from tests.engine.untouched import untouched
from tests.support import in_threads


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with callers_models.forgotten():
        yield


ENTERED: SimpleQueue[Any] = SimpleQueue()
FOUND: SimpleQueue[Any] = SimpleQueue()
THREADS: SimpleQueue[threading.Thread] = SimpleQueue()
LEAVE = threading.Event()


def _stays(self: Any, x: torch.Tensor) -> torch.Tensor:
    ENTERED.put(None)
    # An `assert` would refer to pytest, through which a capture reaches every test.
    if type(self.first) is not nn.Linear:
        raise TypeError(f"the first layer is a {type(self.first).__name__}")
    LEAVE.wait(60)
    return self.second(self.first(x))


OTHER = Model(_stays)


def _uses_other() -> None:
    try:
        FOUND.put((OTHER(torch.ones(2, SIZE)), [module.training for module in OTHER.modules()]))
    except BaseException as error:
        FOUND.put(error)


def _meanwhile(self: Any, x: torch.Tensor) -> torch.Tensor:
    """At each run, another thread starts to call a model of the caller's."""
    thread = threading.Thread(target=_uses_other)
    thread.start()
    THREADS.put(thread)
    ENTERED.get(timeout=60)
    return self.second(self.first(x))


def test_other_threads_may_call_models_meanwhile() -> None:
    """They encounter no fake tensors, tracers or other mode, and disturb no tracer."""
    model = Model(_meanwhile)
    model.again = model.first  # PyTorch's tracer follows every use of modules with two names
    LEAVE.clear()
    try:
        graph = capture(model, (torch.randn(2, SIZE),))
    finally:
        LEAVE.set()
    assert [node.op for node in graph] == ["linear", "linear"]
    assert THREADS.qsize() >= 2, "it has been traced, and tried with a batch of one"
    while not THREADS.empty():
        THREADS.get().join(60)
        found = FOUND.get(timeout=60)
        assert isinstance(found, tuple), found
        assert type(found[0]) is torch.Tensor and all(found[1])
        torch.testing.assert_close(found[0], OTHER(torch.ones(2, SIZE)))


@contextmanager
def another_thread(work: Callable[[Any], object]) -> Iterator[SimpleQueue[Any]]:
    """Thread that handles objects from a queue, and ends with None."""
    given: SimpleQueue[Any] = SimpleQueue()

    def run() -> None:
        while (item := given.get()) is not None:
            work(item)

    thread = threading.Thread(target=run)
    thread.start()
    while not _waits(thread):
        pass
    try:
        yield given
    finally:
        given.put(None)
        thread.join(60)


def _waits(thread: threading.Thread) -> bool:
    """Return True if it slept for a while although it could have continued."""

    def state() -> list[str]:
        lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
        return [line for line in lines if "State" in line or "ctxt_switches" in line]

    before = state()
    time.sleep(0.02)
    return "sleeping" in before[0] and before == state()


LOG: dict[str, Any] = {"all": []}
DONE: SimpleQueue[Any] = SimpleQueue()


def _fills(self: Any, x: torch.Tensor) -> torch.Tensor:
    LOG["x"], LOG["nested"] = x, {"deep": [x]}
    LOG["all"] += [x, (x, 1)]
    self.asks("theirs")
    return self.first(x)


def _fill(item: str) -> None:
    LOG["theirs"] = 3
    LOG["all"].append(item)
    DONE.put(item)


def test_other_threads_may_fill_globals_meanwhile() -> None:
    """Their insertions stay; insertions by the capture do not."""
    with another_thread(_fill) as given:

        def asks(item: str) -> None:
            given.put(item)
            DONE.get(timeout=60)

        capture(made(lambda: Model(_fills, asks=asks)), (torch.randn(2, SIZE),))
    found, LOG["all"] = list(LOG["all"]), []
    numbers, hollow = LOG.pop("theirs"), {"x", "nested"} & LOG.keys()
    assert numbers == 3 and not hollow and found == ["theirs"] * len(found) != []


@pytest.mark.parametrize("name", ["attributes of the class", "globals"])
def test_threads_that_wait_have_changed_nothing(name: str) -> None:
    """Like idle threads of PyTorch after a `torch.compile`, and those of notebooks."""
    model, x, count = made(MODELS[name]), torch.randn(2, SIZE), callers_models.COUNT
    with another_thread(print), untouched(model, OfTheClass, TABLES, STORE, ASIDE, table):
        capture(model, (x,))
    assert count == callers_models.COUNT


def test_threads_that_compile_leave_warnings_on() -> None:
    model = made(shared)
    x = torch.randn(2, SIZE)

    def work(number: int) -> None:
        for _ in range(3):
            capture(model, (x,))

    with untouched(model):
        in_threads(work)
