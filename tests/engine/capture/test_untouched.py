"""The caller's model is unchanged by compiling, whether it succeeds or fails, and so is everything it holds."""

from __future__ import annotations

import importlib
import io
import os
import random
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import escalade
from escalade.engine.capture.export import capture
from escalade.errors import EscaladeError
from tests.engine.capture import callers_models
from tests.engine.capture.callers_models import (
    ASIDE,
    FAILING,
    MODELS,
    SIZE,
    STORE,
    TABLES,
    Model,
    OfTheClass,
    made,
    table,
    writes_input,
)
from tests.engine.untouched import untouched


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with callers_models.forgotten():
        yield


@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_as_it_was(name: str) -> None:
    model, same = made(MODELS[name]), made(MODELS[name])
    x = torch.randn(2, SIZE)
    outside = (OfTheClass, TABLES, STORE, ASIDE, table, {"COUNT": callers_models.COUNT})
    with untouched(model, x, *outside):
        engine = escalade.compile(model, x, device="cpu")
    assert outside[-1] == {"COUNT": callers_models.COUNT}
    if isinstance(model, nn.DataParallel) and isinstance(same, nn.DataParallel):
        model, same = model.module.cpu(), same.module.cpu()  # moved to the GPU, if there is one
    for each in (model, same):
        if name != "an exported program":  # it has no modes
            each.eval()
    with torch.no_grad():
        expected = same(x)
        torch.testing.assert_close(engine(x), expected, rtol=1e-5, atol=1e-5)
        found = model(x)
    assert type(found) is torch.Tensor and torch.equal(found, expected)
    torch.save(model.state_dict(), io.BytesIO())
    TABLES.clear()
    torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", FAILING)
def test_the_model_stays_as_it_was_when_compiling_fails(name: str) -> None:
    model = made(FAILING[name])
    x = torch.randn(2, SIZE)
    with untouched(model, x, TABLES), pytest.raises(EscaladeError):
        escalade.compile(model, x, device="cpu")


class Switching(nn.Linear):
    """Sets process-wide state."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cudnn = torch.backends.cudnn
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = False, not cudnn.benchmark, True
        cudnn.allow_tf32 = not cudnn.allow_tf32
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        torch.set_float32_matmul_precision("medium")
        torch.set_num_threads(torch.get_num_threads() + 1)
        torch.set_autocast_dtype("cpu", torch.float16)
        torch.set_anomaly_enabled(True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        os.environ["OF_THE_MODEL"] = "1"
        return super().forward(x)


def test_switches_that_a_model_sets_are_put_back() -> None:
    model, x = Switching(SIZE, SIZE), torch.randn(2, SIZE)
    with untouched(model, x):
        engine = escalade.compile(model, x, device="cpu")
        engine(torch.ones(3, SIZE))
        with pytest.raises(EscaladeError):
            escalade.compile(model, torch.ones(2, SIZE + 1), device="cpu")
    torch.testing.assert_close(engine(x), nn.functional.linear(x, model.weight, model.bias))


def test_inputs_stay_as_they_were() -> None:
    model = made(lambda: Model(writes_input))
    x, more = torch.randn(2, SIZE), {"y": torch.randn(2, SIZE)}
    expected = model(x.clone(), {"y": more["y"].clone()}).detach()
    with untouched(model, x, more):
        engine = escalade.compile(model, (x, more), device="cpu")
        torch.testing.assert_close(engine(x, more), expected)
        engine.explain(x, more)


SEEDS = """
import torch
import escalade

class Seeds(torch.nn.Linear):
    def forward(self, x):
        torch.manual_seed(3)
        return super().forward(x)

torch.manual_seed(7)
escalade.compile(Seeds(4, 4), torch.ones(2, 4), device="cpu")
print(torch.rand(3, device="cuda").tolist())
"""


@pytest.mark.gpu
def test_an_unused_gpu_keeps_the_callers_seed() -> None:
    """The caller's seed is drawn at first use: during a capture, or after it."""
    done = subprocess.run([sys.executable, "-c", SEEDS], capture_output=True, text=True)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = torch.rand(3, device="cuda").tolist()
    assert done.stdout.splitlines() == [str(expected)], done.stderr


def test_calibration_stays_as_it_was() -> None:
    model = made(lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(inplace=True), nn.Conv2d(16, 16, 1)))
    batches = [torch.randn(2, 16, 5, 5) for _ in range(2)]
    with untouched(model, batches):
        engine = escalade.compile(model, batches[0], dtype="fp8", calibration=batches, device="cpu")
        engine(batches[1])


def test_weights_are_not_copied_twice() -> None:
    """The engine takes over the copies' tensors: no third copy of a large model."""
    layer = nn.Linear(SIZE, SIZE)
    graph = capture(nn.Sequential(layer, nn.ReLU(), layer), (torch.randn(2, SIZE),))
    storages = {tensor.untyped_storage().data_ptr() for tensor in graph.constants.values()}
    assert len(storages) == 2 and layer.weight.untyped_storage().data_ptr() not in storages


def test_imports_draw_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public names are loaded at first use, and some of those packages draw a random number."""

    def draws(name: str) -> Any:
        random.random()
        return types.SimpleNamespace(compile=capture)

    monkeypatch.setattr(importlib, "import_module", draws)
    with untouched():
        assert escalade.__getattr__("compile") is capture


def test_code_is_followed_however_deep() -> None:
    """Functions that refer to each other, deeper than Python can recurse."""
    steps = [f"def step{n}(x): return step{n + 1}(x)" for n in range(3000)]
    chain: dict[str, Any] = {"__name__": "chain"}
    exec("\n".join([*steps, "def run(self, x): return step0(x) if self.deep else self.first(x)"]), chain)
    graph = capture(Model(chain["run"], deep=False), (torch.randn(2, SIZE),))
    assert [node.op for node in graph] == ["linear"]
