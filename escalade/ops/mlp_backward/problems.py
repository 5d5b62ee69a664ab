"""Problems to measure, and to test on the twin."""

from __future__ import annotations

from escalade.ops.mlp.problem import parse_layers
from escalade.ops.mlp_backward.problem import MlpBackwardProblem

AUTOENCODER = "5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b"
"""The spectral autoencoder."""

PROBLEMS = (
    *(MlpBackwardProblem(batch, parse_layers(AUTOENCODER)) for batch in (64, 512, 8192, 65536)),
    MlpBackwardProblem(512, parse_layers(AUTOENCODER), input_gradient=True),
    MlpBackwardProblem(8192, parse_layers("64-128br_128-128br_128-10b")),
)

SMALL_PROBLEMS = tuple(
    MlpBackwardProblem.parse(name)
    for name in (
        "2x8n-8bg_16-4_4n-4bg_4-16_2x8-8b_b6",  # a small spectral autoencoder
        "2x8n-8bg_16-4_4n-4bg_4-16_2x8-8b_b37_dx",  # several tiles, the last not full
        "7-5b_b3_dx",  # odd sizes, and a last layer without an activation
        "3x5n1e-3-7bt_21n-3g_b9_dx",  # odd groups, a norm within the chain, an activation at the end
        "33-70br_70-9_b21",  # more than a warp's share of the weights, and ReLU
        "1-1r_b1",
        "72n-72b_72-136_136-72br_b5_dx",  # more shares than warps of a small block
    )
)
