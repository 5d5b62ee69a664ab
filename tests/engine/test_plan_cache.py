"""Calls find their plan, the right plans are kept, and calls do not wait for each other."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from escalade.engine import Engine
from escalade.engine.plan_cache import MAX_SIGNATURES, PlanCache
from escalade.errors import UnsupportedError
from escalade.ops.base.card import H200
from tests.engine.small import ONE, TWO, made


def test_calls_do_not_wait_for_a_plan_in_the_making(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine = made(lambda p, x, z: p.first(x) + z, torch.randn(2, 12), torch.randn(2, 8), device="cpu")
    x, z = torch.randn(2, 12), torch.randn(2, 8)
    began, ends = threading.Event(), threading.Event()
    make = PlanCache._make_calls

    def slow(self: PlanCache, *arguments: Any) -> Any:
        began.set()
        assert ends.wait(60)
        return make(self, *arguments)

    monkeypatch.setattr(PlanCache, "_make_calls", slow)
    other = engine.submit(torch.randn(3, 12), torch.randn(3, 8))
    assert began.wait(60)
    torch.testing.assert_close(engine(x, z), model(x, z).detach())
    assert not other.done()
    ends.set()
    assert other.result().shape == (3, 8)


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_plans_serve_calls_in_every_mode(device: str) -> None:
    """In whichever mode they were created."""
    x = torch.randn(2, 12)
    for make in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with make():
            model, engine = made(TWO, device=device)
            engine(torch.randn(2, 12))
        for call in (torch.inference_mode, torch.no_grad, torch.enable_grad):
            with call():
                found = engine(x.clone().requires_grad_(call is torch.enable_grad))
            assert not found.requires_grad and found.is_inference() == (call is torch.inference_mode)
            torch.testing.assert_close(found, model(x).detach())


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_the_least_recently_called_plan_is_evicted_first(device: str) -> None:
    _, engine = made(ONE, device=device, plans=2)
    one, two, three = (torch.randn(size, 12) for size in (1, 2, 3))
    engine(one)
    engine(two)
    kept = engine.plan(one)
    engine(two)
    engine(one)  # first used, and also used last
    engine(three)  # replaces two
    assert engine.plan(one) is kept and engine.explain().batch == 1
    assert len(engine._plans.cached) == 2 and all(
        seen.cached in engine._plans.cached.values() for seen in engine._plans.by_signature.values()
    )
    assert engine._plans.last is None, "who goes is not found as the last either"
    engine(one)
    assert engine._plans.last is not None and engine._plans.last.cached.calls.plan is kept


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_inputs_like_the_last_calls_match_in_every_property(device: str) -> None:
    """In size, strides, dtype and device, and in PyTorch's dispatch."""
    model, engine = made(ONE, device=device)
    given = torch.randn(2, 12)
    others = (
        torch.randn(3, 12), torch.randn(12, 2).T, given.half(), torch._neg_view(given), nn.Parameter(given),
        given.clone().requires_grad_(),
    )  # fmt: skip
    for other in others:
        for x in (given, given, other, given):
            torch.testing.assert_close(engine(x), model(x.float()).detach())
    with pytest.raises(UnsupportedError, match="torch.func transforms"):
        torch.func.vmap(engine)(given[None])
    with pytest.raises(UnsupportedError):
        engine([given])


def test_calls_recognize_known_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = made(ONE)
    x = torch.randn(2, 12)
    engine(x)
    monkeypatch.setattr(Engine, "flatten", None)  # must not be called again
    engine(x)
    engine(torch.randn(2, 12))


def test_strides_without_end() -> None:
    model, engine = made(ONE)
    for extra in range(MAX_SIGNATURES + 10):
        x = torch.randn(2, 13 + extra)[:, :12]
        torch.testing.assert_close(engine(x), model(x).detach())
    assert len(engine._plans.by_signature) <= MAX_SIGNATURES and len(engine._plans.cached) == 1


def test_a_plan_for_another_card_leaves_the_engines_plans_alone() -> None:
    model, engine = made(ONE)
    x = torch.randn(5, 12)
    kept = dict(engine._plans.cached)
    with torch.inference_mode():
        plan = engine.plan_for(H200, x)
    assert plan.batch == 5 and engine._plans.cached == kept
    torch.testing.assert_close(engine(x), model(x).detach())
