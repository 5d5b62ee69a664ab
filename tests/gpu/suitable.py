"""A supported problem for every convolution rung, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from escalade.ops import OPERATIONS, Rung
from escalade.ops.base.cards import typical_card
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem

CONV2D, INPUT_GRADIENT = OPERATIONS["conv2d"], OPERATIONS["conv2d_input_gradient"]
ARCHITECTURE = "sm_90a"
"""The only one that all rungs support."""

SIZE, BATCH = 28, 4
BEYOND_SIZE = 128
NOT_BEYOND_32_BITS = {
    "cluster_split_k": "it splits the sums of small outputs, and takes no others",
}
"""Rungs that support no problem of more than 2^31 outputs, with the reason."""


def _candidates(size: int, batch: int | None) -> Iterator[Conv2dProblem]:
    """Dense, grouped, depthwise, a network's first and last layer, and a 1x1 convolution; by default with a batch of
    more than 2^31 outputs."""
    for name in ("16to16_{}_k3s1_b1", "64to64_{}_k3s1_b1", "64to64_{}_k3s1g64_b1", "64to64_{}_k3s1g16_b1",
                 "3to64_{}_k7s2_b1", "16to64_{}_k1s1_b1", "16to4_{}_k3s1_b1"):  # fmt: skip
        one = Conv2dProblem.parse(name.format(size))
        images = batch or 2**31 // one.output_elements + 4
        for dtype in ("fp16", "fp32", "tf32"):
            for layout in CONV2D.layouts:
                yield replace(one, batch=images, dtype=dtype, layout=layout)


def problem_for(
    rung: Rung[Conv2dProblem], size: int = SIZE, batch: int | None = BATCH
) -> Conv2dProblem | None:
    """The first candidate that the rung supports."""
    for problem in _candidates(size, batch):
        if rung.on(typical_card(ARCHITECTURE)).refusal(problem) is None:
            return problem
    return None


def beyond_32_bits(rung: Rung[Conv2dProblem]) -> Conv2dProblem | None:
    """Problem with more than 2^31 outputs."""
    return problem_for(rung, BEYOND_SIZE, None)


def input_gradient_beyond_32_bits(
    rung: Rung[Conv2dInputGradientProblem],
) -> Conv2dInputGradientProblem | None:
    """Problem with more than 2^31 results, of a convolution with a stride of 2 if the rung supports one."""
    for name in ("16to16_{}_k3s2_b1", "64to64_{}_k3s2_b1", "4to16_{}_k3s2_b1", "64to8_{}_k3s1_b1",
                 "64to64_{}_k3s2g64_b1", "64to64_{}_k3s1g64_b1", "64to64_{}_k3s2g16_b1"):  # fmt: skip
        forward = Conv2dProblem.parse(name.format(BEYOND_SIZE))
        images = 2**31 // forward.input_elements + 4
        for dtype in ("fp16", "fp32", "tf32"):
            for layout in INPUT_GRADIENT.layouts:
                problem = Conv2dInputGradientProblem(
                    replace(forward, batch=images, dtype=dtype, layout=layout)
                )
                if rung.on(typical_card(ARCHITECTURE)).refusal(problem) is None:
                    return problem
    return None
