"""The problems of add: those that `escalade ladder` measures, and small ones for the twin."""

from __future__ import annotations

from escalade.ops.add.problem import AddProblem

PROBLEMS = (
    AddProblem(802_816, relu=True),
    AddProblem(6_422_528, relu=True),
    AddProblem(25_690_112, relu=True),
    AddProblem(51_380_224),
    AddProblem(51_380_224, relu=True),
    AddProblem(205_520_896, relu=True),
)
"""ResNet-18: 512 channels 7² at batch 32, 64 channels 56² and 112² at 32, then both at 256."""

SMALL_PROBLEMS = (
    AddProblem(1),
    AddProblem(7, relu=True),
    AddProblem(1000),
    AddProblem(8 * 1024, relu=True),
    AddProblem(9001, relu=True),
)
