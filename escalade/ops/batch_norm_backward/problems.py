"""The problems of batch_norm_backward: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.batch_norm_backward.problem import BatchNormBackwardProblem

PROBLEMS = tuple(
    BatchNormBackwardProblem.parse(name)
    for name in (
        "64_112_b256_byx",
        "64_56_b64_byx",
        "64_56_b256_byx",
        "64_56_b256_byoutput+res",
        "256_56_b256",
        "96_56_b64_byx[gradient*sigmoid(x)*(1+x*(1-sigmoid(x)))]",
        "512_7_b64_byoutput+res",
        "512_7_b256_byoutput+res",
    )
)
"""ResNets: the first layers, behind a ReLU and behind a residual and a ReLU, and the last one."""

SMALL_PROBLEMS = tuple(
    BatchNormBackwardProblem.parse(name)
    for name in (
        "8_6_b2_byx",
        "16_7_b3_byoutput+res",  # packs over two planes; a tail in nchw
        "3_5x9_b1",  # one channel a thread in nhwc
        "24_9x4_b2_byoutput",  # 3 packs a row: threads left over
        "40_1_b5_byx",  # alike in both layouts
        "6_3x2_b2_byoutput",  # planes smaller than a pack of fp16
        "2056_2_b1_byx",  # wider than a block
        "16_64_b2",  # several splits
        "24_5x6_b3_byx[gradient*sigmoid(x)*(1+x*(1-sigmoid(x)))]",  # SiLU
        "8_33_b2_byx[gradient*(x<6)*(x>0)]",
    )
)
