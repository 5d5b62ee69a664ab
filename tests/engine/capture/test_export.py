"""From modules to graphs: operations, sizes, and refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import escalade
from escalade.engine.capture.export import capture
from escalade.engine.capture.reader import CaptureError
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import Batch, Graph
from escalade.errors import UnsupportedError


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        return self.function(*arguments, **keywords)


def captured(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Graph:
    return capture(Call(function), arguments, keywords)


def check(function: Callable[..., Any], *shape: int, batches: tuple[int, ...] = (1, 3)) -> Graph:
    """The engine matches the function, also for other batch sizes."""
    graph = captured(function, torch.randn(2, *shape))
    engine = Engine(graph, "fp32", "cpu")
    for batch in batches if graph.is_batched else (2,):
        x = torch.randn(batch, *shape)
        expected = function(x.clone())
        torch.testing.assert_close(engine(x), expected)
    return graph


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph]


def test_known_operators_become_nodes() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding="valid", bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(8, 8, 3, padding="same", dilation=2),
        nn.ReLU6(inplace=True),
        nn.AvgPool2d(2),
        nn.Dropout2d(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(8, 5),
        nn.Softmax(-1),
    ).eval()
    graph = capture(model, (torch.randn(1, 3, 18, 18),))
    assert ops(graph) == [
        "conv2d", "batch_norm", "relu", "max_pool2d", "conv2d", "relu", "avg_pool2d", "adaptive_avg_pool2d",
        "reshape", "linear", "softmax",
    ]  # fmt: skip
    first, *_, same = (node for node in graph if node.op == "conv2d")
    assert first.attributes["stride"] == (2, 2) and first.attributes["padding"] == (0, 0)
    assert same.attributes["padding"] == (2, 2) and same.attributes["dilation"] == (2, 2)
    assert [node.attributes["limit"] for node in graph if node.op == "relu"] == [None, 6.0]
    assert [node.source for node in graph][:2] == ["0", "1"]
    assert graph.inputs[0].shape == (Batch(), 3, 18, 18) and graph.is_batched


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: F.avg_pool2d(x, 3, 2, 1), (3, 9, 9)),  # windows overlap
        (lambda x: F.avg_pool2d(x, 2, divisor_override=3), (3, 8, 8)),
        (lambda x: F.max_pool2d(x, 3, 1, 1, dilation=2), (3, 9, 9)),
        (lambda x: F.hardtanh(x, -1.0, 1.0), (3, 4)),
        (lambda x: torch.softmax(x, 1), (3, 4)),
        (lambda x: torch.softmax(x, -1), (3, 4, 5)),
        (lambda x: x.mean((2, 3)), (3, 4, 4)),
        (lambda x: x.mean((-1, -2), keepdim=True), (3, 4, 4)),
        (lambda x: x.mean(1), (3, 4, 4)),
        (lambda x: torch.add(x, x, alpha=2), (3, 4)),
        (lambda x: x + x[:, :1], (3, 4)),
        (lambda x: x + 1, (3, 4)),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), (3, 4, 4)),
        (lambda x: x.permute(0, 2, 3, 1).flatten(1), (3, 4, 5)),
        (lambda x: x.view(x.shape[0] * 3, 4).view(x.shape[0], 12), (3, 4)),
        (lambda x: torch.cat([x.flatten(1), x.new_zeros(x.shape[0], 2)], 1), (3, 4)),
        (lambda x: torch.where(x > 0, x, x * 0.1), (3, 4, 4)),
        (lambda x: x * torch.arange(4.0), (3, 4)),
        (lambda x: x.unsqueeze(1).squeeze(1).contiguous().clone().detach(), (3, 4)),
        (lambda x: x.view(torch.int32).float() * 0 + x, (3, 4)),
        (lambda x: x.argmax(1), (3, 4, 4)),
        (lambda x: x.double().sum(1), (3, 4)),
    ],
)
def test_every_operator_matches_pytorch(function: Callable[..., Any], shape: tuple[int, ...]) -> None:
    check(function, *shape)


def _reads_after_change(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.relu_()
    y.add_(1)
    return z * 3


def _reads_before_change(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.relu_()
    z.add_(1)
    return y * 3


def _changes_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.view(-1, 12)[:, :3].mul_(5)
    return y


def _view_sees_change(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.relu_()
    flat = z.flatten(1)
    y.add_(1)
    return flat


def _changes_chunk(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    first, second = y.chunk(2, 1)
    first.add_(1)
    return torch.cat([y, second], 1)


def _changes_only_view(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).flatten(1).add_(1).view(-1, 3, 4).mul_(3)


def _older_view_sees_change(x: torch.Tensor) -> torch.Tensor:
    flat = (x * 2).flatten(1)
    image = flat.view(-1, 3, 4)
    flat.add_(1)
    return image


def _base_is_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y.flatten(1).add_(1), y


def _later_view_is_changed(x: torch.Tensor) -> torch.Tensor:
    flat = (x * 2).flatten(1).add_(1)
    flat.view(-1, 3, 4).mul_(3)
    return flat


def _changes_undeclared_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch.broadcast_tensors(y, y)[0].add_(1)
    return y


def _copy_does_not_see_change(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y.clone()
    y.add_(1)
    return z - y


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).relu_().add_(1).mul_(3),
        _reads_after_change,
        _reads_before_change,
        _changes_view,
        _view_sees_change,
        _changes_chunk,
        _changes_only_view,
        _older_view_sees_change,
        _base_is_returned,
        _later_view_is_changed,
        _changes_undeclared_view,
        _copy_does_not_see_change,
    ],
)
def test_changes_in_place_are_visible_to_all_holders_of_the_tensor(function: Callable[..., Any]) -> None:
    check(function, 4, 3)


@pytest.mark.parametrize("through_view", [False, True])
def test_the_callers_input_stays_as_it_is(through_view: bool) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        (x.view(-1) if through_view else x).mul_(2)
        return x + 1

    engine = Engine(captured(function, torch.randn(2, 6)), "fp32", "cpu")
    x = torch.randn(2, 6)
    kept = x.clone()
    torch.testing.assert_close(engine(x), function(x.clone()))
    torch.testing.assert_close(x, kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.view(2, -1), (2, 6)),
        (lambda x: x.view(1, -1), (1, 6)),
        (lambda x: x.sum(0, keepdim=True) + torch.zeros(1, 6), (1, 6)),
        (lambda x: torch.cat([x, x[:1]]), (2, 6)),
    ],
)
def test_other_dependence_on_the_batch_keeps_its_size(
    function: Callable[..., Any], shape: tuple[int, ...]
) -> None:
    x = torch.randn(*shape)
    graph = captured(function, x)
    engine = Engine(graph, "fp32", "cpu")
    torch.testing.assert_close(engine(x), function(x))
    if not graph.is_batched:
        assert any("one batch size only" in note for note in graph.notes)
        with pytest.raises(UnsupportedError, match="was compiled for"):
            engine(torch.randn(shape[0] + 1, *shape[1:]))


def test_a_squeezed_batch_of_one_is_the_models_own() -> None:
    function = lambda x: F.adaptive_avg_pool2d(x, 1).squeeze()  # noqa: E731
    one, two = torch.randn(1, 3, 4, 4), torch.randn(2, 3, 4, 4)
    engine = Engine(captured(function, one), "fp32", "cpu")
    assert engine(one).shape == (3,)
    engine = Engine(captured(function, two), "fp32", "cpu")
    assert engine(two).shape == (2, 3) and engine(torch.cat([two, one])).shape == (3, 3)
    with pytest.raises(UnsupportedError, match="batch size 1: .* >= 2"):
        engine(one)


def test_branches_by_batch_hold_for_their_sizes_alone() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] > 4 else x + 1

    large, small = torch.randn(8, 3), torch.randn(3, 3)
    engine = Engine(captured(function, large), "fp32", "cpu")
    torch.testing.assert_close(engine(large[:5]), large[:5] * 2)
    with pytest.raises(UnsupportedError, match=">= 5"):
        engine(small)
    engine = Engine(captured(function, small), "fp32", "cpu")
    torch.testing.assert_close(engine(small[:1]), small[:1] + 1)
    with pytest.raises(UnsupportedError, match="1 to 4"):
        engine(large)


def test_properties_of_some_batches_are_not_claimed_of_others() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[0] % 3 == 0 else x + 1

    for least, most in ((1, 2), (3, 3)):
        x = torch.randn(most, 3)
        engine = Engine(captured(function, x), "fp32", "cpu")
        torch.testing.assert_close(engine(x), function(x))
        with pytest.raises(UnsupportedError, match=f"batch size 6: .* {least} to {most};"):
            engine(torch.randn(6, 3))
    graph = captured(lambda x: x * 2 if x.shape[0] == 1 else x + 1, torch.randn(2, 3))
    assert graph.batches == (2, None)  # export never tests this size
    one = torch.randn(1, 3)
    odd = captured(lambda x: x * 2 if x.shape[0] % 2 else x, one)  # export tries it with two
    torch.testing.assert_close(Engine(odd, "fp32", "cpu")(one), one * 2)


def test_two_inputs_share_the_batch() -> None:
    graph = captured(lambda x, y: (x + y, x.flatten(1)), torch.randn(1, 2, 3), torch.randn(1, 2, 3))
    x, y = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    added, flat = Engine(graph, "fp32", "cpu")(x, y)
    torch.testing.assert_close((added, flat), (x + y, x.flatten(1)))
    with pytest.raises(UnsupportedError, match="was compiled for"):
        Engine(graph, "fp32", "cpu")(x, y[:3])


class Named(nn.Module):
    def forward(self, x: torch.Tensor, shift: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        y = x * scale - shift
        return {"y": y, "parts": (y.relu(), [y.sum(1)])}


def test_names_and_structures_are_the_models() -> None:
    model = Named()
    x, shift, scale = torch.randn(3, 2, 4).unbind()
    graph = capture(model, (x,), {"scale": scale, "shift": shift})
    engine = Engine(graph, "fp32", "cpu")
    expected = model(x, shift, scale=scale)
    torch.testing.assert_close(engine(x, scale=scale, shift=shift), expected)
    torch.testing.assert_close(engine(x, shift=shift, scale=scale), expected)
    with pytest.raises(UnsupportedError, match="call the engine with"):
        engine(x, shift, scale)  # ambiguous which of them is which
    with pytest.raises(UnsupportedError, match="call the engine with"):
        engine(x, scale=scale)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.chunk(3, 1),
        lambda x: torch.split(x, [1, 5], 1)[1],
        lambda x: tuple(x.max(1)),
        lambda x: torch.stack(x.unbind(1)[:2], 1),
        lambda x: (x, x.sum(1), x),
    ],
)
def test_operations_of_several_results(function: Callable[..., Any]) -> None:
    x = torch.randn(2, 6)
    torch.testing.assert_close(Engine(captured(function, x), "fp32", "cpu")(x), function(x))


def test_the_types_of_results_are_the_models() -> None:
    function = lambda x: (x.relu().half(), x.relu(), x.argmax(1), x.double() * 2, x > 0)  # noqa: E731
    x = torch.randn(2, 6)
    for dtype in ("fp32", "fp16"):
        results = Engine(captured(function, x), dtype, "cpu")(x)
        assert [r.dtype for r in results] == [r.dtype for r in function(x)]


def test_constants_are_results_too() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.anchors = nn.Buffer(torch.arange(4.0))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * 2, self.anchors

    x = torch.randn(2, 6)
    for device in ("cpu", "twin"):
        twice, anchors = Engine(capture(Constant(), (x,)), "fp32", device)(x)
        torch.testing.assert_close((twice, anchors), (x * 2, torch.arange(4.0)))


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x - 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Gate(), "Gate branches on the values of its tensors"),
        (Call(lambda x: x * 2 if torch.equal(x, -x) else x), "Call branches on the values of its tensors"),
        (Call(lambda x: torch.combinations(x[0])), "Call computes a size from a tensor's values"),
        (Call(lambda x: x[:, : int(x.argmax())]), "a plan"),
        (Call(lambda x: x[x > 0]), "values"),
        (Call(lambda x: (x, object())), "returns a object among arguments or results"),
        (Call(lambda x: x * float(x.sum())), "branches on the values of its tensors"),
        (Call(lambda x: missing(x)), "cannot be captured as a graph of tensor operations: NameError"),  # type: ignore[name-defined] # noqa: F821
    ],
)
def test_invalid_graphs_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(model, (torch.randn(2, 6),))


def test_inputs_that_are_not_tensors() -> None:
    with pytest.raises(UnsupportedError, match="needs example inputs"):
        capture(Call(lambda x: x), (3,))
    with pytest.raises(UnsupportedError, match="a SimpleNamespace among arguments.*, dicts and dataclasses"):
        capture(Call(lambda given: given.x), (SimpleNamespace(x=torch.zeros(2, 3)),))
    with pytest.raises(UnsupportedError, match="dense tensors of real numbers"):
        captured(lambda x: x, torch.randn(2, 3, dtype=torch.complex64))
    with pytest.raises(UnsupportedError, match="a nested tensor; pass dense tensors"):
        captured(lambda x: x, torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]))
    with pytest.raises(UnsupportedError, match="on the meta device, without contents"):
        escalade.compile(nn.Linear(3, 4), torch.empty(2, 3, device="meta"))
    with pytest.raises(UnsupportedError, match="the model's weight is on the meta device"):
        escalade.compile(nn.Linear(3, 4, device="meta"), torch.zeros(2, 3))
    with pytest.raises(UnsupportedError, match="takes a torch.nn.Module, not function"):
        capture(lambda x: x, (torch.randn(2, 3),))  # type: ignore[arg-type]


def test_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.ReLU())
    model.train()
    model[1].eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    graph = capture(model, (torch.randn(2, 3, 5, 5),))
    assert [node.op for node in graph] == ["conv2d", "batch_norm", "relu"]
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    with pytest.raises(CaptureError):
        capture(nn.Sequential(model, Gate()), (torch.randn(2, 3, 5, 5),))
    assert model.training and not model[1].training


def test_weights_are_copied_and_shared_ones_stay_shared() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    graph = capture(model, (torch.randn(2, 4),))
    engine = Engine(graph, "fp32", "cpu")
    x = torch.randn(2, 4)
    before = engine(x)
    with torch.no_grad():
        layer.weight.mul_(7)
    torch.testing.assert_close(engine(x), before, rtol=0, atol=0)
    torch.testing.assert_close(engine(torch.cat([x, x]))[:2], before)  # a plan made after the change
    assert len({tensor.data_ptr() for tensor in graph.constants.values()}) == 2


def test_numbers_out_of_tensors_are_refused() -> None:
    with pytest.raises(CaptureError, match="item.default reads a value of a tensor"):
        captured(lambda x: x * x.mean().item(), torch.randn(2, 3))


def test_a_call_that_changes_several_tensors() -> None:
    def tripled(x: torch.Tensor) -> torch.Tensor:
        both = [x.relu(), x + 1]
        torch._foreach_mul_(both, 3.0)
        return both[0] + both[1]

    check(tripled, 3)


class InModes(nn.Module):
    """Blocks with their own modes, also nested, with one and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            wide = y.float() * 2
            with torch.no_grad():
                total = wide.sum((2, 3))
            total = total / 3
        with torch.no_grad():
            shifted = total + 1
        return wide.relu(), shifted


def test_blocks_in_modes_of_their_own_are_read_as_the_rest() -> None:
    model, x = InModes().eval(), torch.randn(2, 3, 8, 8)
    graph = capture(model, (x,))
    assert graph.is_batched and "aten" not in [node.op for node in graph]
    for count in (2, 5):
        x = torch.randn(count, 3, 8, 8)
        for found, wanted in zip(Engine(graph, "fp32", "cpu")(x), model(x), strict=True):
            torch.testing.assert_close(found, wanted.detach())


def test_trials_on_other_batches_report_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch logs failures on fake tensors, as here where batch and row happen to have equal sizes."""
    monkeypatch.setattr(logging.getLogger(FakeTensor.__module__), "handlers", [caplog.handler])
    x, rows = torch.randn(5, 5, 5), torch.randn(5, 5)
    found = escalade.compile(Call(torch.lerp), (x, rows, rows))(x, rows, rows)
    torch.testing.assert_close(found, torch.lerp(x, rows, rows))
    assert FakeTensor.__module__ not in [record.name for record in caplog.records]
