"""Synchronization on a fake GPU: a missing wait shows as a wrong number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from escalade.device import cuda
from escalade.engine import call_queue, streaming
from escalade.engine.calls import BufferedCalls
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.streaming import _DeviceSlot, _Streams
from tests.fake_cuda import Box, Gpu, Point

CUDA = torch.device("cuda", 0)


@pytest.fixture(params=range(12))
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(request.param)
    made.stand_in(monkeypatch)
    monkeypatch.setattr(cuda, "_local", SimpleNamespace())
    return made


class Doubling:
    """A program with intermediate memory, like a plan's."""

    plan: Any = None

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._between = Box(gpu)

    def clone(self) -> Doubling:
        return Doubling(self._gpu)

    def call(self, tensors: Sequence[Any], out: Any) -> list[Any]:
        self._between.twice(tensors[0])
        return [Box(self._gpu).copy_(self._between)]

    def record_stream(self, stream: Any) -> None: ...


def values(boxes: Sequence[Any]) -> list[float]:
    return [box.value for box in boxes]


def buffered(gpu: Gpu, most: int = 1) -> BufferedCalls:
    return BufferedCalls(Doubling(gpu), most)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [1, 2, 5])
def test_calls_on_several_streams_share_the_buffers_of_a_plan(gpu: Gpu, most: int) -> None:
    calls, streams = buffered(gpu, most), [gpu.stream() for _ in range(3)]
    results = []
    for number in range(12):
        with gpu.on(streams[number % 3]):
            results += calls.call([Box(gpu, float(number))])  # type: ignore[list-item]
    waits = [isinstance(work, Point) for stream in streams for work in stream.work]
    assert len(calls._sets) == min(most, 3) and any(waits) == (most < 3), (
        "as many as are used at once, and no more"
    )
    gpu.synchronize()
    assert values(results) == [2.0 * number for number in range(12)]


def test_streams_keep_their_buffers_while_others_are_idle(gpu: Gpu) -> None:
    """Kernels need no new addresses for another caller's tensors. Buffers of an idle stream are reused."""
    calls, streams = buffered(gpu, 4), [gpu.stream() for _ in range(5)]

    def took(stream: Any) -> Any:
        with gpu.on(stream):
            calls.call([Box(gpu, 1.0)])  # type: ignore[list-item]
        gpu.synchronize()  # so that every buffer set is idle
        return calls._by_stream[stream.cuda_stream]

    first = [took(stream) for stream in streams[:3]]
    assert len({*map(id, first)}) == 3 == len(calls._sets)
    for _ in range(9):
        assert [took(stream) for stream in streams[1:3]] == first[1:]
    assert took(streams[3]) is first[0], "whose stream has not called for long"
    assert took(streams[0]) not in first and len(calls._sets) == 4
    assert took(streams[4]) in calls._sets and len(calls._sets) == 4


