"""Padded images: names, limits, PyTorch's rules, and the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops import pad2d
from escalade.ops.pad2d import MODES, PAD2D, Pad2dProblem
from tests.support import check

PLAIN = Pad2dProblem(2, 8, 5, 7, (1, 2, 3, 4))


def test_names_are_stable() -> None:
    problem = Pad2dProblem(2, 8, 5, 7, (1, -2, 3, 0), value=-1.5)
    assert problem.name == "8_5x7_pad1x-2x3x0_b2_constant(-1.5)"
    assert Pad2dProblem.parse(problem.name) == problem
    with pytest.raises(UnsupportedError, match="the form is"):
        Pad2dProblem.parse("8_5x7_pad1")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mode": "mirror"}, "mode 'mirror': pad2d supports constant, reflect, replicate, circular"),
        ({"pads": (-3, -2, 0, 0)}, "leave nothing of 5 pixels"),
        ({"pads": (5, 0, 0, 0), "mode": "reflect"}, "pads of 5 and 0 in mode"),
        ({"pads": (0, 0, 8, 0), "mode": "circular"}, "pads of 8 and 0 in mode"),
        ({"pads": (-1, 0, 0, 0), "mode": "replicate"}, "only mode constant supports negative pads"),
        ({"pads": (1, 0, 0, 0), "mode": "reflect_gradient"}, "those of a gradient are negative"),
        ({"pads": (-3, 0, 0, 0), "mode": "reflect_gradient"}, "pads of 3 and 0 in mode reflect exceed the 2"),
        ({"mode": "reflect", "value": 1.0}, "only mode constant has one"),
        ({"value": float("nan")}, "only mode constant has one"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(PLAIN, **change)


@pytest.mark.parametrize("mode", MODES)
def test_the_operator_is_pytorchs_and_has_its_gradient(mode: str) -> None:
    x = torch.randn(1, 8, 5, 7, generator=torch.Generator().manual_seed(3), requires_grad=True)
    theirs, ours = F.pad(x, (1, 2, 3, 0), mode), pad2d(x, (3, 0, 1, 2), mode)
    assert torch.equal(ours, theirs)
    (gradient,) = torch.autograd.grad(ours.square().sum(), x)
    (expected,) = torch.autograd.grad(theirs.square().sum(), x)
    torch.testing.assert_close(gradient, expected)
    if mode != "constant":  # the gradient of a gradient pads
        g = torch.randn(1, 8, 8, 10, generator=torch.Generator().manual_seed(4), requires_grad=True)
        (padded,) = torch.autograd.grad(pad2d(g, (-3, 0, -1, -2), f"{mode}_gradient"), g, x.detach())
        assert torch.equal(padded, theirs)
    with pytest.raises(UnsupportedError, match="left and right"):
        pad2d(x, (1, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_bands_of_every_height(mode: str, dtype: str, seed: int) -> None:
    value = -1.5 if mode == "constant" else 0.0
    problem = Pad2dProblem(2, 24, 6, 5, (3, 2, 1, 4), mode, value, dtype, "nhwc")
    rung = PAD2D.ladder.rung("vectorised")
    for config in rung.configs(problem):
        check(PAD2D, rung, problem, config, torch.device("cpu"), seed)
