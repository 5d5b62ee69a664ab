"""Convolutions between conversions: in NCHW where that is faster, with right results for inputs of any strides."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import escalade
from escalade.ops.base.card import H200, Card

CHAINS: dict[str, tuple[nn.Module, list[str]]] = {
    "one step": (nn.Conv2d(16, 40, 3, padding=1), ["planes"]),
    "padded channels and filters": (nn.Sequential(nn.Conv2d(5, 21, 3), nn.Hardswish()), ["planes"]),
    "a scale behind an activation": (
        nn.Sequential(nn.Conv2d(16, 32, 3), nn.ReLU6(), nn.BatchNorm2d(32)),
        ["planes"],
    ),
    "few channels and a function of a scale": (
        nn.Sequential(nn.Conv2d(3, 18, 3), nn.Tanh(), nn.BatchNorm2d(18), nn.ReLU(), nn.MaxPool2d(2)),
        ["planes", "row_packs"],
    ),
    "a scale behind a transposed one": (
        nn.Sequential(nn.ConvTranspose2d(12, 8, 4, 2, 1, 1), nn.Tanh(), nn.BatchNorm2d(8)),
        ["planes", "vectorised"],
    ),
    "a pool": (nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.AvgPool2d(3)), ["planes", "row_packs"]),
    "transposed": (nn.Sequential(nn.ConvTranspose2d(12, 8, 4, 2, 1, 1), nn.ReLU()), ["planes"]),
    "transposed with taps of one phase": (nn.ConvTranspose2d(5, 6, 3, 2, 1, 1), ["planes"]),
    "two convolutions": (
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1)),
        ["planes", "planes"],
    ),
}


def plan_rungs(model: nn.Module, x: torch.Tensor, card: Card = H200, dtype: str = "tf32") -> list[str]:
    plan = escalade.compile(model, x[:1], dtype=dtype, device="twin").plan_for(card, x)
    return [step.choice.rung.name for step in plan.steps if step.choice]


@pytest.mark.share(7)
@pytest.mark.parametrize("chain", ["one step", "a scale behind an activation", "a pool", "transposed"])
def test_short_chains_of_large_images_stay_in_nchw(chain: str) -> None:
    model, rungs = CHAINS[chain]
    x = torch.empty(32, _channels(model), 128, 128)
    assert plan_rungs(model.eval(), x) == rungs
    assert "planes" not in plan_rungs(model, x, dtype="fp16")
    assert "planes" not in plan_rungs(model, x, replace(H200, architecture="sm_80"))
    assert "planes" not in plan_rungs(model, x.to(memory_format=torch.channels_last)), "it is in NHWC already"
    assert "planes" not in plan_rungs(model, x[..., :127]), "its rows are not aligned"


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.AvgPool2d(2)])
def test_convolutions_in_nchw_compute_the_pool_behind_them(pool: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(8, 32, 3), nn.Tanh(), nn.BatchNorm2d(32), pool).eval()
    assert plan_rungs(model, torch.empty(32, 8, 128, 128)) == ["planes"]


@pytest.mark.share(7)
@pytest.mark.parametrize(("model", "rungs"), CHAINS.values(), ids=CHAINS)
def test_results_are_right_for_inputs_in_any_memory(
    model: nn.Module, rungs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimates favor NHWC at sizes that the twin computes quickly."""
    monkeypatch.setattr("escalade.engine.passes.estimates.Estimates.total_us", _fewest_nodes)
    for operation in ("conv2d", "conv2d_input_gradient"):
        monkeypatch.setattr(sys.modules[f"escalade.ops.{operation}.operation"], "WORTH_CONVERTING", ())
    torch.manual_seed(3)
    for norm in (one for one in model.modules() if isinstance(one, nn.BatchNorm2d)):
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    x = torch.randn(2, _channels(model), 12, 20)
    model = model.eval()
    engine = escalade.compile(model, x, dtype="tf32", device="twin")
    with torch.no_grad():
        expected = model.double()(x.double())
        model.float()
    apart = torch.zeros(x.numel() + 3)[3:].view(x.shape).copy_(x)
    given = (x, apart, x.to(memory_format=torch.channels_last), x.mT.contiguous().mT, x.half().float())
    for number, one in enumerate(given):
        found = engine(one).double()
        error = (found - expected).norm() / expected.norm()
        assert error < 1.5e-3, number
        if number < 2:
            assert [step.rung for step in engine.explain().steps] == rungs


def _channels(model: nn.Module) -> int:
    return next(one.in_channels for one in model.modules() if isinstance(one, nn.Conv2d | nn.ConvTranspose2d))


def _fewest_nodes(self: object, nodes: list[object], forms: object) -> float:
    return float(len(nodes))


def test_a_network_stays_in_nhwc() -> None:
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(3, 1, 1))]
    rungs = plan_rungs(nn.Sequential(*layers).eval(), torch.empty(32, 16, 128, 128))
    assert "planes" not in rungs and "tiled" in rungs
