"""Engines on the GPU: every network, threads and streams, memory, files, and messages of failures."""

from __future__ import annotations

import copy
import pathlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import escalade
from escalade import models
from escalade.device.timing import host_time
from escalade.engine import Engine
from escalade.engine.backend import escalade_backend
from escalade.engine.calls import BufferedCalls, DirectCalls
from escalade.engine.capture.export import capture
from escalade.errors import OutOfMemory
from escalade.models import settle
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.base.switches import precision
from escalade.ops.expressions import Expression
from escalade.tune.verification import compare
from escalade_bench.networks.judging import LEAST, LEAST_ROWS, MOST, TIMES, standard
from tests.bench.coverage.networks import NETWORKS
from tests.engine.untouched import untouched
from tests.support import in_threads

pytestmark = pytest.mark.gpu

CUT_OFF = 4.6e-4
"""Error of a layer's TF32 products on Hopper, which truncates x: all in one direction, so that layers add up."""


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def engine(cuda: torch.device) -> Engine:
    return _engine(cuda)


@cache
def _engine(device: torch.device) -> Engine:
    model, x = models.model("resnet18")
    return escalade.compile(model, x, dtype="fp16", device=device)


def allowed(model: torch.nn.Module, dtype: str, own: float) -> float:
    """As in a measurement, but without its bounds: with random weights errors grow from layer to layer."""
    found = max(LEAST[dtype], TIMES[dtype] * own)
    layers = sum(isinstance(layer, torch.nn.Conv2d | torch.nn.Linear) for layer in model.modules())
    return max(found, layers * CUT_OFF) if dtype == "tf32" else found


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_every_class_whose_weights_are_on_the_gpu(name: str, cuda: torch.device) -> None:
    torch.manual_seed(0)
    model, x = NETWORKS[name](), torch.randn(4, 3, 32, 32)
    settle(model, x)
    model.eval()
    with torch.no_grad():
        expected = pytree.tree_leaves(copy.deepcopy(model).double()(x.double()))
    model, x = model.to(cuda), x.to(cuda)
    found = pytree.tree_leaves(escalade.compile(model, x, dtype="fp16")(x))
    errors = [relative_error(result.cpu(), wanted) for result, wanted in zip(found, expected, strict=True)]
    assert all(error < MOST["fp16"] for error in errors), errors


@pytest.mark.parametrize("name", models.NAMES)
def test_networks_match_pytorch(name: str, cuda: torch.device) -> None:
    """In full size, against float64, as accurate as PyTorch in the same dtype."""
    model, _ = models.model(name)
    torch.manual_seed(3)
    model, x = model.to(cuda), models.example(name, LEAST_ROWS).to(cuda)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    graph = capture(model, (x,))
    for dtype in TIMES.keys() - QUANTIZED:  # which need a calibration
        made = Engine(graph, dtype, cuda)
        found = made(x)
        assert found.dtype == torch.float32 and found.shape == expected.shape
        own = standard(model, x, dtype, expected).own[0]
        failure, _ = compare(found, expected, allowed(model, dtype, own))
        assert not failure, f"{name} in {dtype}, where PyTorch's error is {own:.2e}: {failure}"
        assert torch.equal(found, made(x)), "a second call gives the same bits"


def test_other_batch_sizes_threads_and_streams(engine: Engine, cuda: torch.device) -> None:
    generator = torch.Generator(cuda).manual_seed(1)
    batches = [torch.randn(size, 3, 224, 224, device=cuda, generator=generator) for size in (1, 2, 5, 2, 1)]
    expected = [engine(x).clone() for x in batches]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream(cuda)
        with torch.cuda.stream(stream):
            for turn in range(10):
                which = (number + turn) % len(batches)
                if not torch.equal(engine(batches[which]), expected[which]):
                    wrong.append(f"thread {number}, turn {turn}")
        stream.synchronize()

    in_threads(work)
    assert not wrong


def test_every_replay_computes(cuda: torch.device) -> None:
    """New inputs each time, and nothing left in the outputs that could be mistaken for a result."""
    torch.manual_seed(5)
    layers = [torch.nn.Conv2d(8, 8, 3, padding=1) for _ in range(5)]
    model = torch.nn.Sequential(*layers).eval().to(cuda)
    x = torch.randn(2, 8, 20, 20, device=cuda)
    engine = escalade.compile(model, x, dtype="fp32", device=cuda)
    assert isinstance(engine.calls([x]), BufferedCalls)
    program = engine.program(x)
    for seed in range(4):
        given = torch.randn(2, 8, 20, 20, device=cuda, generator=torch.Generator(cuda).manual_seed(seed))
        with torch.no_grad():
            expected = copy.deepcopy(model).double()(given.double())
        program.outputs[0].fill_(torch.nan)
        program.inputs[0].copy_(given)
        program.run()
        assert difference(program.outputs[0], expected) < 1e-5
        program.outputs[0].fill_(torch.nan)
        assert difference(engine(given), expected) < 1e-5


