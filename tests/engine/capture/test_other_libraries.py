"""Operators of other libraries in a model: run by PyTorch, unless they do more than compute new tensors."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.library import custom_op

import escalade
from escalade.engine.capture.reader import CaptureError
from escalade.engine.file import FileError
from tests.engine.capture.test_export import captured


@custom_op("escalade_test::relu", mutates_args=())
def other_relu(x: torch.Tensor, slope: float = 0.5) -> torch.Tensor:
    """Another library's operator, which may do anything under that name."""
    return torch.where(x > 0, x, x * slope)


@custom_op("escalade_test::parts", mutates_args=())
def parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:, :2] * 2, x[:, 2:] * 3]


@custom_op("escalade_test::count", mutates_args=())
def count(x: torch.Tensor) -> int:
    return x.numel()


@custom_op("escalade_test::double", mutates_args=("x",))
def double(x: torch.Tensor) -> None:
    x.mul_(2)


other_relu.register_fake(lambda x, slope=0.5: torch.empty_like(x))
parts.register_fake(lambda x: [torch.empty_like(x[:, :2]), torch.empty_like(x[:, 2:])])
count.register_fake(lambda x: 7)
double.register_fake(lambda x: None)


class WithOthers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(6, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, rest = torch.ops.escalade_test.parts(torch.ops.escalade_test.relu(self.first(x)))
        y: torch.Tensor = self.second(rest)
        return y.relu()


@pytest.mark.parametrize(("dtype", "most"), (("fp32", 1e-5), ("fp16", 5e-3)))
def test_operators_of_other_libraries_are_pytorchs_to_run(
    dtype: str, most: float, tmp_path: pathlib.Path
) -> None:
    model = WithOthers().eval()
    engine = escalade.compile(model, torch.randn(2, 3, 8, 8), dtype=dtype, device="cpu")
    for x in (torch.randn(2, 3, 8, 8), torch.randn(3, 3, 7, 9)):
        torch.testing.assert_close(engine(x), model(x), rtol=most, atol=most)
    plan = engine.plan(torch.randn(2, 3, 8, 8))
    (foreign,) = (
        one.node for one in plan.fallbacks if one.node.attributes["target"] == "escalade_test::relu"
    )
    assert {plan.forms[name].layout for name in foreign.inputs.values()} == {"nchw"}  # it may ignore strides
    with pytest.raises(FileError, match="escalade_test::relu is none of the operators that Escalade knows"):
        engine.save(tmp_path / "net.escalade")


@pytest.mark.parametrize(
    ("model", "sentence"),
    (
        (lambda x: x * torch.ops.escalade_test.count(x), "count returns something else than tensors"),
        (
            lambda x: (torch.ops.escalade_test.double(y := x + 1), y)[1],
            "double writes to one of its arguments",
        ),
    ),
)
def test_operators_of_other_libraries_that_do_more_than_that_are_refused(model: Any, sentence: str) -> None:
    with pytest.raises(CaptureError, match=f"escalade_test::{sentence}"):
        captured(model, torch.randn(2, 3))
