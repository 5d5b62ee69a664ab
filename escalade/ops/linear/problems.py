"""Problems to measure, and to test on the twin."""

from __future__ import annotations

from escalade.ops.linear.problem import LinearProblem

PROBLEMS = (
    *(LinearProblem(batch, 512, 1000, bias=True) for batch in (1, 8, 32, 256)),
    *(LinearProblem(batch, 25088, 4096, bias=True, relu=True) for batch in (1, 32)),
    LinearProblem(10_000, 1296, 32, bias=True, relu=True),
    *(LinearProblem(batch, 512, 1000, bias=True, pixels=49) for batch in (1, 2, 4)),
    LinearProblem(1, 2048, 1000, bias=True, pixels=49),
)
"""The heads of ResNet and VGG, the first layer of a small autoencoder, and ResNet's heads with the mean."""

SMALL_PROBLEMS = (
    LinearProblem(1, 64, 40, bias=True),
    LinearProblem(3, 520, 33, bias=True, relu=True),
    LinearProblem(8, 36, 20),
    LinearProblem(13, 130, 9, relu=True),
    LinearProblem(2, 2056, 5, bias=True),
    LinearProblem(37, 48, 68, bias=True),
    LinearProblem(70, 31, 130, relu=True),
    LinearProblem(1, 1, 1),
    LinearProblem(1, 64, 40, bias=True, pixels=49),
    LinearProblem(3, 200, 33, bias=True, relu=True, pixels=35),
    LinearProblem(4, 31, 17, relu=True, pixels=2),
    LinearProblem(1, 1040, 3, bias=True, pixels=29),
    LinearProblem(18, 40, 9, bias=True, pixels=4),
)
"""Tested on the twin: a single row and several CTAs, odd feature counts, k in one piece and split; means over two
pixels and over more than are loaded at once, of more features than a CTA has threads and of more rows than one launch
takes."""
