"""Problems to measure, and to test on the twin."""

from __future__ import annotations

from escalade.ops.mlp.problem import MlpProblem, parse_layers

AUTOENCODER = parse_layers("5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b")
"""The spectral autoencoder of 5 frames of 64 bands."""

PROBLEMS = (
    *(MlpProblem(batch, AUTOENCODER) for batch in (32, 64, 128, 256, 512, 4096, 65536, 1048576)),
    *(MlpProblem(batch, AUTOENCODER, "error") for batch in (512, 1048576)),
)

SMALL_PROBLEMS = (
    MlpProblem(3, AUTOENCODER),
    MlpProblem(9, parse_layers("13-7br_7-5b")),
    MlpProblem(5, parse_layers("3x10n-6bt_18n-11g_11-30b"), "error"),
    MlpProblem(2, parse_layers("2x40n-40bg_80-16_16n-16bg_16-80_2x40-40b"), "error"),
    MlpProblem(37, parse_layers("24-20bt_20-16_2x8n1e-3-4r")),
    MlpProblem(2, parse_layers("242n-240bg_240-6")),
    MlpProblem(1, parse_layers("1-1b")),
)
"""Tested on the twin: every activation, norms, both outputs, groups that split and join, odd sizes, one row and many,
and weights that do not fit into shared memory."""
