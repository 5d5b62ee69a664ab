"""Calls of plans that are CUDA graphs: kernels read the caller's inputs and write the returned tensors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade import models
from escalade.device.graph import ChainedGraph
from escalade.engine import Engine
from escalade.engine.calls import BufferedCalls
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.ops.base.switches import precision
from tests.support import in_threads

pytestmark = pytest.mark.gpu


class Network(nn.Module):
    """Images in, images and scores out, with PyTorch's steps at either end or at neither."""

    def __init__(self, at_the_ends: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.last = nn.Conv2d(32, 8, 1)
        self.fc = nn.Linear(8, 10)
        self.at_the_ends = at_the_ends

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        y = self.last(F.relu(self.second(F.max_pool2d(F.relu(self.first(x)), 2))))
        if self.at_the_ends:
            scores = torch.cumsum(self.fc(y.mean((2, 3))) + torch.cumsum(z, 1), 1)
            return y, scores, x, z
        return y, self.fc(y.mean((2, 3))) + z


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """PyTorch's own convolutions would use TF32."""
    with precision("fp32"):
        yield


def given(device: torch.device, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 16, 24, 24, device=device), torch.randn(batch, 10, device=device)


@cache
def _made(device: torch.device, at_the_ends: bool, dtype: str = "fp32") -> tuple[nn.Module, Engine]:
    torch.manual_seed(6)
    model = Network(at_the_ends).eval().to(device)
    return model, escalade.compile(model, given(device), dtype=dtype, device=device)


@pytest.fixture(params=[False, True], ids=["kernels", "PyTorch at the ends"])
def network(request: pytest.FixtureRequest, cuda: torch.device) -> tuple[nn.Module, Engine]:
    return _made(cuda, request.param)


def check(found: Any, expected: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def program_of(engine: Engine, *tensors: torch.Tensor) -> KernelProgram:
    calls = engine.calls(tensors)
    assert isinstance(calls, BufferedCalls) and isinstance(calls.program, KernelProgram)
    return calls.program


@torch.no_grad()
def test_inputs_and_results_at_new_addresses_in_each_call(
    network: tuple[nn.Module, Engine], cuda: torch.device
) -> None:
    """All results are kept: none may move, and a later call changes no earlier result."""
    model, engine = network
    inputs = [given(cuda) for _ in range(12)]
    results = [engine(*each) for each in inputs]
    for each, found in zip(inputs, results, strict=True):
        check(found, model(*each))
    tensors = [tensor for each in (*inputs, *results) for tensor in each]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


@torch.no_grad()
def test_the_same_addresses_with_other_contents(
    network: tuple[nn.Module, Engine], cuda: torch.device
) -> None:
    model, engine = network
    x, z = given(cuda)
    for _ in range(6):
        for tensor, new in zip((x, z), given(cuda), strict=True):
            tensor.copy_(new)
        check(engine(x, z), model(x, z))


@torch.no_grad()
def test_replays_that_have_not_run_keep_their_pointers(
    network: tuple[nn.Module, Engine], cuda: torch.device
) -> None:
    """The GPU is far behind when the next calls update the graph's addresses."""
    model, engine = network
    inputs = [given(cuda) for _ in range(8)]
    expected = [model(*each) for each in inputs]
    engine(*inputs[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    results = [engine(*each) for each in inputs]
    for found, right in zip(results, expected, strict=True):
        check(found, right)


@torch.no_grad()
def test_two_streams_in_turn(network: tuple[nn.Module, Engine], cuda: torch.device) -> None:
    model, engine = network
    inputs = [given(cuda) for _ in range(12)]
    expected = [model(*each) for each in inputs]
    streams = [torch.cuda.Stream(cuda) for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for number, each in enumerate(inputs):
        with torch.cuda.stream(streams[number % 2]):
            if number % 3 == 0:
                torch.cuda._sleep(10_000_000)
            results.append(engine(*each))
    torch.cuda.synchronize()
    for found, right in zip(results, expected, strict=True):
        check(found, right)


@torch.no_grad()
@pytest.mark.parametrize("at_the_ends", [False, True])
def test_calls_overlap_in_buffers_of_their_own(at_the_ends: bool, cuda: torch.device) -> None:
    """A call ends while one on another stream has not started; so do calls without a waiting thread, and calls with
    given result tensors."""
    model, _ = _made(cuda, at_the_ends)
    engine = escalade.compile(model, given(cuda), device=cuda, buffers=3)
    inputs = [given(cuda) for _ in range(6)]
    expected = [model(*each) for each in inputs]
    late, soon = torch.cuda.Stream(cuda), torch.cuda.Stream(cuda)
    torch.cuda.synchronize()
    for is_made in (False, True):  # recording another buffer set waits for the device
        with torch.cuda.stream(late):
            torch.cuda._sleep(400_000_000)
            first = engine(*inputs[0])
            ended = late.record_event()
        with torch.cuda.stream(soon):
            second = engine(*inputs[1], out=[torch.empty_like(each) for each in expected[1]])
            soon.synchronize()
        assert not (is_made and ended.query())
        torch.cuda.synchronize()
        check(first, expected[0])
        check(tuple(second), expected[1])
    calls = engine.calls(inputs[0])
    assert isinstance(calls, BufferedCalls) and len(calls._sets) == 2
    for pending, right in [
        (engine.submit(*each), right) for each, right in zip(inputs, expected, strict=True)
    ]:
        check(pending.result(60), right)


def test_submitted_calls_of_one_tensor(cuda: torch.device) -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(5))).eval().to(cuda)
    inputs = [torch.randn(2, 8, 12, 12, device=cuda) for _ in range(30)]
    expected = [model(x).detach() for x in inputs]  # first: cuDNN's initialization waits for the device
    engine = escalade.compile(model, inputs[0], device=cuda, buffers=4)
    engine(inputs[0])
    for pending, right in [(engine.submit(x), right) for x, right in zip(inputs, expected, strict=True)]:
        check(pending.result(60), right)


@torch.no_grad()
def test_threads(network: tuple[nn.Module, Engine], cuda: torch.device) -> None:
    model, engine = network
    inputs = [given(cuda, 1 + number % 2) for number in range(6)]
    expected = [model(*each) for each in inputs]
    torch.cuda.synchronize()

    def work(number: int) -> None:
        stream = torch.cuda.Stream(cuda)
        with torch.cuda.stream(stream), torch.no_grad():
            results = [engine(*inputs[(number + turn) % len(inputs)]) for turn in range(20)]
            stream.synchronize()
        for turn, found in enumerate(results):
            check(found, expected[(number + turn) % len(inputs)])

    in_threads(work)


@torch.no_grad()
def test_others_may_wait_for_the_device_while_plans_are_made(cuda: torch.device) -> None:
    """Plans of kernels alone become graphs without recording, so nothing waits."""
    torch.manual_seed(6)
    model = Network(at_the_ends=False).eval().to(cuda)
    engine = escalade.compile(model, given(cuda), dtype="fp32", device=cuda)
    stop, failures, waits = threading.Event(), list[BaseException](), 0

    def wait() -> None:
        nonlocal waits
        while not stop.is_set():
            try:
                torch.cuda.synchronize(cuda)
                waits += 1
            except BaseException as error:
                failures.append(error)
                return

    waiter = threading.Thread(target=wait)
    waiter.start()
    try:
        for batch in range(1, 13):
            tensors = given(cuda, batch)
            check(engine(*tensors), model(*tensors))
            assert type(program_of(engine, *tensors)._graph) is ChainedGraph
    finally:
        stop.set()
        waiter.join()
    assert waits and not failures


def test_a_thread_whose_first_use_of_cuda_is_a_call(
    network: tuple[nn.Module, Engine], cuda: torch.device
) -> None:
    model, engine = network
    inputs = [given(cuda) for _ in range(2)]
    engine(*inputs[0])
    torch.cuda.synchronize()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(engine(*inputs[1])))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    check(found[0], model(*inputs[1]))


@torch.no_grad()
def test_inputs_that_kernels_cannot_read(network: tuple[nn.Module, Engine], cuda: torch.device) -> None:
    model, engine = network
    x, z = given(cuda)

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel() + 1, device=cuda)[1:].view(tensor.shape).copy_(tensor)

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor, tensor], -1)[..., 0]

    for change in (shifted, strided, lambda tensor: torch._neg_view(-tensor)):
        for _ in range(2):
            check(engine(change(x), change(z)), model(x, z))
    last = x.contiguous(memory_format=torch.channels_last)
    check(engine(last, z), model(x, z))
    check(engine(x.transpose(2, 3), z), model(x.transpose(2, 3), z))
    for dtype in (torch.float16, torch.bfloat16):
        found, right = engine(x.to(dtype), z.to(dtype)), model(x.to(dtype).float(), z.to(dtype).float())
        for one, other in zip(found, right, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_calls_in_the_callers_own_graph(network: tuple[nn.Module, Engine], cuda: torch.device) -> None:
    """It has separate memory: calls on another stream may overlap."""
    model, engine = network
    x, z = given(cuda)
    check(engine(x, z), model(x, z))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(cuda)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        recorded = engine(x, z)
    for _ in range(4):
        new, other = given(cuda), given(cuda)
        for tensor, value in zip((x, z), new, strict=True):
            tensor.copy_(value)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        plain = engine(*other)
        torch.cuda.synchronize()
        check(recorded, model(*new))
        check(plain, model(*other))


@torch.no_grad()
def test_a_plan_over_its_own_memory_beside_calls(
    network: tuple[nn.Module, Engine], cuda: torch.device
) -> None:
    model, engine = network
    for _ in range(3):
        x, own = given(cuda), given(cuda)
        program = program_of(engine, *x)
        for room, tensor in zip(program.inputs, own, strict=True):
            room.copy_(tensor)
        program.run()
        found = [output.clone() for output in program.outputs]  # a call may use the same memory
        check(engine(*x), model(*x))
        check(found, list(model(*own)))


@torch.no_grad()
def test_an_engine_dropped_while_it_runs(cuda: torch.device) -> None:
    """Neither its arena nor its weights are reused before the GPU is done with them."""
    torch.manual_seed(6)
    model = Network(False).eval().to(cuda)
    inputs = [given(cuda) for _ in range(3)]
    expected = [model(*each) for each in inputs]
    stream = torch.cuda.Stream(cuda)
    engine = escalade.compile(model, inputs[0], dtype="fp32", device=cuda)
    engine(*inputs[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        results = [engine(*each) for each in inputs]
    del engine
    gc.collect()
    spoilt = [torch.full((1 << 22,), float("nan"), device=cuda) for _ in range(16)]
    torch.cuda.synchronize()
    del spoilt
    for found, right in zip(results, expected, strict=True):
        check(found, right)


@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_images_of_every_kind_are_read_where_they_are(
    layout: torch.memory_format, dtype: torch.dtype, cuda: torch.device
) -> None:
    torch.manual_seed(1)
    model, example = models.model("resnet18")
    model = model.to(cuda)
    scaling: dict[str, Any] = {"normalize": ((0.5,) * 3, (0.25,) * 3)} if dtype is torch.uint8 else {}
    engine = escalade.compile(model, example.to(cuda), dtype="fp16", device=cuda, **scaling)
    for _ in range(3):
        images = torch.rand(2, 3, 224, 224, device=cuda)
        if dtype is torch.uint8:
            x = (255 * images).to(dtype)
            seen = (x / 255 - 0.5) / 0.25
        else:
            x = images.to(dtype)
            seen = x.float()
        x = x.contiguous(memory_format=layout)
        assert program_of(engine, x).plan.inputs_outside
        found, right = engine(x), model(seen)
        assert float((found - right).norm() / right.norm()) < 2e-2


@torch.no_grad()
def test_calls_allocate_nothing_but_results(cuda: torch.device) -> None:
    _, engine = _made(cuda, False)
    x, z = given(cuda)
    found = engine(x, z)
    del found
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    found = engine(x, z)
    assert torch.cuda.memory_allocated(cuda) - before == sum(-(-t.nbytes // 512) * 512 for t in found)
    assert torch.cuda.max_memory_allocated(cuda) == torch.cuda.memory_allocated(cuda)