def test_a_call_waits_for_the_one_on_another_stream(engine: Engine, cuda: torch.device) -> None:
    """Both use the buffers of one plan: the second is called before the first has started."""
    generator = torch.Generator(cuda).manual_seed(2)
    batches = [torch.randn(3, 3, 224, 224, device=cuda, generator=generator) for _ in range(8)]
    expected = [engine(x).clone() for x in batches]
    streams = [torch.cuda.Stream(cuda) for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for number, x in enumerate(batches):
        with torch.cuda.stream(streams[number % 2]):
            if number % 2 == 0:
                torch.cuda._sleep(20_000_000)
            results.append(engine(x))
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))


def test_calls_allocate_nothing_but_results(engine: Engine, cuda: torch.device) -> None:
    x = torch.randn(4, 3, 224, 224, device=cuda)
    engine(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    for _ in range(3):
        result = engine(x)
    torch.cuda.synchronize()
    room = 2 * 4 * 1000 * 4 + 4096  # a result, and the previous one that it replaces
    assert torch.cuda.max_memory_allocated(cuda) - before <= room
    del result
    assert torch.cuda.memory_allocated(cuda) == before


def test_too_large_a_batch_is_refused_and_the_engine_still_works(engine: Engine, cuda: torch.device) -> None:
    x = torch.randn(2, 3, 224, 224, device=cuda)
    expected = engine(x)
    big = torch.zeros(1, 3, 224, 224, device=cuda, dtype=torch.float16).expand(1000, -1, -1, -1)
    with _little_memory(cuda):
        before = torch.cuda.memory_allocated(cuda)
        with pytest.raises(OutOfMemory, match=r"needs \d+ MiB .* Use a smaller batch"):
            engine(big)
        assert torch.cuda.memory_allocated(cuda) == before, "nothing is left of it"
        assert torch.equal(engine(x), expected)


@contextmanager
def _little_memory(device: torch.device) -> Iterator[None]:
    """Less than 256 MiB in one piece, whatever PyTorch's allocator kept of earlier tests."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    allowed = torch.cuda.get_per_process_memory_fraction(device)
    _, total = torch.cuda.mem_get_info(device)
    room = torch.cuda.memory_reserved(device) + (600 << 20)
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / total), device)
    taken = []
    try:
        with suppress(torch.OutOfMemoryError):
            while True:
                taken.append(torch.empty(256 << 20, dtype=torch.uint8, device=device))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(allowed, device)


def test_a_saved_engine_starts_without_the_model(
    engine: Engine, tmp_path: pathlib.Path, cuda: torch.device
) -> None:
    x = torch.randn(2, 3, 224, 224, device=cuda)
    engine.save(tmp_path / "network.escalade")
    assert torch.equal(escalade.load(tmp_path / "network.escalade")(x), engine(x))


class Makes(torch.nn.Module):
    """Factory calls: one is folded, and one is as large as the batch, both on an explicit device."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Buffer(torch.arange(8).flip(0))
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)[:, self.table] * torch.arange(8, device=x.device, dtype=x.dtype)
        more = torch.ones(x.shape[0], 2, device=x.device)
        return torch.cat([y, more, y.to(x.device).max(1, keepdim=True)[0]], 1)


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_a_saved_engine_runs_on_another_device(home: str, cuda: torch.device, tmp_path: pathlib.Path) -> None:
    """The file names the device of the capture; the engine's own device counts."""
    torch.manual_seed(2)
    model = Makes().eval()
    x = torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x)
    engine = escalade.compile(model.to(home), x[:2].to(home))
    engine.save(tmp_path / "makes.escalade")
    for device in ("cpu", cuda):
        found = escalade.load(tmp_path / "makes.escalade", device=device)(x.to(device))
        assert found.device.type == torch.device(device).type
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def test_torch_compile(cuda: torch.device) -> None:
    model, _ = models.model("resnet18")
    model = model.to(cuda)
    compiled = torch.compile(model, backend=escalade_backend, options={"dtype": "fp32"})
    x = torch.randn(2, 3, 224, 224, device=cuda)
    with torch.no_grad():
        assert difference(compiled(x), model.double()(x.double())) < 1e-5


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_whatever_is_written_to_weights_is_seen_by_the_backend(mode: Any, cuda: torch.device) -> None:
    """Also through `.data`, and in inference mode, where PyTorch counts no changes."""
    torch._dynamo.reset()
    with mode():
        model = models.LeNet().eval().to(cuda)
        compiled = torch.compile(model, backend=escalade_backend, options={"dtype": "fp32"})
        x = torch.randn(2, 1, 86, 86, device=cuda)
        weights = list(model.parameters())
        for write in (
            lambda: weights[0].mul_(2),
            lambda: weights[-2].data.mul_(2),
            lambda: weights[-1].data.copy_(weights[-1].data.flip(0)),
            lambda: model.load_state_dict({name: t / 2 for name, t in model.state_dict().items()}),
        ):
            before = compiled(x)
            write()
            with precision("fp32"):
                expected = model(x)
            assert difference(compiled(x), expected) < 1e-5
            assert not torch.allclose(compiled(x), before)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_recorded_call_of_the_backend_reads_the_weights(frozen: bool, cuda: torch.device) -> None:
    """A graph replay compares no weights: unless they are frozen, PyTorch's operators are recorded."""
    torch._dynamo.reset()
    model = models.SpectralAutoencoder().eval().to(cuda)
    compiled = torch.compile(model, backend=escalade_backend, options={"dtype": "fp32", "frozen": frozen})
    x = torch.randn(4, 320, device=cuda)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(cuda)
    with torch.no_grad():
        with torch.cuda.stream(side):
            compiled(x)
            model(x)
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            y = compiled(x)
        graph.replay()
        torch.cuda.synchronize()
        assert difference(y, model(x)) < 1e-5
        if frozen:
            return  # undefined whether a change is seen
        next(model.parameters()).data.mul_(2)
        graph.replay()
        torch.cuda.synchronize()
        assert difference(y, model(x)) < 1e-5


