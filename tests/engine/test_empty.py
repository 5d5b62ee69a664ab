"""Values without elements: in layers, results and inputs, and empty batches."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

from escalade.engine import compile, load
from escalade.errors import UnsupportedError


class Emptied(nn.Module):
    """Layers and results without elements, and a second input that may have none."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Conv2d(3, 4, 3), nn.utils.skip_init(nn.Linear, 4, classes)
        self.behind = nn.utils.skip_init(nn.Linear, classes, 2)
        for parameter in (*self.head.parameters(), *self.behind.parameters()):
            nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, more: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layer(x).relu().mean((2, 3))
        found = self.head(y).relu()
        return self.behind(found), found, torch.cat([y, y + 1], 1)[:, :0], y.sum(0) + more.sum(0)


@torch.no_grad()
@pytest.mark.parametrize("device", ("cpu", "twin"))
def test_empty_values_match_pytorch(device: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(4)
    model, x = Emptied(0), torch.randn(2, 3, 5, 5)
    engine = compile(model, (x, x.new_zeros(0, 4)), device=device)
    engine.save(tmp_path / "empty.escalade")
    for one in (engine, load(tmp_path / "empty.escalade", device=device)):
        for batch in (2, 3):
            given = (torch.randn(batch, 3, 5, 5), x.new_zeros(0, 4))
            torch.testing.assert_close(one(*given), model(*given), rtol=1e-4, atol=1e-5)
    more = torch.ones(2, 4)  # it is no longer absent
    torch.testing.assert_close(engine(x, more), model(x, more), rtol=1e-4, atol=1e-5)
    head = compile(nn.Sequential(model.layer, nn.Flatten(), nn.Linear(36, 0)), x, device=device)
    assert head(x).shape == (2, 0) and not head.explain().steps


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)


@torch.no_grad()
@pytest.mark.parametrize("deterministic", (False, True))
def test_a_batch_of_no_items_has_no_results(deterministic: bool, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(4)
    model, x = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU()), torch.randn(2, 3, 2, 2)
    engine = compile(model, x, device="twin", deterministic=deterministic)
    out = torch.empty(0, 5)
    assert torch.equal(engine(x[:0]), out) and engine(x[:0], out=out) is out
    assert [len(result) for result in engine.stream([x, x[:0], x])] == [2, 0, 2]
    torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)
    if not deterministic:
        compile(Summed(), x).save(tmp_path / "summed.escalade")
        with pytest.raises(UnsupportedError, match="batch size 0: not every result"):
            load(tmp_path / "summed.escalade", device="cpu")(x[:0])
