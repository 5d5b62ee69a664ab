"""The problems of batch_norm_training: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.batch_norm_training.problem import BatchNormTrainingProblem

PROBLEMS = tuple(
    BatchNormTrainingProblem.parse(name)
    for name in (
        "64_112_b256_m0.1_relu",
        "64_56_b64_m0.1_relu",
        "64_56_b256_m0.1_relu",
        "64_56_b256_m0.1_res+relu",
        "256_56_b256_m0.1",
        "512_7_b64_m0.1_res+relu",
        "512_7_b256_m0.1_res+relu",
    )
)
"""ResNets: the first layers, with a ReLU and with a residual and a ReLU behind them, and the last one."""

SMALL_PROBLEMS = tuple(
    BatchNormTrainingProblem.parse(name)
    for name in (
        "8_6_b2_m0.1_relu",
        "16_7_b3_eps0.001_m0.25_res+relu",
        "3_5x9_b1",
        "40_1_b5_m0.1",
        "6_3x2_b2_res",
        "16_48_b2_m0.1[x*sigmoid(x)]",
    )
)
