"""Convolutions to measure: a reproducible random sweep, and twenty of odd sizes that no table has."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from escalade.errors import UnsupportedError
from escalade.ops.conv2d import Conv2dProblem

T = TypeVar("T")

MOST_FLOPS = 200e9
MOST_BYTES = 2e9
DTYPES = {"fp16": 60, "bf16": 10, "fp32": 14, "tf32": 8, "fp8": 8}
"""Share of problems per dtype, in percent, as in all tables below."""
FILTERS = {(1, 1): 30, (3, 3): 40, (5, 5): 8, (7, 7): 8, (1, 7): 7, (7, 1): 7}
GROUPS = {"one": 80, "depthwise": 10, "some": 10}
ROUNDED_TO = {64: 60, 8: 25, 1: 15}
"""Divisor of channels and filters."""
EPILOGUES = {(): 30, ("bias",): 15, ("bias", "relu"): 30, ("bias", "residual", "relu"): 25}
FP8_UNIT = 16


def problems(count: int, seed: int = 0) -> tuple[Conv2dProblem, ...]:
    """Return the first `count` distinct problems of the fixed random sequence of a seed."""
    return tuple(islice(_unique(_generate(random.Random(seed))), count))


def _unique(found: Iterator[Conv2dProblem]) -> Iterator[Conv2dProblem]:
    seen = set()
    for problem in found:
        if problem not in seen:
            seen.add(problem)
            yield problem


def _generate(source: random.Random) -> Iterator[Conv2dProblem]:
    while True:
        try:
            problem = _draw(source)
        except UnsupportedError:  # a filter larger than the padded image
            continue
        if problem.flops <= MOST_FLOPS and problem.bytes <= MOST_BYTES:
            yield problem


def _draw(source: random.Random) -> Conv2dProblem:
    dtype = _weighted_choice(source, DTYPES)
    taps = _weighted_choice(source, FILTERS)
    grouping = "one" if dtype == "fp8" else _weighted_choice(source, GROUPS)
    channels, filters = _channels(source), _channels(source)
    groups = 1
    if grouping == "depthwise":
        groups = filters = channels
    elif grouping == "some":
        groups = source.choice((2, 4, 8, 32))
        channels, filters = (groups * math.ceil(count / groups) for count in (channels, filters))
    if dtype == "fp8":
        channels, filters = (FP8_UNIT * math.ceil(count / FP8_UNIT) for count in (channels, filters))
    height = _log_uniform(source, 7, 224)
    width = height if source.random() < 0.8 else _log_uniform(source, 7, 224)
    stride = 2 if source.random() < 0.25 else 1
    dilation = 2 if max(taps) > 1 and source.random() < 0.1 else 1
    epilogue = _weighted_choice(source, EPILOGUES)
    # Other dtypes are NHWC only: their fast rungs need it, and networks use it throughout.
    layout = "nchw" if dtype == "fp32" and source.random() < 0.3 else "nhwc"
    half = "fp16" if dtype == "fp8" and source.random() < 0.3 else ""
    return Conv2dProblem(
        _log_uniform(source, 1, 256), channels, height, width, filters, *taps, (stride, stride),
        (dilation * (taps[0] // 2), dilation * (taps[1] // 2)), (dilation, dilation), groups, dtype, layout,
        "bias" in epilogue, "residual" in epilogue, "relu" in epilogue, output=half,
    )  # fmt: skip


def _weighted_choice(source: random.Random, shares: dict[T, int]) -> T:
    return source.choices(list(shares), list(shares.values()))[0]


def _log_uniform(source: random.Random, least: int, most: int) -> int:
    """Draw a log-uniform size: as likely between 1 and 2 as between 100 and 200."""
    return round(math.exp(source.uniform(math.log(least), math.log(most))))


def _channels(source: random.Random) -> int:
    unit = _weighted_choice(source, ROUNDED_TO)
    return unit * max(1, round(_log_uniform(source, 3, 2048) / unit))


UNTUNED = tuple(
    replace(Conv2dProblem.parse(name), dtype="fp16", layout="nhwc")
    for name in (
        "7to33_61_k3s1_b3",
        "13to29_97_k5s1_b3_bias+relu",
        "17to64_53x71_k3s2_b3_bias+relu",
        "23to50_45_k1x7s1_b3_bias+relu",
        "31to31_59_k3s1p2d2_b3_bias+res+relu",
        "36to100_33_k5s2_b3_bias+relu",
        "42to42_77_k3s1_b3_bias+res+relu",
        "50to75_41x67_k1s1_b3_bias+relu",
        "60to60_111_k3s1_b3_bias+relu",
        "66to130_37_k3s2_b3_bias+relu",
        "72to72_29x43_k1x7s1_b3_bias+relu",
        "90to90_35_k5s1_b3_bias+relu",
        "99to201_27_k1s1_b3_bias",
        "110to110_47_k3s1p2d2_b3_bias+relu",
        "140to70_31_k1s1_b3_bias+relu",
        "150to150_25x39_k7x1s1_b3_bias+relu",
        "180to180_21_k3s1_b3_bias+res+relu",
        "213to107_19_k5s1p4d2_b3_bias+relu",
        "260to260_17_k3s1_b3_bias+res+relu",
        "300to300_13_k3s1_b3_bias+relu",
    )
)
"""Untuned problems: odd sizes and channels, batch 3, 5x5 and 1x7 filters, dilation."""
