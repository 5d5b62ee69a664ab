"""conv2d of few channels and many filters: bands that end inside an image, several per CTA, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.run import bind
from escalade.ops import OPERATIONS
from escalade.ops.base.card import H200
from escalade.ops.choose.choice import estimated
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d.rungs.skinny import RUNGS, SkinnyConfig
from tests.support import TINY, check

CPU = torch.device("cpu")
CONV2D = OPERATIONS["conv2d"]
(SKINNY,) = RUNGS


def posed(name: str, dtype: str = "fp16") -> Conv2dProblem:
    return Conv2dProblem.parse(name, dtype, "nhwc")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("3to136_9x19_k3s1_b2_bias+relu", "fp16"),  # filters that do not fill a warp's, and half a word
        ("1to64_11x9_k3x5s2x1p0x3d2x1_b2", "bf16"),
        ("4to72_7x21_k3s1_b2_bias+res[where(residual<=0,0,x)]", "fp32"),
        ("3to136_9x19_k3s1_b2_bias+relu+pool2+places", "fp16"),  # a row and a column outside every window
        ("4to72_9x19_k3s1_b2_bias+res+pool4x2+places", "tf32"),
        ("3to64_7x9_k3s1_b1_bias+pool2x1", "fp32"),
    ],
)
def test_several_bands_and_warps(name: str, dtype: str, seed: int) -> None:
    """On a card with one SM, whose CTAs have several bands each."""
    check(CONV2D, SKINNY.on(TINY), posed(name, dtype), SkinnyConfig(1, 4), CPU, seed)


def test_of_nans_the_last_has_the_place() -> None:
    """Beyond the first windows a NaN is the last of one, two and four."""
    problem = posed("3to64_6_k3s1_b1_bias+relu+pool2+places")
    inputs = CONV2D.inputs(problem, CPU, 0)
    inputs["x"][0, 1, 3, 3] = torch.nan
    results = {"y": CONV2D.output(problem, CPU), **CONV2D.extra_outputs(problem, CPU)}
    bind(SKINNY.recipe(problem, SKINNY.configs(problem)[0]), {**inputs, **results})()
    assert results["y"].isnan().equal(CONV2D.reference(problem, inputs).isnan())
    assert results["places"].equal(CONV2D.extra_references(problem, inputs)["places"].byte())


def test_the_first_layer_of_an_autoencoder_takes_it_and_that_of_a_resnet_does_not() -> None:
    for dtype in ("fp32", "tf32", "fp16"):
        chosen = estimated(CONV2D, posed("3to256_32_k3s1_b256_bias+relu", dtype), H200)
        assert chosen.rung.name == "skinny"
    assert "up to 48 words" in (SKINNY.supports(posed("3to64_224_k7s2_b256")) or "")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filters": 12}, "multiples of 8 filters"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"width": 20_000}, "do not fit"),
        ({"channels": 32}, "words of 4 bytes"),
        ({"pool": (3, 2)}, "rows divide 4 and whose columns divide 2"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], reason: str) -> None:
    problem = posed("3to64_8_k3s1_b1")
    assert SKINNY.supports(problem) is None
    assert reason in (SKINNY.supports(replace(problem, **changes)) or "")