class Upwards(torch.nn.Module):
    """Kernels of Escalade, and a transposed convolution and a product by PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(16, 16, 3, padding=1)
        self.up = torch.nn.ConvTranspose2d(16, 16, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(torch.relu(self.conv(x)))
        return y @ y.transpose(2, 3)


def test_autocast_does_not_change_an_engine(cuda: torch.device) -> None:
    """Neither one that is built during it, whose PyTorch steps are recorded then, nor one that is called in it."""
    torch.manual_seed(2)
    model, x = Upwards().eval().to(cuda), torch.randn(2, 16, 12, 12, device=cuda)
    plain = escalade.compile(model, x, dtype="fp32")
    expected = model.double()(x.double()).detach()
    model.float()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cuda", dtype):
            made = escalade.compile(model, x, dtype="fp32")
            results = [made(x), plain(x)]
        for found in (*results, made(x), plain(x)):
            assert found.dtype == torch.float32 and difference(found, expected) < 1e-5


def test_a_model_on_the_gpu_stays_as_it_was(cuda: torch.device) -> None:
    torch.manual_seed(2)
    model, x = Upwards().train().to(cuda), torch.randn(2, 16, 12, 12, device=cuda)
    model.again = model.conv
    with untouched(model, x):
        escalade.compile(model, x, dtype="fp16")


@pytest.fixture(params=["spectral_autoencoder", "lenet"])
def direct(request: pytest.FixtureRequest, cuda: torch.device) -> tuple[Engine, list[torch.Tensor]]:
    """A network of few launches, and batches in its kernels' layout."""
    engine, x = _small_network(request.param, cuda)
    if not isinstance(engine.calls([x]), DirectCalls):
        pytest.skip(f"{request.param} is not run directly here")
    return engine, [torch.randn_like(x) for _ in range(6)]


@cache
def _small_network(name: str, device: torch.device) -> tuple[Engine, torch.Tensor]:
    model, _ = models.model(name)
    x = models.example(name, 32).to(device)
    return escalade.compile(model, x, dtype="fp32", device=device), x


def replayed(engine: Engine, x: torch.Tensor) -> torch.Tensor:
    """By the plan's CUDA graph, over its own memory."""
    program = engine.program(x)
    program.inputs[0].copy_(x)
    program.run()
    return program.outputs[0].clone()


def test_the_spectral_autoencoder_is_run_directly(cuda: torch.device) -> None:
    engine, x = _small_network("spectral_autoencoder", cuda)
    calls = engine.calls([x])
    assert isinstance(calls, DirectCalls) and len(calls._launches) == 1


