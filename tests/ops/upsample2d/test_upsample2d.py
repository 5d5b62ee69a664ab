"""Resized images: names, limits, PyTorch's rules, and the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from escalade.errors import UnsupportedError
from escalade.ops import upsample2d
from escalade.ops.choose.choice import choose
from escalade.ops.upsample2d import MODES, UPSAMPLE2D, Upsample2dProblem
from tests.support import check

PLAIN = Upsample2dProblem(2, 8, 5, 7, (10, 14), "bilinear")
sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(
    image=sizes, output=sizes, mode=st.sampled_from(sorted(MODES)), corners=st.booleans(), by=st.booleans()
)
def test_parse_is_the_inverse_of_name(image: Any, output: Any, mode: str, corners: bool, by: bool) -> None:
    (height, width), more = image, 0.3
    factors = ((output[0] + more) / height, (output[1] + more) / width) if by else (0.0, 0.0)
    problem = Upsample2dProblem(1, 3, height, width, output, mode, corners and MODES[mode] > 1, factors)
    assert Upsample2dProblem.parse(problem.name) == problem


def test_names_are_stable() -> None:
    assert replace(PLAIN, corners=True).name == "8_5x7to10x14_b2_bilinear_corners"
    assert replace(PLAIN, factors=(2.1, 2.0)).name == "8_5x7to10x14_b2_bilinear_by2.1x2.0"
    with pytest.raises(UnsupportedError, match="the form is"):
        Upsample2dProblem.parse("8_5x7to10x14_b2")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mode": "area"}, "mode 'area': upsample2d supports nearest, nearest_exact, bilinear, bicubic"),
        ({"mode": "nearest", "corners": True}, "only bilinear and bicubic"),
        ({"output": (0, 3)}, "output is 0"),
        ({"factors": (3.0, 2.0)}, "they do not scale 5x7 to 10x14"),
        ({"factors": (float("nan"), 2.0)}, "they do not scale 5x7 to 10x14"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(PLAIN, **change)


@pytest.mark.parametrize("mode", MODES)
def test_the_operator_is_pytorchs_and_has_its_gradient(mode: str) -> None:
    x = torch.randn(1, 8, 5, 7, generator=torch.Generator().manual_seed(3), requires_grad=True)
    theirs = F.interpolate(x, (8, 9), mode=mode.replace("_", "-"))
    ours = upsample2d(x, (8, 9), mode)
    torch.testing.assert_close(ours, theirs)
    (gradient,) = torch.autograd.grad(ours.square().sum(), x)
    (expected,) = torch.autograd.grad(theirs.square().sum(), x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize(
    "name",
    [
        "16_5x7to10x14_b2_bilinear",
        "24_5x6to13x7_b1_bicubic",
        "8_7x5to19x3_b2_bilinear_corners",
        "3_4x4to9x9_b1_bicubic",
    ],
)
def test_walks_of_every_length(name: str, dtype: str, seed: int) -> None:
    problem = Upsample2dProblem.parse(name, dtype=dtype, layout="nhwc")
    rung = UPSAMPLE2D.ladder.rung("walked")
    for config in rung.configs(problem):
        check(UPSAMPLE2D, rung, problem, config, torch.device("cpu"), seed)


def test_walks_are_for_images_that_are_made_larger() -> None:
    smaller = Upsample2dProblem(1, 8, 8, 8, (5, 16), "bilinear", layout="nhwc")
    assert choose(UPSAMPLE2D, smaller, torch.device("cpu")).rung.name == "vectorised"
    larger = replace(smaller, output=(8, 5))
    assert choose(UPSAMPLE2D, larger, torch.device("cpu")).rung.name == "walked"


@pytest.mark.parametrize(
    ("width", "outputs", "factor", "repeats"),
    [(8, 16, 0.0, 2), (4, 16, 0.0, 4), (16, 16, 0.0, 1), (7, 14, 0.0, 0), (8, 24, 0.0, 0), (4, 16, 4.2, 0)],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["nearest", "nearest_exact"])
def test_pixels_that_a_pack_repeats(
    mode: str, width: int, outputs: int, factor: float, repeats: int, seed: int
) -> None:
    problem = Upsample2dProblem(2, 3, 3, width, (5, outputs), mode, factors=(0.0, factor))
    rung = UPSAMPLE2D.ladder.rung("packs")
    (config, *_) = rung.configs(problem)
    (program,) = rung.recipe(problem, config).programs
    assert dict(program.constants)["REPEATS"] == repeats
    check(UPSAMPLE2D, rung, problem, config, torch.device("cpu"), seed)
