"""The problems of quantise: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.quantise.problem import QuantiseProblem

PROBLEMS = (
    QuantiseProblem(200_704),
    QuantiseProblem(6_422_528),
    QuantiseProblem(51_380_224),
)
"""What ResNet-18's stem gives, 64 channels 56², at batch 1, 32 and 256."""

SMALL_PROBLEMS = (QuantiseProblem(1), QuantiseProblem(1003), QuantiseProblem(8192), QuantiseProblem(9001))
