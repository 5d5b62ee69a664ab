"""Engines for any size: results match the model, and an engine for that size alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade import compile
from escalade.engine.capture.export import AnySize, capture
from escalade.engine.engine import Engine
from escalade.engine.plan_cache import PlanCache
from escalade.errors import UnsupportedError


class Layers(nn.Module):
    """Two convolutions and a function of them."""

    def __init__(self, function: Callable[..., Any], features: int = 8) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.fc = nn.Linear(features, 5)
        self._function = function
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return self._function(self, x)


def _plain(layers: Any, x: torch.Tensor) -> Any:
    y = layers.second(F.relu(layers.norm(layers.first(x))))
    return layers.fc(y.relu().mean((2, 3)))


def _adaptive(layers: Any, x: torch.Tensor) -> Any:
    return layers.fc(F.adaptive_avg_pool2d(layers.first(x), (2, 2)).flatten(1))


def _flat(layers: Any, x: torch.Tensor) -> Any:
    return layers.fc(layers.second(layers.first(x)).flatten(1))


def _unet(layers: Any, x: torch.Tensor) -> Any:
    wide = layers.first(x)
    deep = F.interpolate(layers.second(wide), size=wide.shape[-2:], mode="bilinear")
    return torch.cat([wide, deep], 1)


def _branching(layers: Any, x: torch.Tensor) -> Any:
    y = layers.first(x)
    if x.shape[-1] > 10:
        y = layers.second(y)
    return {"wide": y, "large": True} if x.shape[-2] % 2 else y


MODELS: dict[str, tuple[Any, int, list[tuple[int, ...]], int]] = {
    "plain": (_plain, 8, [(2, 3, 8, 8), (2, 3, 9, 13), (1, 3, 5, 8)], 1),
    "adaptive": (_adaptive, 32, [(2, 3, 8, 8), (2, 3, 7, 5), (3, 3, 1, 6)], 2),
    "flat": (_flat, 64, [(2, 3, 4, 8), (1, 3, 8, 4), (2, 3, 3, 7)], 1),
    "unet": (_unet, 8, [(2, 3, 8, 8), (2, 3, 9, 7), (1, 3, 11, 5)], 1),
    "branching": (_branching, 8, [(2, 3, 8, 8), (2, 3, 9, 12), (1, 3, 7, 11), (2, 3, 8, 14)], 2),
}
"""The function, the features of the linear layer, sizes, and how often the model is exported with symbols if
it cannot be traced."""


@pytest.mark.parametrize("followed", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_any_size_that_the_model_takes(name: str, followed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function, features, sizes, captures = MODELS[name]
    model = Layers(function, features)
    made: list[AnySize] = []

    class Noted(AnySize):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("escalade.engine.compiler.AnySize", Noted)
    if not followed:
        monkeypatch.setattr("escalade.engine.capture.trace._MAX_CALLS", 0)
    engine = compile(model, torch.randn(sizes[0]))
    with torch.no_grad():
        for size in sizes:
            x = torch.randn(size)
            torch.testing.assert_close(engine(x), model(x))
    assert [len(each._programs) for each in made] == [0 if followed else captures]


@torch.no_grad()
def test_it_matches_an_engine_for_that_size() -> None:
    """Bit for bit, by kernels; and uint8 and channels_last images of other sizes too."""
    model = Layers(_plain)
    how: dict[str, Any] = {"device": "twin", "normalize": ([0.5] * 3, [0.2] * 3)}
    x = torch.randint(0, 256, (2, 3, 6, 9), dtype=torch.uint8)
    engine = compile(model, torch.rand(2, 3, 8, 8), **how)
    expected = compile(model, x, **how)(x)
    assert torch.equal(engine(x), expected)
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(engine(last), expected)
    pixels = AnySize(Layers(lambda _, x: x.permute(0, 2, 3, 1).view(len(x), -1)), (last.float(),))
    (given,) = pixels.graph_for([(2, 3, 8, 8)]).inputs  # planes have no such view
    assert given.shape[1:] == (3, 8, 8)


@torch.no_grad()
def test_later_sizes_have_the_weights_of_then() -> None:
    """The caller's model may be trained on, changed or freed."""
    model = Layers(_plain)
    x = torch.randn(2, 3, 6, 9)
    engine, before = compile(model, torch.randn(2, 3, 8, 8)), model(x)
    model.fc.weight.zero_()
    model._function = _unet
    torch.testing.assert_close(engine(x), before)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    torch.testing.assert_close(engine(x[:, :, 1:]), Layers(_plain)(x[:, :, 1:]))