def test_results_of_direct_calls_are_the_callers_own(direct: tuple[Engine, list[torch.Tensor]]) -> None:
    engine, batches = direct
    expected = [replayed(engine, x) for x in batches]
    results = [engine(x) for x in batches]
    assert len({result.data_ptr() for result in results}) == len(results)
    for found, right in zip(results, expected, strict=True):
        assert torch.equal(found, right)
    x = batches[0]
    strided = torch.stack([x, x], dim=-1)[..., 0]
    shifted = torch.empty(x.numel() + 1, device=x.device)[1:].view(x.shape).copy_(x)
    for other in (strided, shifted):
        assert torch.equal(engine(other), expected[0])
    half = x.half()
    assert difference(engine(half), engine(half.float())) < 1e-5


def test_direct_calls_on_side_streams_and_threads(direct: tuple[Engine, list[torch.Tensor]]) -> None:
    engine, batches = direct
    expected = [engine(x) for x in batches]
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [engine(batches[(number + turn) % len(batches)]) for turn in range(30)]
            stream.synchronize()
        for turn, found in enumerate(results):
            if not torch.equal(found, expected[(number + turn) % len(batches)]):
                wrong.append(f"thread {number}, turn {turn}")

    in_threads(work)
    assert not wrong


def test_a_thread_whose_first_use_of_cuda_is_a_direct_call(
    direct: tuple[Engine, list[torch.Tensor]],
) -> None:
    """It has no context yet, and its result's memory comes from PyTorch's cache."""
    engine, batches = direct
    expected = engine(batches[0]).clone()
    torch.cuda.synchronize()
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(engine(batches[0])))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], expected)


def test_direct_calls_in_the_callers_own_graph(direct: tuple[Engine, list[torch.Tensor]]) -> None:
    engine, batches = direct
    expected = [engine(x) for x in batches]
    x = batches[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = engine(x) * 2
    for given, right in zip(batches, expected, strict=True):
        x.copy_(given)
        graph.replay()
        assert torch.equal(y, 2 * right)
    assert torch.equal(engine(batches[0]), expected[0]), "plain calls go on"


def test_direct_calls_allocate_nothing_but_results_that_last(
    direct: tuple[Engine, list[torch.Tensor]], cuda: torch.device
) -> None:
    engine, batches = direct
    kept = engine(batches[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    for x in batches:
        engine(x)
    assert torch.cuda.memory_allocated(cuda) == before
    del kept


def test_the_host_cost_of_a_call(
    direct: tuple[Engine, list[torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed, not asserted: it depends on the machine."""
    engine, batches = direct
    x = batches[0]
    works = {"call": lambda: engine(x), "replay of its graph": engine.program(x).run}
    costs = {name: host_time(work, torch.cuda.synchronize).median_us for name, work in works.items()}
    with capsys.disabled():
        print("\nhost cost, us:", ", ".join(f"{name} {cost:.1f}" for name, cost in costs.items()))
    assert torch.equal(engine(x), replayed(engine, x))


def test_expressions_evaluated_by_pytorch_can_be_recorded(cuda: torch.device) -> None:
    x = torch.linspace(-9, 9, 64, device=cuda, dtype=torch.float16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,) = Expression.parse("clamp(x,0,6)").evaluate({"x": x})
    y.fill_(torch.nan)
    graph.replay()
    assert torch.equal(y, x.clamp(0, 6))


def test_new_weights_in_place_also_in_captured_cuda_graphs(cuda: torch.device) -> None:
    """`refresh` writes into the memory that plans, and CUDA graphs around the engine, read."""
    for dtype in ("fp16", "tf32"):
        (model, x), (other, _) = models.model("resnet18"), models.model("resnet18")
        model, other, x = model.to(cuda), other.to(cuda), x.to(cuda)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.9 + 0.2 * torch.rand_like(parameter))
        engine = escalade.compile(model, x, dtype=dtype, buffers=2)
        graph = torch.cuda.CUDAGraph()
        engine(x)
        with torch.cuda.graph(graph):
            captured = engine(x)
        expected = escalade.compile(other, x, dtype=dtype)(x)
        model.load_state_dict(other.state_dict())
        engine.refresh()
        graph.replay()
        assert torch.equal(captured, expected)
        with torch.cuda.stream(torch.cuda.Stream()):
            results = engine(x)
        torch.cuda.synchronize()
        assert torch.equal(results, expected)
