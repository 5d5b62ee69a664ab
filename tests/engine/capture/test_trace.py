"""Models traced without `torch.export`: graphs are the same as export's, and other models are left to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine import compile
from escalade.engine.capture import meta_rules, trace
from escalade.engine.capture.example_inputs import ExampleInputs
from escalade.engine.capture.export import capture
from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.check import check_graph
from escalade.engine.graph.graph import Batch, Graph
from tests.engine.capture.test_export import Call


class Network(nn.Module):
    """Typical code of networks in evaluation mode: in place and by sizes, with shared weights and several results."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.pool, self.inner = nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.head = nn.Sequential(nn.Dropout(), nn.Linear(16, 5))
        self.shift = nn.Buffer(torch.ones(8, 1, 1))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        y = self.pool(self.stem(x))
        y = y + self.inner(y) * self.gate(y)
        y += self.inner(y)
        y = torch.cat([F.silu(y) + self.shift, y.relu_()], 1)
        first, _ = y.mean((2, 3)).chunk(2, 1)
        flat = F.avg_pool2d(y, 2).view(y.size(0), 16, -1).sum(2) / y.size(0)
        return {"head": self.head(flat), "parts": [first.view(-1, first.shape[1]) * scale, y[:, 1:3]]}


def _said(graph: Graph) -> Any:
    """A whole graph, independent of value names."""
    known: dict[str, Any] = dict(graph.weight_names) | {
        node.name: dimension for dimension, node in enumerate(graph)
    }
    nodes = [
        (node.op, {role: known.get(name, name) for role, name in node.inputs.items()}, node.attributes,
         node.shape, node.dtype, node.source)
        for node in graph
    ]  # fmt: skip
    outputs = [known[name] for name in graph.outputs]
    return nodes, outputs, graph.inputs, graph.output_types, graph.structure, graph.arguments, graph.batches


def test_weights_have_the_names_a_file_allows() -> None:
    """PyTorch's names of these begin with a digit."""
    check_graph(capture(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), {}))


def test_traced_graphs_match_exported_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    given: Any = (Network(), (torch.randn(2, 3, 16, 16),), {"scale": torch.randn(2, 1)})
    followed = capture(*given)
    monkeypatch.setattr(trace, "_MAX_CALLS", 0)
    exported = capture(*given)
    assert _said(followed) == _said(exported)


def _follows(model: nn.Module, *inputs: torch.Tensor) -> bool:
    return trace.trace_graph(OriginalModel(model), ExampleInputs.of(inputs, None)) is not None


_OUTSIDE = torch.ones(3)


