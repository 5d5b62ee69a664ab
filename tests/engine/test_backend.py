"""`torch.compile(model, backend="escalade")`."""

from __future__ import annotations

import copy
import gc
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends import registry

from escalade import discovery
from escalade.engine import backend
from escalade.engine.engine import Engine
from escalade.engine.training import parts
from escalade.engine.training.parts import PlannedPart, compile_for_training
from escalade.errors import UnsupportedError
from tests.engine.untouched import untouched


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(self.conv(x)))
        return self.fc(F.adaptive_avg_pool2d(y, 1).view(x.shape[0], -1))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(8)
    return Small().eval()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Engines created by the backend."""
    made: list[Engine] = []

    def make(*arguments: Any, **keywords: Any) -> Engine:
        made.append(Engine(*arguments, **keywords))
        return made[-1]

    monkeypatch.setattr(backend, "Engine", make)
    return made


def test_it_is_found_by_its_name(model: nn.Module, engines: list[Engine]) -> None:
    compiled = torch.compile(model, backend="escalade")
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x + 1), model(x + 1))
    assert len(engines) == 1 and len(engines[0].graph.inputs) == 1
    ops = {node.op for node in engines[0]._plans.networks.first.optimized("nchw")}
    assert "few_channels" in ops and "batch_norm" not in ops  # its weights are known


def test_registration_works_after_pytorch_listed_its_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    torch._dynamo.list_backends()
    monkeypatch.setattr(registry, "_BACKENDS", {})
    monkeypatch.setattr(registry, "_COMPILER_FNS", {})
    discovery.register_entry_point()
    discovery.register_entry_point()
    run: Any = registry.lookup_backend("escalade")
    relu = run(torch.fx.symbolic_trace(nn.ReLU()), [-torch.ones(2, 3)])
    assert torch.equal(relu(-torch.ones(2, 3)), torch.zeros(2, 3))


def test_other_batch_sizes_take_one_engine_more(model: nn.Module, engines: list[Engine]) -> None:
    """Dynamo traces again when a size changes for the first time, then for all sizes."""
    compiled = torch.compile(model, backend="escalade")
    with torch.no_grad():
        for batch in (2, 3, 5, 7):
            x = torch.randn(batch, 3, 8, 8)
            torch.testing.assert_close(compiled(x), model(x))
    assert len(engines) == 2 and engines[1].graph.is_batched


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_image_sizes_are_escalades(
    model: nn.Module, engines: list[Engine], caplog: pytest.LogCaptureFixture, dynamic: bool | None
) -> None:
    """From the first size on if Dynamo is told, else from the second; nothing is left of it."""
    compiled = torch.compile(model, backend="escalade", dynamic=dynamic)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "escalade"):
        for size in ((2, 3, 8, 8), (2, 3, 9, 8), (3, 3, 6, 10), (3, 3, 7, 9)):
            x = torch.randn(size)
            torch.testing.assert_close(compiled(x), model(x))
    assert not caplog.records and [len(each._plans.cached) for each in engines][-1] >= 2
    gone = [weakref.ref(each) for each in engines]
    engines.clear()
    torch.compiler.reset()
    del compiled
    gc.collect()
    assert not any(each() for each in gone)


def _exchange(model: Any) -> None:
    """Two swapped values: their sum is unchanged."""
    numbers = model.fc.weight.detach().numpy()
    numbers[0, 0], numbers[1, 1] = numbers[1, 1].copy(), numbers[0, 0].copy()


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: model.fc.weight.mul_(2),
    "data": lambda model: model.fc.weight.data.mul_(2),
    "a buffer's data": lambda model: model.norm.running_mean.data.sub_(0.5),
    "NumPy": lambda model: model.fc.bias.detach().numpy().fill(3),
    "two values exchanged": _exchange,
    "rows turned round": lambda model: model.fc.weight.data.copy_(model.fc.weight.data.flip(0)),
    "other data": lambda model: setattr(model.fc.weight, "data", torch.ones(5, 16)),
    "a state": lambda model: model.load_state_dict(
        {name: tensor * 1.5 for name, tensor in model.state_dict().items()}
    ),
    "an assigned state": lambda model: model.load_state_dict(
        {name: tensor / 2 if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()},
        assign=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "names"), [(torch.no_grad, ("data", "NumPy")), (torch.inference_mode, WRITES)]
)
def test_whatever_is_written_to_weights_is_seen(
    mode: Any, names: Iterable[str], engines: list[Engine]
) -> None:
    """Also changes that PyTorch does not count, which in inference mode is every change."""
    with mode():
        torch.manual_seed(8)
        model = Small().eval()
        compiled = torch.compile(model, backend="escalade")
        x = torch.randn(2, 3, 8, 8)
        for name in names:
            before, made = compiled(x), len(engines)
            WRITES[name](model)
            after = compiled(x)
            torch.testing.assert_close(after, model(x), msg=name)
            assert not torch.allclose(before, after) and len(engines) > made, name


def test_weights_that_hold_the_same_again_need_no_other_engine(
    model: nn.Module, engines: list[Engine]
) -> None:
    compiled = torch.compile(model, backend="escalade")
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        before = compiled(x)
        model.fc.weight.mul_(2).div_(2)  # type: ignore[union-attr,operator]
        model.load_state_dict(model.state_dict())
        assert torch.equal(compiled(x), before) and len(engines) == 1


def test_frozen_weights_are_not_compared(
    model: nn.Module, engines: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.WeightSnapshot, "matches", None)
    compiled = torch.compile(model, backend="escalade", options={"frozen": True})
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        compiled(x)
        torch.testing.assert_close(compiled(x), model(x))
        model.fc.weight.mul_(2)  # type: ignore[union-attr,operator]
        torch.testing.assert_close(compiled(x), model(x))  # PyTorch counted it
    assert len(engines) == 2


def test_weights_are_the_callers(model: nn.Module) -> None:
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="escalade")
    with untouched(model, x), torch.no_grad():
        compiled(x)
        compiled(x)


def test_autocast_is_pytorchs(model: nn.Module, engines: list[Engine]) -> None:
    """A model compiled by PyTorch is compiled for the autocast mode of the call."""
    compiled = torch.compile(model, backend="escalade")
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = compiled(x), model(x)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(engines) == 2


@pytest.mark.parametrize("on_twin", [False, True])
def test_models_are_trained(
    model: nn.Module,
    engines: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_twin: bool,
) -> None:
    """Forward and backward are plans, with kernels on the twin: the same gradients and statistics, also for other
    batch sizes."""
    if on_twin:
        monkeypatch.setattr(backend, "compile_for_training", partial(compile_for_training, on_twin=True))
    expected = copy.deepcopy(model.train())
    compiled = torch.compile(model, backend="escalade")
    with caplog.at_level(logging.WARNING, "escalade"):
        for size in (2, 2, 3):
            x = torch.randn(size, 3, 4, 4, requires_grad=True)
            y = x.detach().clone().requires_grad_()
            F.mse_loss(compiled(x), torch.ones(size, 5)).backward()
            F.mse_loss(expected(y), torch.ones(size, 5)).backward()
            torch.testing.assert_close(x.grad, y.grad)
            gradients = [[one.grad for one in each.parameters()] for each in (model, expected)]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert not engines and not caplog.records


def test_training_without_gradients_is_pytorchs(
    model: nn.Module, engines: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """BatchNorm's statistics change; an engine's would not."""
    model.train()
    compiled = torch.compile(model, backend="escalade")
    before = model.norm.running_mean.clone()  # type: ignore[union-attr,operator]
    with torch.no_grad(), caplog.at_level(logging.WARNING, "escalade"):
        compiled(torch.randn(2, 3, 8, 8))
    assert not torch.equal(model.norm.running_mean, before) and not engines  # type: ignore[union-attr,arg-type]
    assert "PyTorch runs this part of the model itself" in caplog.text


class Broken(nn.Module):
    """Two graph breaks make three parts. The last one writes to a value of the part before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.relu(self.first(x))
        torch._dynamo.graph_break()
        z = self.second(y) * 2
        torch._dynamo.graph_break()
        z.add_(1)
        return y, z


