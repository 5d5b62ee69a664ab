"""Dropped objects are freed at once: no memory of plans, engines and steps waits for garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from escalade.engine import Engine, compile, training_step
from escalade.engine.plan import stepwise


class Mixed(nn.Module):
    """Kernels before and after PyTorch's steps, and a copied result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(self.conv(x)).mean((2, 3)).cumsum(1)
        return self.layer(y), y.sort(1).values


def left_behind(work: Callable[[], object]) -> list[torch.Tensor]:
    """Tensors of this work that are unreferenced but still alive."""
    work()  # one-time allocations stay
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        return [one for one in gc.garbage if isinstance(one, torch.Tensor) and _has_memory(one)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def _has_memory(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, FakeTensor) or tensor.is_meta or torch._is_functional_tensor(tensor):
        return False
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a tracer's, which represents another
        return False


@pytest.fixture(params=["in one", "step by step"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    if request.param == "step by step":
        monkeypatch.setattr(stepwise, "_HOST_US_PER_STEP", 0.0)
    yield compile(Mixed().eval(), torch.randn(1, 3, 6, 6), device="twin", plans=1, buffers=2)


def test_plans_that_have_to_go_take_their_memory_along(engine: Engine) -> None:
    def work() -> None:
        for size in (2, 3):
            engine(torch.zeros(size, 3, 6, 6))

    assert not left_behind(work)


def test_streams_and_submitted_calls_leave_nothing(engine: Engine) -> None:
    def work() -> None:
        left = engine.stream(torch.zeros(1, 3, 6, 6) for _ in range(3))
        next(left)
        left.close()
        engine.submit(torch.zeros(2, 3, 6, 6)).result()

    assert not left_behind(work)


@pytest.mark.parametrize("device", ["twin", "cpu"])
def test_an_engine_leaves_nothing_of_its_model(device: str) -> None:
    model = Mixed().eval()
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}

    def work() -> None:
        compile(model, torch.zeros(2, 3, 6, 6), device=device)(torch.zeros(2, 3, 6, 6))

    # PyTorch's tracers may hold modules, with the caller's tensors, but no others.
    assert {tensor.data_ptr() for tensor in left_behind(work)} <= own


@pytest.mark.share(7)
@pytest.mark.parametrize(("device", "dtype"), [("twin", "fp16"), ("cpu", "fp32")])
def test_a_training_step_leaves_neither_model_nor_optimiser(device: str, dtype: str) -> None:
    def work() -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x, y = torch.zeros(2, 3, 4, 4), torch.tensor([0, 1])
        step = training_step(
            model, nn.functional.cross_entropy, optimizer, (x, y), dtype=dtype, device=device
        )
        step(x, y)
        step(x[:1], y[:1])

    assert not left_behind(work)