def _in_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.mT


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.shape[0] > 4 else x,
        lambda x: x * 2 if len(x) % 3 else x,
        lambda x: x * 2 if x.numel() == 12 else x,
        lambda x: x / float(x.shape[0]),
        lambda x: x * {2: 1}.get(x.shape[0], 3),
        lambda x: (x, x.shape[0]),
        lambda x: x[:2],
        lambda x: torch.cat([x, x[:, :1].new_zeros(1, 3, 4)]),
        lambda x: x.split(100000)[0],
        lambda x: x.chunk(2)[0],
        lambda x: x[1:],
        lambda x: x.view(-1, 4)[: x.shape[0] // 2],
        lambda x: x.view(int(x.shape[0] / 0.7), -1),
        lambda x: x * 2 if x.shape[0] / 1 > 4 else x,
        lambda x: x.squeeze(),
        lambda x: x * 2 if x.sum() > 0 else x,
        lambda x: x + torch.rand(4),
        lambda x: x * _OUTSIDE.sum(),
        lambda x: sum(x * n for n in range(x.shape[0])),
        _in_autocast,
    ],
)
def test_possible_dependence_on_the_batch_is_left_to_export(function: Callable[..., Any]) -> None:
    assert not _follows(Call(function), torch.randn(2, 3, 4))


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 if x.numel() > 12 else x,
        lambda x: x * (3 if x.shape[0] - 1 else 4),
        lambda x: x * math.gcd(x.shape[0], 6),
        lambda x: x * (numpy.int64(x.shape[0]) % 2).item(),
        lambda x: x * {"1": 1.0, "2": 2.0}.get(f"{x.shape[0]}", 7.0),
        lambda x: x * len(str(tuple(x.shape)) + "s" * x.shape[0]),
    ],
    ids=("numel", "truth", "gcd", "numpy", "text", "length"),
)
@pytest.mark.parametrize("example", (1, 2))
def test_batch_dependent_values_are_right_for_every_batch(
    function: Callable[[torch.Tensor], torch.Tensor], example: int
) -> None:
    """Also where Python does not read the number, and where `torch.export` assumes batches of at least two."""
    engine = compile(Call(function), torch.randn(example, 3, 4))
    for batch in (1, 2, 3, 6):
        x = torch.randn(batch, 3, 4)
        torch.testing.assert_close(engine(x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(x.shape[0] // 3, 3, 4).mean(1),
        lambda x: x.view(int(x.shape[0] / (12 / 4)), -1) if x.shape[0] % 3 == 0 else x,
        lambda x: x.repeat(x.shape[0] // x[::1].shape[0], 2),
        lambda x: torch.sub(*torch.cat([x, x * 2]).chunk(2)),
        lambda x: torch.cat([x, x])[: x.shape[0]] + torch.cat([x, x * 3])[x.shape[0] :],
        lambda x: torch.cat([x, x * 2]).split(x.shape[0])[1],
        lambda x: torch.cat([x, x * 2]).split([x.shape[0], sum([x.shape[0]])])[1],
        lambda x: x.new_zeros(x.shape[0] + x.shape[0] - x.shape[0], 4) + x,
        lambda x: x.view(-1, 3, 4).transpose(0, 1).contiguous().view(3, -1, 4).transpose(0, 1),
    ],
)
def test_models_alike_for_every_batch_are_traced(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        return function(x.flatten(0, 1))

    assert _follows(Call(run), torch.randn(2, 3, 4))
    engine = compile(Call(run), torch.randn(2, 3, 4))
    for batch in (1, 2, 5):
        x = torch.randn(batch, 3, 4)
        torch.testing.assert_close(engine(x), run(x))


class Timed(nn.Module):
    """Takes a timestep per image, or one for all."""

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return x * time.float()[:, None, None].sin()


def test_tensors_of_one_dimension_have_an_item_for_each_of_the_batch_or_not() -> None:
    for items in (1, 2):
        engine = compile(Timed(), (torch.randn(items, 3, 4), torch.arange(items)), batches=[items, 3])
        assert [given.shape[0] for given in engine.graph.inputs] == [Batch(), Batch()]
        for batch, times in ((items, items), (5, 5), (4, 1), (1, 1)):
            x, time = torch.randn(batch, 3, 4), torch.arange(times) + 1
            torch.testing.assert_close(engine(x, time), Timed()(x, time))
    vector = compile(Call(lambda x, scale: x @ scale.diag()), (torch.randn(2, 2), torch.randn(2)))
    x, scale = torch.randn(5, 2), torch.randn(2)
    torch.testing.assert_close(vector(x, scale), x * scale)


@pytest.mark.parametrize(
    ("model", "follows"),
    [
        (nn.LSTM(4, 3, batch_first=True), True),
        (nn.InstanceNorm1d(3), True),
        (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), True),
        (Call(lambda x: F.scaled_dot_product_attention(x, x, x)), True),
        (nn.Sequential(nn.Softmax(1), nn.Flatten(), nn.Dropout(0.5, inplace=True), nn.Linear(12, 5)), True),
        (Call(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)), False),
        (Call(lambda x: F.batch_norm(x, torch.ones(3), torch.ones(3), training=True)), False),
    ],
    ids=("lstm", "instance_norm", "transformer", "attention", "dropout of a view", "dropout", "batch_norm"),
)
def test_deterministic_models_without_training_behavior_are_traced(model: nn.Module, follows: bool) -> None:
    x = torch.randn(2, 3, 4)
    assert _follows(model, x) is follows
    if follows:
        engine = compile(model, x)
        torch.testing.assert_close(engine(x[:1]), model.eval()(x[:1]))


def test_models_that_change_themselves_are_left_to_export() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count: torch.Tensor = self.count + 1
            return x + self.count

    assert not _follows(Counts(), torch.randn(2, 3))
    assert _follows(Call(lambda x: x.reshape(x.shape[0] * 3, -1).view(x.size(0), -1)), torch.randn(2, 3, 4))


def _meta(*shape: int, last: bool = False) -> torch.Tensor:
    x = torch.empty(shape, device="meta")
    return x.contiguous(memory_format=torch.channels_last) if last else x


@pytest.mark.parametrize("last", [False, True])
def test_results_are_those_of_pytorch(last: bool) -> None:
    """Sizes, strides and dtypes of every rule, except those of operators that PyTorch has no rule for."""
    aten = torch.ops.aten
    without_meta = {
        aten.fake_quantize_per_tensor_affine.default, aten.fake_quantize_per_tensor_affine.tensor_qparams,
        aten.fake_quantize_per_channel_affine.default,
    }  # fmt: skip
    x, c, w = _meta(2, 6, 9, 8, last=last), _meta(6), _meta(4, 3, 3, 2)
    rules = meta_rules._RULES.items()
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (aten.conv2d.default, (_meta(2, 6, 9, 8), w, _meta(4), [2, 1], [1, 0], [1, 2], 2)),
        *((aten.conv2d.default, (x, _meta(4, 6, 3, 2, last=last))) for _ in range(meta_rules._CONV_META_IS_CONTIGUOUS)),
        (aten.batch_norm.default, (x, c, c, c, c, False, 0.1, 1e-5, True)),
        (aten.linear.default, (_meta(2, 3, 5), _meta(4, 5), _meta(4))),
        (aten.max_pool2d.default, (x, [3, 2], [2], [1, 1], [2, 1])),
        (aten.avg_pool2d.default, (x, [3], [], [1])),
        (aten.adaptive_avg_pool2d.default, (x, [3, 2])),
        (aten.mean.dim, (x, [-1, 2], True)),
        (aten.cat.default, ([x, x[:, :2].clone()], -3)),
        *((rule, (x, *others)) for rule, made in rules if made in (meta_rules._binary, meta_rules._binary_in_place)
          for others in ((x,), (_meta(2, 6, 1, 1),), (2.5,))),
        *((rule, (x,)) for rule, made in rules if made in (meta_rules._elementwise, meta_rules._in_place)
          and rule not in without_meta),
    ]  # fmt: skip
    assert {function for function, _ in calls} | without_meta == meta_rules._RULES.keys()
    for function, arguments in calls:
        found, wanted = meta_rules._RULES[function](*arguments), function(*arguments)
        assert found is not None, function
        assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype), (
            function
        )
