"""Deterministic engines: an item's bits are the same in every batch, whatever the other items."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade import compile, load
from escalade.engine.capture.export import capture
from escalade.engine.fixed_batch import require_independent_items
from escalade.errors import UnsupportedError


class Mixed(nn.Module):
    """Layers that sum in several ways: over channels, windows, groups, pixels and features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm(F.max_pool2d(self.first(x), 2)))
        return self.fc(y.mean((2, 3)) * scale).softmax(1)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@torch.no_grad()
def test_items_have_the_same_bits_in_every_batch(dtype: str) -> None:
    model = Mixed().eval()
    x, scale = torch.randn(5, 3, 10, 10), torch.rand(16)
    engine = compile(model, (x[:2], scale), device="twin", dtype=dtype, deterministic=True)
    whole = engine(x, scale)
    torch.testing.assert_close(whole, model(x, scale), rtol=1e-2, atol=1e-3)
    for items in ([0], [3], [1, 4], [4, 2, 0], [0, 1, 2, 3]):
        assert torch.equal(engine(x[items], scale), whole[items])
    room = torch.empty(3, 10)
    assert torch.equal(engine(x[2:], scale, out=room), whole[2:]) and torch.equal(room, whole[2:])
    beside = x.clone()
    for number in (torch.nan, 1e30):
        beside[1::2] = number
        assert torch.equal(engine(beside, scale)[::2], whole[::2])
    assert len(engine._plans.cached) == 1


@torch.no_grad()
def test_a_file_is_loaded_for_the_same_bits(tmp_path: pathlib.Path) -> None:
    x, scale = torch.randn(5, 3, 10, 10), torch.rand(16)
    engine = compile(Mixed().eval(), (x[:2], scale), device="twin", dtype="fp16", deterministic=True)
    engine.save(tmp_path / "engine")
    loaded = load(tmp_path / "engine", device="twin", fixed_batch=2)
    for count in (1, 2, 5):
        assert torch.equal(loaded(x[:count], scale), engine(x, scale)[:count])
    for size in (0, -1, 1.5, True):
        with pytest.raises(UnsupportedError, match="fixed_batch"):
            load(tmp_path / "engine", device="twin", fixed_batch=size)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "a mean of items": (lambda x: x - x.mean(0, keepdim=True), "combines several items"),
    "a sum over items": (lambda x: x.cumsum(0), "depends on other items or on the position"),
    "a place": (lambda x: x + torch.arange(x.shape[0])[:, None], "computes with the batch size"),
    "a count": (lambda x: x / x.shape[0], "computes with the batch size"),
    "a product of items": (lambda x: (x @ x.T).sum(1), "combines several items"),
    "nothing by items": (lambda x: torch.ones(3), "not all of its results have a batch dimension"),
}


class Call(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self._function(x)


@pytest.mark.parametrize("name", REFUSED)
def test_items_that_are_not_by_themselves_are_refused(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=f"every item of a batch independently: .*{message}"):
        require_independent_items(capture(Call(function), (torch.randn(3, 4),)))


def test_deterministic_plans_refuse_pytorch_steps() -> None:
    x = torch.randn(2, 4, 6)
    with pytest.raises(UnsupportedError, match="use device 'cuda' or 'twin' and leave out measured=True"):
        compile(nn.ReLU(), x, device="cpu", deterministic=True)
    with pytest.raises(UnsupportedError, match=r"deterministic=True: .* \(aten::bmm.*\) has no kernel here"):
        compile(Call(lambda x: torch.bmm(x, x.mT)), x, device="twin", deterministic=True)
