"""conv2d of few filters: bands that share rows of x, several bands per CTA, refusals, choices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.ops import OPERATIONS
from escalade.ops.base.card import H200
from escalade.ops.choose.choice import estimated
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d.rungs.col2im import RUNGS, Col2imConfig
from tests.support import TINY, check

CPU = torch.device("cpu")
CONV2D, INPUT_GRADIENT = OPERATIONS["conv2d"], OPERATIONS["conv2d_input_gradient"]
(COL2IM,) = RUNGS


def posed(name: str, dtype: str = "fp16") -> Conv2dProblem:
    return Conv2dProblem.parse(name, dtype, "nhwc")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("136to3_9x19_k3s1_b2_bias+relu", "bf16"),  # channels that do not fill a round of loads
        ("40to2_11x9_k3x5s2x1p0x3d2x1_b2", "fp32"),
    ],
)
def test_several_bands(name: str, dtype: str, seed: int) -> None:
    """On a card with one SM, whose CTAs have several bands each."""
    check(CONV2D, COL2IM.on(TINY), posed(name, dtype), Col2imConfig(4), CPU, seed)


@pytest.mark.parametrize(
    "name",
    [
        "3to72_10x7_k4s2p1_b2_bias+relu",
        "2to40_9x8_k3s3p0d2_b1",  # pixels without a tap
    ],
)
def test_several_bands_transposed(name: str, seed: int) -> None:
    problem = replace(INPUT_GRADIENT.parse(name), dtype="fp16", layout="nhwc")
    rung = INPUT_GRADIENT.ladder.rung("col2im")
    check(INPUT_GRADIENT, rung, problem, Col2imConfig(4), CPU, seed)


def test_the_last_layer_of_an_autoencoder_takes_it() -> None:
    for dtype, name in {"fp32": "col2im", "tf32": "narrow", "fp16": "col2im"}.items():
        assert estimated(CONV2D, posed("256to3_32_k3s1_b256_bias", dtype), H200).rung.name == name
        transposed = INPUT_GRADIENT.parse("3to256_32_k4s2p1_b256_bias")
        chosen = estimated(INPUT_GRADIENT, replace(transposed, dtype=dtype, layout="nhwc"), H200)
        assert chosen.rung.name == "col2im"
    assert estimated(CONV2D, posed("144to24_56_k1s1_b32"), H200).rung.name == "resident"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"channels": 60}, "multiples of 16 bytes"),
        ({"residual": True}, "support a residual"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"width": 20_000}, "do not fit"),
        ({"filters": 6}, "up to 48"),
    ],
)
def test_what_it_refuses(changes: dict[str, int | bool | str], reason: str) -> None:
    problem = posed("64to3_8_k3s1_b1")
    assert COL2IM.supports(problem) is None
    assert reason in (COL2IM.supports(replace(problem, **changes)) or "")  # type: ignore[arg-type]
