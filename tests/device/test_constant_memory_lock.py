"""Calls that fill constant memory of a program: from threads on the twin, on streams and in graphs of a fake GPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from escalade.device import constant_memory_lock, cuda
from escalade.device.program import Program
from escalade.device.recipe import Buffer, ConstantCopy, KernelCall, Recipe
from escalade.device.run import Executable
from escalade.errors import LaunchError
from tests.fake_cuda import Gpu, Stream

PROGRAM = Program.of("shifted.cu", "shifted")
CALL = KernelCall(PROGRAM, (1, 1, 1), (1, 1, 1), (Buffer("y"),), lane=0)
RECIPE = Recipe((ConstantCopy(PROGRAM, "weight", Buffer("weight"), 4), CALL))


# --- on the GPU


class Kernel:
    """A loaded copy of a program: one number of constant memory."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.weight = float("nan")

    def like(self, other: Kernel, device_index: int) -> Kernel:
        return self


class Card:
    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        self.copies: list[Kernel] = []
        shared = self.load(PROGRAM, 0)
        card = self

        class FakeCopy:
            def __init__(self, copy: ConstantCopy, index: int, label: str, kernel: Kernel | None) -> None:
                self.kernel = kernel or shared

            def point(self, buffers: Mapping[str, int]) -> None:
                self.address = buffers["weight"]

            def __call__(self) -> None:
                kernel, address = self.kernel, self.address

                def fill() -> None:
                    kernel.weight = ctypes.c_float.from_address(address).value

                card.gpu.current.enqueue(fill)

        class FakeLaunch(FakeCopy):
            arguments = SimpleNamespace(set=lambda weights_ready, release_dependents: None)

            def point(self, buffers: Mapping[str, int]) -> None:
                self.address = buffers["y"]

            def __call__(self) -> None:
                kernel, address = self.kernel, self.address

                def write() -> None:
                    ctypes.c_float.from_address(address).value = kernel.weight

                card.gpu.current.enqueue(write)

        gpu.stand_in(monkeypatch)
        monkeypatch.setattr(cuda, "load", lambda program, index: shared)
        monkeypatch.setattr(cuda, "load_copy", self.load)
        monkeypatch.setattr(cuda, "CudaLaunch", FakeLaunch)
        monkeypatch.setattr(cuda, "CudaConstantCopy", FakeCopy)
        monkeypatch.setattr(
            cuda, "capture_id", lambda stream: None if gpu.recorded is None else id(gpu.recorded)
        )
        monkeypatch.setattr(constant_memory_lock, "_owners", {})

    def load(self, program: Program, index: int) -> Any:
        assert self.gpu.recorded is None, "nothing can be loaded while a graph is recorded"
        self.copies.append(Kernel(program))
        return self.copies[-1]


@pytest.fixture(params=range(8))
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Card:
    return Card(Gpu(request.param), monkeypatch)


class Calls:
    """Calls, each with its own weight, and their results."""

    def __init__(self, card: Card) -> None:
        self.gpu = card.gpu
        self._tensors: list[dict[str, torch.Tensor]] = []

    def executable(self) -> Executable:
        """Another thread has its own executable."""
        return Executable(RECIPE, torch.device("cuda", 0))

    def __call__(self, executable: Executable, stream: Stream) -> torch.Tensor:
        weight = torch.full((1,), 1.0 + len(self._tensors))
        self._tensors.append({"weight": weight, "y": torch.full((1,), torch.nan)})
        with self.gpu.on(stream):
            executable.bind(self._tensors[-1])()
        return self._tensors[-1]["y"]

    def check(self) -> None:
        self.gpu.synchronize()
        assert [float(t["y"]) for t in self._tensors] == [float(t["weight"]) for t in self._tensors]


def test_streams_do_not_overwrite_constants_still_being_read(card: Card) -> None:
    calls = Calls(card)
    streams = [card.gpu.stream() for _ in range(3)]
    executables = [calls.executable() for _ in streams]
    for turn in range(12):
        calls(executables[turn % 3], streams[turn % 3])
    calls.check()


def test_one_executable_on_several_streams(card: Card) -> None:
    calls = Calls(card)
    executable = calls.executable()
    streams = [card.gpu.stream() for _ in range(3)]
    for turn in range(9):
        calls(executable, streams[turn % 3])
    calls.check()


def poison(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan)


def test_graphs_have_copies_of_their_own(card: Card) -> None:
    """Two graphs and plain calls, each on its own stream, replayed and called in turns."""
    calls = Calls(card)
    executable, streams = calls.executable(), [card.gpu.stream() for _ in range(3)]
    graphs = []
    for stream in streams[:2]:
        calls(executable, stream)
        with card.gpu.recording() as graph:
            written = [calls(executable, stream) for _ in range(2)]
        graphs.append((graph, stream, written))
    for _ in range(4):
        for graph, stream, written in graphs:
            stream.enqueue(partial(poison, written))
            for work in graph:
                stream.enqueue(work)
        calls(executable, streams[2])
    calls.check()
    assert len({id(kernel) for kernel in card.copies}) >= 3


def test_a_graph_without_a_copy_is_refused_by_a_sentence(card: Card) -> None:
    calls = Calls(card)
    executable = calls.executable()
    with card.gpu.recording(), pytest.raises(LaunchError, match="make the same call once just before"):
        calls(executable, card.gpu.current)


def test_work_enqueued_by_a_failed_call_is_waited_for(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(card)
    broken, whole = calls.executable(), calls.executable()
    streams = [card.gpu.stream() for _ in range(2)]
    weight = torch.full((1,), 100.0)

    def fail() -> None:
        raise LaunchError("no room")

    for turn in range(6):
        monkeypatch.setattr(broken, "_steps", [broken._steps[0], fail])
        with card.gpu.on(streams[0]), pytest.raises(LaunchError):
            broken._addresses = {"weight": weight.data_ptr(), "y": 0}
            broken._steps[0].point(broken._addresses)
            broken()
        calls(whole, streams[1 if turn % 2 else 0])
    calls.check()


def test_threads_load_a_program_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two loaded copies, one could be filled and the other launched."""
    here, made = threading.Barrier(2, timeout=0.2), []

    def slow(program: Program, index: int) -> Any:
        made.append(program)
        with contextlib.suppress(threading.BrokenBarrierError):
            here.wait()  # so that the other thread loads it too
        return SimpleNamespace(program=program)

    monkeypatch.setattr(cuda, "load_copy", slow)
    monkeypatch.setattr(cuda, "_loaded", {})
    monkeypatch.setattr(cuda, "_loading", {})
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(cuda.load(PROGRAM, 0))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and found[0] is found[1]


def test_steps_that_take_turns_are_called_together(card: Card) -> None:
    """Taking an executable's launches apart would bypass the lock."""
    executable = Executable(RECIPE, torch.device("cuda", 0))
    assert executable.launches == [executable]
