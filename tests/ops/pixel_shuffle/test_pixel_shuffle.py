"""Channels to pixels and back: names, limits, and the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops import pixel_shuffle
from escalade.ops.pixel_shuffle import PixelShuffleProblem

PLAIN = PixelShuffleProblem(2, 8, 4, 6, 2)


def test_names_are_stable() -> None:
    assert PLAIN.name == "8_4x6_up2_b2"
    down = replace(PLAIN, down=True)
    assert down.name == "8_4x6_down2_b2" and PixelShuffleProblem.parse(down.name) == down
    assert (down.output_channels, down.output_height, down.output_width) == (32, 2, 3)
    with pytest.raises(UnsupportedError, match="the form is"):
        PixelShuffleProblem.parse("8_4x6_b2")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"factor": 0}, "factor is 0"),
        ({"channels": 6}, "with a factor of 2 it must"),
        ({"height": 5, "down": True}, "with a factor of 2 it must"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(PLAIN, **change)


@pytest.mark.parametrize("down", [False, True])
def test_the_operator_is_pytorchs_and_has_its_gradient(down: bool) -> None:
    x = torch.randn(1, 16, 4, 6, generator=torch.Generator().manual_seed(3), requires_grad=True)
    theirs = F.pixel_unshuffle(x, 2) if down else F.pixel_shuffle(x, 2)
    ours = pixel_shuffle(x, 2, down=down)
    assert torch.equal(ours, theirs)
    (gradient,) = torch.autograd.grad(ours.square().sum(), x)
    assert torch.equal(gradient, 2 * x.detach())