def test_parts_between_graph_breaks(engines: list[Engine]) -> None:
    torch.manual_seed(9)
    model = Broken().eval()
    compiled = torch.compile(model, backend="escalade")
    x = torch.randn(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x + 1), model(x + 1))
    assert len(engines) == 2  # the third part changes its input


def test_a_dtype_can_be_requested(model: nn.Module, engines: list[Engine]) -> None:
    x = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend="escalade", options={"dtype": "fp16"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=5e-3, atol=5e-3)
    assert engines[0].dtype == "fp16"
    with torch.no_grad():
        half = torch.compile(model.half(), backend="escalade")(x.half())
    assert half.dtype == torch.float16 and engines[1].dtype == "fp16"


def test_types_that_escalade_lacks_are_pytorchs(model: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    model.double()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "escalade"):
        y = torch.compile(model, backend="escalade")(x)
        assert y.dtype == torch.float64
        torch.testing.assert_close(y, model(x))
    assert "weights of torch.float64" in caplog.text


def test_unknown_options_are_refused(model: nn.Module) -> None:
    graph = torch.fx.symbolic_trace(nn.ReLU())
    with pytest.raises(UnsupportedError, match="no option speed; its options are dtype, frozen"):
        backend.escalade_backend(graph, [torch.randn(2)], options={"speed": "high"})
    with pytest.raises(UnsupportedError, match="dtype 'fp4': compile takes"):
        backend.escalade_backend(graph, [torch.randn(2)], options={"dtype": "fp4"})
    with pytest.raises(UnsupportedError, match="frozen='yes': pass True or False"):
        backend.escalade_backend(graph, [torch.randn(2)], options={"frozen": "yes"})


def test_the_least_recently_used_plan_of_a_part_is_evicted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "MAX_PLANS", 2)
    planned = []
    monkeypatch.setattr(PlannedPart, "_planned", lambda part, given, _: planned.append(len(given[0])))
    part = PlannedPart(torch.fx.symbolic_trace(nn.Identity()), "fp32", print, on_twin=True)
    for size in (1, 2, 2, 1, 3, 1, 2):
        assert part(torch.zeros(size)).shape == (size,)
    assert planned == [1, 2, 3, 2]
