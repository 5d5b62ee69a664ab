"""Plans whose copies would take longer than running their steps one by one."""

from __future__ import annotations

import pytest
import torch

from escalade.engine.compiler import compile
from escalade.engine.plan import stepwise
from escalade.engine.plan.stepwise import StepwiseProgram, is_faster_stepwise
from escalade.ops.base.card import H200


class Mixed(torch.nn.Module):
    """Kernels before and after PyTorch's steps, views of inputs, and one result with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv3d(2, 8, 3, padding=1)
        self.layer = torch.nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(self.conv(torch.tanh(x)))
        rows = self.layer(y.cumsum(2)) * 2
        return rows, rows, x.transpose(1, 2), y.argmax(1), self.layer.weight * 1


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_steps_one_by_one_match_the_model(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(stepwise, "_HOST_US_PER_STEP", 0.0)
    model, x = Mixed().eval(), torch.randn(2, 2, 3, 4, 6)
    engine = compile(model, x, dtype=dtype, device="twin")
    assert isinstance(engine.program(x), StepwiseProgram)
    for given in (x, x[:1], x.flip(0).transpose(3, 4).contiguous().transpose(3, 4)):
        found, expected = engine(given), model(given)
        torch.testing.assert_close(found[:3], expected[:3], rtol=1e-2, atol=1e-2)
        assert len({result.data_ptr() for result in (given, *found)}) == 6  # owned by the caller alone


def test_copies_that_cost_little_are_made_for_a_graph() -> None:
    small, large = torch.zeros(4, 4), torch.zeros(1).expand(4096, 4096)
    for x, expected in ((small, False), (large, True)):
        engine = compile(_Product(), (x, x), device="cpu")
        assert is_faster_stepwise(engine.plan(x, x), H200) is expected


class _Product(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b
