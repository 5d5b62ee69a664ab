"""First layer of a network: a convolution of few channels with fused normalization, bias, ReLU and max-pooling."""

from __future__ import annotations

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.stem.problem import (
    StemProblem,
    empty_output,
    exact,
    peer,
    random_inputs,
)
from escalade.ops.stem.rungs import RUNGS


def _resnet(batch: int, source: str, normalise: bool, pool: bool = True) -> StemProblem:
    return StemProblem(
        batch, 3, 224, 224, 64, 7, 7, (2, 2), (3, 3), source, "nchw", normalise,
        pool=(3, 2, 1) if pool else None,
    )  # fmt: skip


class StemOperation(Operation[StemProblem]):
    name = "stem"
    problem = StemProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("stem", RUNGS)
    problems = (
        *(_resnet(batch, "fp32", False) for batch in (1, 8, 32, 256)),
        *(_resnet(batch, "uint8", True) for batch in (1, 8, 32, 256)),
        _resnet(256, "fp32", False, pool=False),
    )
    small_problems = (
        StemProblem(2, 3, 23, 37, 64, 7, 7, (2, 2), (3, 3), pool=(3, 2, 1)),
        StemProblem(1, 3, 20, 70, 64, 7, 7, (2, 2), (3, 3), "uint8", "nhwc", True, pool=(3, 2, 1)),
        StemProblem(1, 3, 18, 21, 128, 7, 7, (2, 2), (3, 3), "fp16", pool=(2, 2, 0), relu=False),
        StemProblem(1, 4, 17, 15, 64, 3, 3, (2, 2), (1, 1), "bf16", "nhwc", pool=None),
        StemProblem(2, 1, 14, 13, 16, 3, 3, (1, 1), (1, 1), "uint8", pool=(2, 2, 0)),
        StemProblem(1, 3, 11, 19, 32, 3, 3, (1, 1), (1, 1), "fp16", "nhwc", True, False, (3, 2, 1)),
        StemProblem(1, 4, 12, 9, 48, 5, 5, (1, 1), (2, 2), "fp32", "nhwc", pool=(3, 2, 1)),
        StemProblem(1, 3, 16, 17, 80, 5, 3, (3, 1), (0, 2), "bf16", "nchw", True, relu=False),
        StemProblem(1, 1, 15, 18, 32, 8, 8, (2, 2), (0, 0), "fp32", pool=(3, 3, 1)),
        StemProblem(
            1, 3, 20, 37, 64, 7, 7, (2, 2), (3, 3), "uint8", "nchw", True, pool=(3, 2, 1), output="int8"
        ),
        StemProblem(1, 3, 9, 18, 32, 3, 3, (2, 2), (1, 1), "fp16", "nhwc", relu=False, output="int8"),
        StemProblem(1, 3, 13, 14, 10, 9, 11, (2, 1), (4, 5), "uint8", normalise=True, pool=(3, 1, 0)),
    )
    """Tested on the twin: every source, layout and pooling, odd sizes, non-square filters and all widths of a step."""
    dtypes = MULTIPLIED
    layouts = ("nhwc",)
    order = ("streamed", "warpgroup", "pooled", "tensor_core", "separate")


STEM = StemOperation()

__all__ = ["STEM", "Stem", "StemProblem"]