def test_submitted_calls_run_after_earlier_work_on_the_callers_stream(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bounded number in flight, each finished before its results are returned; failures and cancellation block no
    other call."""
    monkeypatch.setattr(call_queue, "flatten", lambda result: ([result], None))
    tasks: list[Any] = []
    calls, threads = buffered(gpu, 2), call_queue.CallQueue(2)
    threads._pool = SimpleNamespace(submit=lambda *task: tasks.append(task))  # type: ignore[assignment]
    given, begun = Box(gpu), []

    def call(number: int) -> Any:
        begun.append(number)
        if number == 4:
            raise ValueError("no")
        return calls.call([given])[0]  # type: ignore[list-item]

    given.copy_(Box(gpu, 3.0))
    pending = [threads.submit(partial(call, n), CUDA, is_ready=n != 5) for n in range(7)]
    pending[2].cancel()
    while tasks:
        function, *arguments = tasks.pop(0)
        function(*arguments)
    assert begun == [0, 1, 3, 4, 6, 5] and not threads._is_serving
    assert [each.result().value for each in pending if each not in (pending[2], pending[4])] == [6.0] * 5
    with pytest.raises(ValueError, match="no"):
        pending[4].result()
    threads.submit(partial(call, 7), CUDA, is_ready=True)
    assert len(tasks) == 1


def test_calls_submitted_while_others_run_need_no_thread_of_their_own(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_queue, "flatten", lambda result: ([result], None))
    tasks: list[Any] = []
    calls, threads = buffered(gpu, 2), call_queue.CallQueue(2)
    threads._pool = SimpleNamespace(submit=lambda *task: tasks.append(task))  # type: ignore[assignment]
    call = partial(calls.call, [Box(gpu, 3.0)])  # type: ignore[list-item]
    again: list[call_queue.Pending] = []

    def submit() -> call_queue.Pending:
        return threads.submit(lambda: call()[0], CUDA, is_ready=True)

    submit().add_done_callback(lambda _: again.append(submit()))
    function, *arguments = tasks.pop()
    function(*arguments)
    assert not tasks and again[0].result(timeout=0).value == 6.0


def test_buffers_for_which_there_is_no_memory_are_tried_once(gpu: Gpu) -> None:
    tried = []

    class Scarce(Doubling):
        def clone(self) -> Doubling:
            tried.append(self)
            raise torch.OutOfMemoryError("no memory")

    calls, streams = BufferedCalls(Scarce(gpu), 3), [gpu.stream() for _ in range(3)]  # type: ignore[arg-type]
    results = []
    for number in range(6):
        with gpu.on(streams[number % 3]):
            results += calls.call([Box(gpu, float(number))])  # type: ignore[list-item]
    gpu.synchronize()
    assert len(tried) == 1 and values(results) == [2.0 * number for number in range(6)]


@pytest.mark.parametrize("then", [None, lambda results: [Box(results[0].gpu).copy_(results[0])]])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_slot_waits_for_each_of_its_streams(
    gpu: Gpu, place: str, then: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies in, compute and copies back use three streams; the next batch reuses the memory of staging and results,
    and so does a batch that a producer creates on the GPU."""
    given = Box(gpu, kind=place)

    class FakeStaging:
        def __init__(self, device: torch.device, pinned: bool = False) -> None:
            self._room = Box(gpu, kind=device.type)

        def like(self, tensors: Sequence[Any]) -> list[Box]:
            return [self._room]

    monkeypatch.setattr(streaming, "StagingBuffer", FakeStaging)
    monkeypatch.setattr(streaming, "_tensors", lambda engine, batch: (given.copy_(Box(gpu, batch, "cpu")),))
    calls = buffered(gpu)
    monkeypatch.setattr(streaming.torch, "Tensor", Box)
    engine: Any = SimpleNamespace(calls=lambda given: calls, unflatten=lambda results, plan: results)
    lanes = _Streams.on(CUDA)
    slots = [_DeviceSlot(engine, then, lanes) for _ in range(3)]
    results: list[Any] = []
    for number in range(12):
        if number >= len(slots):
            results += slots[number % 3].receive().tensors
        slots[number % 3].send(float(number))
    for number in range(9, 12):
        results += slots[number % 3].receive().tensors
    assert values(results) == [2.0 * number for number in range(12)]


def test_lanes_fork_from_the_stream_and_join_it_again(gpu: Gpu) -> None:
    before, behind, inside = Box(gpu), Box(gpu), [Box(gpu) for _ in range(2)]
    for number in range(4):
        with gpu.on(gpu.streams[0]):
            before.copy_(Box(gpu, float(number)))
            with cuda.side_lanes(0, (1, 2)):
                for lane, box in enumerate(inside, 1):
                    with gpu.on(cuda.side_stream(0, lane)):  # type: ignore[arg-type]
                        box.twice(before)
            behind.twice(inside[number % 2])
    gpu.synchronize()
    assert behind.value == 12.0


class Replayed(KernelProgram):
    """A plan of one step, whose weight is still being copied on another stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._device = CUDA
        self._values = SimpleNamespace(arena=Box(gpu), outside=Box(gpu))  # type: ignore[assignment]
        self._outside_pointers, self.calls, self._is_bound_to_own = {}, [], False
        self.weight, self.x, self.y, self.packed = (Box(gpu) for _ in range(4))
        self.weight.copy_(Box(gpu, 5.0))
        self._graph = self._capture(self._first_run())

    def run_steps(self) -> None:
        self.packed.twice(self.weight)
        self.y.twice(self.x)


def test_the_first_run_waits_for_the_weights(gpu: Gpu) -> None:
    """It also finishes before anything else reads the packed weight."""
    assert Replayed(gpu).packed.value == 10.0


def test_a_replay_repeats_the_recording(gpu: Gpu) -> None:
    program, other = Replayed(gpu), gpu.stream()
    for number in range(4):
        with gpu.on(other):
            program.y.copy_(Box(gpu))
            program.x.copy_(Box(gpu, float(number)))
            program.run()
        gpu.synchronize()
        assert program.y.value == 2.0 * number
