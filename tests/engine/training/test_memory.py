"""Steps within a memory budget: recomputation gives the same results in less memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.passes import step_recompute
from escalade.engine.training.step import plan_training_step
from escalade.errors import UnsupportedError
from escalade.ops.base.card import H200


class _Blocks(nn.Module):
    """Inverted bottlenecks: a GELU's gradient reads its input, and a layer's its output, four times as wide as x."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(8, 32) for _ in range(3))
        self.narrow = nn.ModuleList(nn.Linear(32, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x))).permute(0, 2, 3, 1)
        for norm, wide, narrow in zip(self.norms, self.wide, self.narrow, strict=True):
            x = x + narrow(F.gelu(wide(norm(x))))
        return x.mean((1, 2))


def _batch(side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, side, side), torch.randint(0, 8, (2,))


def _step(model: nn.Module, side: int = 16, **given: Any) -> Any:
    optimizer, example = torch.optim.SGD(model.parameters(), 0.1), _batch(side)
    return escalade.training_step(model, F.cross_entropy, optimizer, example, dtype="bf16", **given)


@pytest.mark.parametrize(("device", "side", "shares"), [("cpu", 16, (0.9, 0.75)), ("twin", 6, (0.9,))])
def test_values_are_computed_again_within_a_budget(device: str, side: int, shares: tuple[float, ...]) -> None:
    torch.manual_seed(0)
    first = _Blocks()
    models = [first, *(copy.deepcopy(first) for _ in shares)]
    steps = [_step(first, side, device=device)]
    whole = steps[0].plan.arena_bytes
    for model, share in zip(models[1:], shares, strict=True):
        steps.append(_step(model, side, memory=int(share * whole), device=device))
        assert steps[-1].plan.arena_bytes <= share * whole
    arenas = [step.plan.arena_bytes for step in steps]
    assert arenas == sorted(set(arenas), reverse=True), "no more is computed again than the budget asks for"
    batch = _batch(side)
    losses = [step(*batch) for step in steps]
    for loss, model in zip(losses[1:], models[1:], strict=True):
        torch.testing.assert_close(
            (loss, model.state_dict()), (losses[0], first.state_dict()), rtol=0, atol=0
        )
    if device == "cpu":
        with pytest.raises(
            UnsupportedError, match=r"memory=4096: the values of this step take at least \d+ bytes"
        ):
            _step(copy.deepcopy(first), side, memory=4096)


class _Inverted(nn.Module):
    """Inverted bottlenecks with several functions, one with a gate per image and channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.wide = nn.ModuleList(nn.Conv2d(8, 32, 1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(3))
        self.gate, self.linear = nn.Conv2d(32, 32, 1), nn.Linear(8, 32)
        self.narrow = nn.ModuleList(nn.Conv2d(32, 8, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.stem(x)))
        for place, function in enumerate((F.relu6, F.silu, F.relu)):
            y = function(self.norms[place](self.wide[place](x)))
            if function is F.silu:
                y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
            x = x + self.narrow[place](y)
        y = F.gelu(self.linear(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return (x + self.narrow[3](y)).mean((2, 3))


def test_gradients_recompute_values_instead_of_keeping_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits in less memory: functions of normalizations, products with a gate, and GELU of a linear layer."""
    monkeypatch.setattr(step_recompute, "MOST_TIME", 1.0)
    monkeypatch.setattr(step_recompute, "ENOUGH", 0.0)
    torch.manual_seed(0)
    first = _Inverted().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    second = copy.deepcopy(first)
    steps = [
        _step(first, 6, device="twin", without=("recompute",)),
        _step(second, 6, device="twin"),
    ]
    assert steps[1].plan.arena_bytes < 0.9 * steps[0].plan.arena_bytes
    again = [step for step in steps[1].plan.steps if step.side_output and step.node.name.endswith("_again")]
    assert {step.side_output.buffer for step in again} == {"recomputed", "y1"} and len(again) >= 3
    graph = steps[1].plan.graph
    assert all(graph.readers(node.name) or node.name in graph.outputs for node in graph), "views keep bytes"
    for step in steps[1].plan.steps:
        if step.side_output:
            assert graph.nodes[step.side_output.node].inputs.items() <= step.node.inputs.items(), (
                "and so do these"
            )
    for _ in range(2):
        batch = _batch(6)
        losses = [step(*batch) for step in steps]
        torch.testing.assert_close(
            (losses[1], second.state_dict()), (losses[0], first.state_dict()), rtol=0, atol=0
        )


def test_memory_is_saved_up_to_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def arena(time: float, enough: float) -> int:
        monkeypatch.setattr(step_recompute, "MOST_TIME", time)
        monkeypatch.setattr(step_recompute, "ENOUGH", enough)
        model = _Inverted().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        plan = plan_training_step(model, F.cross_entropy, optimizer, _batch(32), "fp16", H200)
        return plan.arena_bytes

    everything, some, nothing = arena(1.0, 0.0), arena(1.0, 0.85), arena(0.0, 0.0)
    assert everything < some < nothing == arena(1.0, 1.0)


def test_budgets_that_no_step_takes() -> None:
    for memory in (0, -1, 1.5, "1 GB"):
        with pytest.raises(UnsupportedError, match=r"memory .*: pass a number of bytes"):
            _step(_Blocks(), memory=memory)


def test_an_explanation_has_the_planned_peak() -> None:
    model = nn.Linear(256, 1024)
    optimizer = torch.optim.Adam(model.parameters())
    example = torch.randn(1024, 256), torch.randn(1024, 1024)
    step = escalade.training_step(model, F.mse_loss, optimizer, example, dtype="bf16")
    (note,) = (one for one in step.explain().notes if one.startswith("Planned peak"))
    for part in (
        "parameters and buffers 1.0 MiB",
        "inputs and copies in 16 bits 5.0 MiB",
        "optimizer state 2.0 MiB",
    ):
        assert part in note, note
