"""Convolutions of three channels by the operation `stem`: its kernel over conv2d's buffers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.ops import OPERATIONS
from escalade.ops.base.cards import typical_card
from escalade.ops.choose.choice import estimated
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from tests.support import check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
RUNG = CONV2D.ladder.rung("stem")
FIRST = Conv2dProblem.square(
    3, 64, 224, 7, batch=256, stride=2, dtype="fp16", layout="nhwc", bias=True, relu=True
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False},
        {"relu": False, "dtype": "bf16"},
        {"filter_height": 3, "filter_width": 3, "padding": (1, 1)},
    ],
)
def test_small_odd_sizes(changes: dict[str, Any], seed: int) -> None:
    problem = replace(FIRST, batch=2, height=21, width=18, **changes)
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


def test_the_first_layer_of_a_network_goes_there() -> None:
    assert estimated(OPERATIONS["conv2d"], FIRST, typical_card("sm_90a")).rung.name == RUNG.name
    assert estimated(OPERATIONS["conv2d"], FIRST, typical_card("sm_80")).rung.name != RUNG.name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"residual": True}, "residual"),
        ({"layout": "nchw"}, "nhwc"),
        ({"dtype": "fp32"}, "fp16"),
        ({"dilation": (2, 2)}, "dilation"),
        ({"channels": 4}, "3 channels"),
        ({"channels": 8}, "channels"),
        ({"stride": (1, 1)}, "stride"),
        ({"filters": 96}, "filters"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert RUNG.supports(FIRST) is None
    assert reason in (RUNG.supports(replace(FIRST, **changes)) or "")
