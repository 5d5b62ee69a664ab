"""Engines on the GPU: every network, threads and streams, memory, files, and what is said when something fails."""

from __future__ import annotations

import copy
import pathlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import pytest
import torch

import escalade
from escalade import models
from escalade.engine import Engine
from escalade.engine.backend import escalade_backend
from escalade.engine.capture import capture
from escalade.engine.forms import STORAGE
from escalade.engine.program import OutOfMemory
from escalade.ops.precision import precision

pytestmark = pytest.mark.gpu

TOLERANCE = {"fp32": 1e-5, "tf32": 1e-2, "fp16": 1e-2, "bf16": 8e-2}
MORE = {"fp32": 4.0, "tf32": 2.5, "fp16": 2.5, "bf16": 2.5}
"""Times PyTorch's own error. In fp32 some layers are Winograd's, whose transforms lose a bit or two, and of the first
layers every later one makes more; in the other types that is far below the rounding of the values themselves."""


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def engine(cuda: torch.device) -> Engine:
    return _engine(cuda)


@cache
def _engine(device: torch.device) -> Engine:
    model, x = models.model("resnet18")
    return escalade.compile(model, x, dtype="fp16", device=device)


def pytorch(model: torch.nn.Module, x: torch.Tensor, dtype: str) -> torch.Tensor:
    """The model in the dtype, fp32 without TF32."""
    storage = STORAGE[dtype]
    with torch.no_grad(), precision(dtype):
        return copy.deepcopy(model).to(storage)(x.to(storage))


@pytest.mark.parametrize("name", models.NAMES)
def test_networks_match_pytorch(name: str, cuda: torch.device) -> None:
    """In full size, against float64; random weights let errors grow, PyTorch's own too."""
    model, _ = models.model(name)
    torch.manual_seed(3)
    model, x = model.to(cuda), models.example(name, 3).to(cuda)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    graph = capture(model, (x,))
    for dtype, allowed in TOLERANCE.items():
        made = Engine(graph, dtype, cuda)
        found = made(x)
        assert found.dtype == torch.float32 and found.shape == expected.shape
        its_own = difference(pytorch(model, x, dtype), expected)
        assert difference(found, expected) <= max(allowed, MORE[dtype] * its_own), f"{name} in {dtype}"
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

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_calls_allocate_nothing_but_results(engine: Engine, cuda: torch.device) -> None:
    x = torch.randn(4, 3, 224, 224, device=cuda)
    engine(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(cuda)
    torch.cuda.reset_peak_memory_stats(cuda)
    for _ in range(3):
        result = engine(x)
    torch.cuda.synchronize()
    room = 2 * 4 * 1000 * 4 + 4096  # a result, and the one before that it replaces
    assert torch.cuda.max_memory_allocated(cuda) - before <= room
    del result
    assert torch.cuda.memory_allocated(cuda) == before


def test_too_large_a_batch_is_refused_and_the_engine_goes_on(engine: Engine, cuda: torch.device) -> None:
    x = torch.randn(2, 3, 224, 224, device=cuda)
    expected = engine(x)
    big = torch.zeros(1, 3, 224, 224, device=cuda, dtype=torch.float16).expand(1000, -1, -1, -1)
    with _little_memory(cuda):
        before = torch.cuda.memory_allocated(cuda)
        with pytest.raises(OutOfMemory, match=r"needs \d+ MiB .* Take a smaller batch"):
            engine(big)
        assert torch.cuda.memory_allocated(cuda) == before, "nothing is left of it"
        assert torch.equal(engine(x), expected)


@contextmanager
def _little_memory(device: torch.device) -> Iterator[None]:
    """Less than 256 MiB in one piece, whatever PyTorch keeps of what earlier tests gave back."""
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


def test_torch_compile(cuda: torch.device) -> None:
    model, _ = models.model("resnet18")
    model = model.to(cuda)
    compiled = torch.compile(model, backend=escalade_backend, options={"dtype": "fp32"})
    x = torch.randn(2, 3, 224, 224, device=cuda)
    with torch.no_grad():
        assert difference(compiled(x), model.double()(x.double())) < 1e-5
