"""Batch normalization in training: its further results, an activation, in place, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.run import bind
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, batch_norm_training
from escalade.ops.batch_norm_training import BatchNormTrainingProblem

CPU = torch.device("cpu")
OPERATION = OPERATIONS["batch_norm_training"]


def test_it_moves_running_statistics_elsewhere_and_saves_what_pytorch_saves(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 8, 5, 4, generator=generator) * 2 + 1
    given = [torch.rand(8, generator=generator) for _ in range(4)]
    weight, bias, *running = (each.clone() for each in given)
    found = batch_norm_training(x, weight, bias, running[0], running[1], momentum=0.3)
    assert all(torch.equal(one, other) for one, other in zip((weight, bias, *running), given, strict=True))
    y, mean, rstd = torch.ops.aten.native_batch_norm(x, weight, bias, *running, True, 0.3, 1e-5)
    for one, other in zip(found, (y, mean, rstd, *running), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    assert len(batch_norm_training(x, None, None)) == 3


def test_running_statistics_and_the_residual_may_be_written_over(seed: int) -> None:
    """As in a plan, whose buffers are updated in place."""
    problem = BatchNormTrainingProblem(2, 16, 5, 5, relu=True, residual=True, momentum=0.1, layout="nhwc")
    inputs = OPERATION.inputs(problem, CPU, seed)
    expected = {
        "y": OPERATION.reference(problem, inputs),
        **OPERATION.extra_references(problem, inputs),
    }
    rung = OPERATION.ladder.rung("vectorised")
    outputs = {
        **OPERATION.extra_outputs(problem, CPU), "y": inputs["residual"], "moved_mean": inputs["running_mean"],
        "moved_variance": inputs["running_variance"],
    }  # fmt: skip
    bind(rung.recipe(problem, rung.configs(problem)[0]), {**inputs, **outputs})()
    for name, wanted in expected.items():
        torch.testing.assert_close(outputs[name].double(), wanted, rtol=1e-5, atol=1e-5)


def test_autocast_networks_have_half_images_and_single_parameters(seed: int) -> None:
    x = torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(seed))
    x = x.half().contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    y, *_ = batch_norm_training(x, weight, bias, relu=True)
    gradient = torch.randn(4, 8, 6, 6).half()
    found = torch.autograd.grad(y, (x, weight, bias), gradient)
    assert [one.dtype for one in found] == [torch.float16, torch.float32, torch.float32]
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    wide = x.detach().double().requires_grad_(), weight.double(), bias.double()
    expected = torch.autograd.grad(
        F.batch_norm(wide[0], None, None, *wide[1:], training=True).relu(), wide, gradient.double()
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": torch.ones(3, 8)}, r"x is torch.float32 \[3, 8\]"),
        ({"running_mean": torch.ones(8)}, "running_mean without running_var"),
        ({"x": torch.ones(1, 8, 1, 1)}, "training needs more than one value per"),
        ({"residual": torch.ones(2, 8, 3, 4)}, r"residual is torch.float32 \[2, 8, 3, 4\].* here N is"),
        ({"eps": -0.5}, "it must be finite and at least"),
        (
            {"running_mean": torch.ones(8), "running_var": torch.ones(8), "momentum": 1.5},
            "it must be from 0 to 1",
        ),
        ({"rung": "nonsense"}, "no rung 'nonsense'"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        batch_norm_training(**{"x": torch.ones(2, 8, 3, 3), "weight": None, "bias": None, **change})


def test_problems_have_names() -> None:
    for problem in (*OPERATION.small_problems, *OPERATIONS["batch_statistics"].small_problems):
        assert type(problem).parse(problem.name) == problem
    with pytest.raises(UnsupportedError, match="does not name a batch normalization in training"):
        OPERATION.parse("64_56")
    small = BatchNormTrainingProblem(2, 8, 3, 2, dtype="fp16")
    assert "use the rung `one_pass`" in (OPERATION.ladder.rung("vectorised").supports(small) or "")
