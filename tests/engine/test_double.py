"""float64 and other explicit dtypes in a model: results have PyTorch's values and dtypes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import escalade

DOUBLE = torch.float64


class Model(nn.Module):
    def __init__(self, function: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.linear = nn.Linear(8, 8)
        self.row: torch.Tensor
        self.number: torch.Tensor
        self.register_buffer("row", torch.randn(8, dtype=DOUBLE))
        self.register_buffer("number", torch.tensor(1e8, dtype=DOUBLE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


CASES: tuple[Callable[[Model, torch.Tensor], torch.Tensor], ...] = (
    lambda m, x: (x.double() + 1e8) - 1e8,
    lambda m, x: ((x.to(DOUBLE) + m.number) - m.number).float(),
    lambda m, x: x.type_as(m.row) / 3,
    lambda m, x: x + m.row,
    lambda m, x: (x * m.number).relu() / m.number,  # a Python number does not affect the dtype
    lambda m, x: (x.double() + 1e6).var(-1),
    lambda m, x: torch.relu(x.double() / 3).reshape(-1, 4).t(),
    lambda m, x: x.sum(-1, dtype=DOUBLE),
    lambda m, x: x.mean(-1, dtype=DOUBLE),
    lambda m, x: torch.softmax(x, -1, dtype=DOUBLE),
    lambda m, x: x.cumsum(-1, dtype=DOUBLE),
    lambda m, x: F.linear(x.double(), m.linear.weight.double(), m.row),
    lambda m, x: F.layer_norm(x.double() + 1e6, (8,)),
    lambda m, x: F.conv1d(x.double()[:, None], m.row[None, None, :3]),
    lambda m, x: F.interpolate(x.double().view(2, 2, 2, 8) / 3, scale_factor=2) + 1e8,
    lambda m, x: torch.cat([x, x.double() / 3], -1),
    lambda m, x: x * torch.arange(8, dtype=DOUBLE) / 7,
    lambda m, x: x * 0 + torch.full((8,), 1 / 3, dtype=DOUBLE).sum(),
    lambda m, x: torch.complex(x.double(), x.double() / 3).abs(),
    lambda m, x: (x.double() / 3).float().double(),
    lambda m, x: x.half().float(),
    lambda m, x: (x * 1e5).half().float(),
    lambda m, x: x.bfloat16() * 3,
    lambda m, x: ((x * 100).long() * 10**12 + 7) // 3,
    lambda m, x: ((x * 100).long() + 2**40).sum(-1),
    lambda m, x: ((x * 100).long() + 2**24 + 1) % 1000,
    lambda m, x: (x * 1000).int() * 2**30,
    lambda m, x: (x.abs() * 100).to(torch.uint8) + 200,
    lambda m, x: (x > 0) & (x < 1),
    lambda m, x: torch.remainder((x * 100).int(), -7),
)


def _close(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert found.dtype == expected.dtype, what
    exact = {DOUBLE: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}.get(expected.dtype, 0.0)
    size = float(expected.double().nan_to_num(0, 0, 0).abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=exact * size, msg=str(what))


def test_types_that_a_model_asks_for_are_those_of_its_results(tmp_path: Path) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    for number, function in enumerate(CASES):
        model = Model(function).eval()
        with torch.no_grad():
            expected = model(x)
        engine = escalade.compile(model, x, dtype="fp32", device="twin" if number % 4 == 0 else "cpu")
        _close(engine(x), expected, number)
        if number % 5 == 0:
            engine.save(tmp_path / "engine.escalade")
            _close(escalade.load(tmp_path / "engine.escalade", device="cpu")(x), expected, number)


def test_torch_compile_keeps_float64() -> None:
    model, x = Model(CASES[0]).eval(), torch.randn(8, 8)
    with torch.no_grad():
        _close(torch.compile(model, backend="escalade")(x), model(x), "torch.compile")


def test_a_training_step_keeps_float64() -> None:
    def loss(y: torch.Tensor) -> torch.Tensor:
        return ((y.double() + 1e6) - 1e6).square().mean()

    for device in ("cpu", "twin"):
        model = nn.Conv2d(4, 4, 1)
        other, x = copy.deepcopy(model), torch.randn(2, 4, 6, 6)
        expected = loss(other(x))
        expected.backward()
        before = model.weight.detach().clone()
        options: dict[str, Any] = {} if device == "cpu" else {"device": device}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        found = escalade.training_step(model, loss, optimizer, (x,), dtype="fp32", **options)(x)
        assert found.dtype == DOUBLE and abs(float(found - expected)) < 1e-6 * float(expected)
        assert other.weight.grad is not None
        torch.testing.assert_close(before - model.weight.detach(), other.weight.grad, rtol=1e-4, atol=1e-6)
