"""An engine's arithmetic is its own: modes of its creator or caller change nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from escalade.engine import Engine, compile, load
from escalade.errors import UnsupportedError


class Layers(nn.Module):
    """Steps of Escalade and PyTorch, constants to fold, and results whose dtype PyTorch chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 4, 2, 2)
        self.scale = nn.Parameter(torch.randn(6, 6))
        self.steps = nn.Buffer(torch.arange(1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.up(x)) @ (self.scale @ self.scale)
        return F.gelu(y) * self.steps.sqrt() + (x > 0).sum((1, 2, 3), keepdim=True).sqrt()


@contextlib.contextmanager
def switched(set_to: Callable[[Any], object], value: Any, back: Any) -> Iterator[None]:
    set_to(value)
    try:
        yield
    finally:
        set_to(back)


class _Passing(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast of a GPU": lambda: torch.autocast("cuda", torch.float16),
    "fp16 autocast": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "gradients": torch.enable_grad,
    "a default type": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "a default device": lambda: torch.device("meta"),
    "deterministic algorithms": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "coarse products": lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
    "a function mode": _Passing,
    "a dispatch mode": _Dispatching,
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(12)
    return Layers().eval()


@pytest.fixture(scope="module", params=["cpu", "twin"])
def engine(request: pytest.FixtureRequest, model: nn.Module) -> Engine:
    return compile(model, torch.randn(2, 3, 3, 3), device=request.param)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("mode", MODES)
def test_calls_in_every_mode(engine: Engine, model: nn.Module, mode: str) -> None:
    x = torch.randn(2, 3, 3, 3)
    expected = engine(x)
    torch.testing.assert_close(expected, model(x).detach())
    with MODES[mode]():
        found = engine(x)
    assert torch.equal(found, expected) and found.device == x.device and found.dtype == torch.float32


# Default dtypes and devices matter when a model is captured: its own code creates tensors.
@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "a default type"])
def test_engines_made_in_every_mode(model: nn.Module, mode: str) -> None:
    x = torch.randn(2, 3, 3, 3)
    expected = compile(model, x, device="cpu")
    with MODES[mode]():
        made = compile(model, x, device="cpu")
    assert torch.equal(made(x), expected(x))


def test_engines_loaded_in_every_mode(engine: Engine, tmp_path: Any) -> None:
    x = torch.randn(2, 3, 3, 3)
    engine.save(tmp_path / "n.engine")
    with torch.autocast("cpu"), switched(torch.set_default_dtype, torch.float64, torch.float32):
        again = load(tmp_path / "n.engine", device="twin" if engine.on_twin else "cpu")
        found = again(x)
    assert torch.equal(found, engine(x))


def test_ranges_are_measured_in_fp32() -> None:
    torch.manual_seed(13)
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    batches = [torch.randn(2, 16, 7, 7)]
    plain = compile(model, batches[0], dtype="fp8", calibration=batches, device="cpu")
    with torch.autocast("cpu"):
        cast = compile(model, batches[0], dtype="fp8", calibration=batches, device="cpu")
    assert cast.graph.ranges == plain.graph.ranges
    assert torch.equal(cast(batches[0]), plain(batches[0]))


def test_normalising_on_any_default_device() -> None:
    model, x = nn.Conv2d(3, 16, 3), torch.randint(0, 256, (2, 3, 6, 6), dtype=torch.uint8)
    plain = compile(model, x, normalize=((0.5,) * 3, (0.2,) * 3), device="cpu")
    with torch.device("meta"):
        made = compile(model, x, normalize=((0.5,) * 3, (0.2,) * 3), device="cpu")
    assert torch.equal(made(x), plain(x))


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_missing_gradients_are_reported_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Linear(12, 8), torch.randn(2, 12, requires_grad=True)
    engine = compile(model, x, device=device)

    def said() -> list[str]:
        return [record.message for record in caplog.records if record.name == "escalade"]

    with caplog.at_level(logging.WARNING, "escalade"):
        engine(x.detach())
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                engine(x)
        assert not said()
        assert not engine(x).requires_grad
        assert len(said()) == 1
        engine(x)
        engine(torch.randn(3, 12, requires_grad=True))
    assert said() == [
        "an input requires gradients, but an engine's results have none. Train the model itself; for inference "
        "call the engine under torch.no_grad()"
    ]


def test_transforms_and_fake_tensors_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, x = nn.Linear(12, 8), torch.randn(2, 12)
    engine = compile(model, x, device="cpu")
    engine(x)
    for given in (lambda: torch.func.vmap(engine)(torch.randn(5, 2, 12)),
                  lambda: torch.func.jvp(engine, (x,), (x,)),
                  lambda: engine(FakeTensorMode().from_tensor(x))):  # fmt: skip
        with pytest.raises(UnsupportedError, match="an engine needs tensors with data"):
            given()