@torch.no_grad()
def test_weights_are_there_once_and_go_with_the_last_plan() -> None:
    model = Layers(lambda layers, x: layers.first(x) + torch.arange(x.shape[-1]) ** 0.5)
    engine = compile(model, torch.randn(2, 3, 8, 8), plans=2)
    made = engine._plans.constants[torch.device("cpu")]._made
    for size in (6, 7, 8):
        x = torch.randn(2, 3, 8, size)
        torch.testing.assert_close(engine(x), model(x))
        gc.collect()
        assert len(engine._plans.networks.known) <= 3 and len(engine._plans.cached) <= 2
        assert len(made) == 1 + len(engine._plans.networks.known)  # the filters, and their biases


def test_sizes_that_the_model_does_not_take_are_sentences() -> None:
    model = Layers(_flat, 64)
    x = torch.randn(2, 3, 4, 8)
    engine = compile(model, x)
    for shape, sentence in {
        (
            2,
            3,
            8,
            8,
        ): r"compiled with x \[batch, 3, 4, 8\] and cannot be .* x \[2, 3, 8, 8\]: .* RuntimeError: .*128",
        (2, 4, 4, 8): r"x \[2, 4, 4, 8\]: .* RuntimeError",
        (3, 4, 8): r"x has shape \(3, 4, 8\), without the batch dimension of \[batch, 3, 4, 8\]; add it",
    }.items():
        with pytest.raises(UnsupportedError, match=sentence):
            engine(torch.randn(shape))
    torch.testing.assert_close(engine(x), model(x).detach())


@torch.no_grad()
def test_ranges_of_fp8_hold_for_other_sizes() -> None:
    x = torch.rand(2, 3, 8, 8)
    y = torch.rand(2, 3, 6, 12)
    same, other = Layers(_plain), Layers(_branching)
    engine = compile(same, x, dtype="fp8", calibration=[x])
    torch.testing.assert_close(engine(y), same(y), rtol=0.1, atol=0.05)
    engine = compile(other, x, dtype="fp8", calibration=[x])
    with pytest.raises(UnsupportedError, match="the ranges were measured with inputs of other sizes"):
        engine(y)


@torch.no_grad()
def test_plans_are_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(_plain)
    images = iter([(8, 8), (6, 9)])  # iterators, which can be read only once
    engine = compile(model, torch.randn(2, 3, 8, 8), sizes=images, batches=iter([1, 3]), plans=4)
    assert len(engine._plans.cached) == 4 and len(engine._plans.networks.known) == 2
    monkeypatch.setattr(PlanCache, "_make_calls", None)  # must not be called again
    for size in ((1, 3, 8, 8), (3, 3, 8, 8), (1, 3, 6, 9), (3, 3, 6, 9)):
        x = torch.randn(size)
        torch.testing.assert_close(engine(x), model(x))


def test_plans_that_cannot_be_are_sentences() -> None:
    x = torch.randn(2, 3, 8, 8)
    graph = capture(Layers(_plain), (x,))
    plan = Engine(graph, "fp32", "cpu").plan(x)
    enough = plan.arena_bytes + plan.persistent_bytes
    asked: dict[str, Any]
    for asked, message in (
        ({"plans": 1}, "2 plans requested, but the engine keeps 1; pass plans=2"),
        ({"memory": "much"}, "memory='much': 'much' is not a size; write 500MB"),
        ({"memory": 0}, "memory=0: pass a number of bytes, or a string such as '2GiB'"),
        ({"memory": enough}, "these 2 plans need 0.0 MiB .* allows 0.0; plan fewer"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            Engine(graph, "fp32", "cpu", **asked).prepare([(x,), (x[:1],)])
    with pytest.raises(UnsupportedError, match="this plan needs 0.0 MiB .* allows 0.0; use a smaller"):
        Engine(graph, "fp32", "cpu", memory=9)(x)
    with pytest.raises(UnsupportedError, match="this plan needs"):
        Engine(graph, "fp32", "cpu", memory=enough, buffers=2)(x)
    with pytest.raises(
        UnsupportedError, match=r"sizes has 8; each must be a pair of rows and columns, as \(224, 224\)"
    ):
        compile(nn.ReLU(), x, sizes=[8])  # type: ignore[list-item]
    with pytest.raises(UnsupportedError, match="batches has 0; each must be a whole number of at least 1"):
        compile(nn.ReLU(), x, batches=[0])
    with pytest.raises(UnsupportedError, match="the example has 0 sizes"):
        compile(nn.ReLU(), x[0], sizes=[(8, 8)])


@torch.no_grad()
def test_plans_go_when_their_memory_is_wanted() -> None:
    model = Layers(_plain)
    x = torch.randn(4, 3, 8, 8)
    graph = capture(model, (x,))
    free = Engine(graph, "fp32", "cpu")
    plans = [free.plan(x[:batch]) for batch in (1, 4)]
    engine = Engine(
        graph, "fp32", "cpu", memory=sum(plan.arena_bytes + plan.persistent_bytes for plan in plans)
    )
    for batch in (1, 2, 1, 4):
        torch.testing.assert_close(engine(x[:batch]), model(x[:batch]))
    assert [key[0][0][0] for key in engine._plans.cached] == [1, 4]  # two was least recently used
