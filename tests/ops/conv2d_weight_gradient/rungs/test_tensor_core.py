"""conv2d_weight_gradient on tensor cores of any card: refilled stages, the choice on other cards, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.ops import OPERATIONS
from escalade.ops.base.cards import typical_card
from escalade.ops.conv2d_weight_gradient import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.tensor_core import TENSOR_CORE, TensorCoreConfig
from tests.support import check

CPU = torch.device("cpu")
OPERATION = OPERATIONS["conv2d_weight_gradient"]


def posed(name: str, dtype: str = "fp16") -> Conv2dWeightGradientProblem:
    return replace(Conv2dWeightGradientProblem.parse(name), dtype=dtype, layout="nhwc")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("6to34_12x9_k3s1_b2_bias", "fp16"),
        ("6to34_12x9_k3s1_b2_bias", "fp32"),
        ("7to33_12x9_k3s1_b2_bias", "bf16"),  # odd numbers of 16-bit elements, which cp.async cannot copy
    ],
)
@pytest.mark.parametrize("stages", [3, 4])
def test_stages_and_windows_are_refilled(name: str, dtype: str, stages: int, seed: int) -> None:
    """216 output pixels: parts of five k-tiles and of two, more than stages and fewer."""
    config = TensorCoreConfig(32, 64, 32, stages, blocks_per_sm=1, part_tiles=5)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(OPERATION, TENSOR_CORE, posed(name, dtype), config, CPU, seed, options)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_cards_without_wgmma_choose_it(architecture: str) -> None:
    card = typical_card(architecture)
    problem = posed("64to64_56_k3s1_b32")
    rungs = {name: OPERATION.ladder.rung(name).on(card) for name in OPERATION.preferred(problem)}
    taken = [rung for rung in rungs.values() if rung.refusal(problem) is None]
    assert min(taken, key=lambda rung: rung.least(problem)).name == "tensor_core"


def test_refusals() -> None:
    refusal = TENSOR_CORE.refusal(posed("8to8_9_k3s1g8_b2", "tf32"))
    assert refusal is not None and "depthwise takes it" in refusal
