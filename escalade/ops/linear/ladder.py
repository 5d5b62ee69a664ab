"""The ladder of linear, foot to summit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.ladder import Ladder, Operation
from escalade.ops.linear import cuda_core, reference, tensor_core
from escalade.ops.linear.problem import DTYPES, LinearProblem
from escalade.ops.rows import LAYOUTS

PROBLEMS = (
    *(LinearProblem(batch, 512, 1000, bias=True) for batch in (1, 8, 32, 256)),
    *(LinearProblem(batch, 25088, 4096, bias=True, relu=True) for batch in (1, 32)),
    LinearProblem(10_000, 1296, 32, bias=True, relu=True),
)
"""The heads of ResNet and of VGG, and the first layer of a small autoencoder."""

SMALL_PROBLEMS = (
    LinearProblem(1, 64, 40, bias=True),
    LinearProblem(3, 520, 33, bias=True, relu=True),
    LinearProblem(8, 36, 20),
    LinearProblem(13, 130, 9, relu=True),
    LinearProblem(2, 2056, 5, bias=True),
    LinearProblem(37, 48, 68, bias=True),
    LinearProblem(70, 31, 130, relu=True),
    LinearProblem(1, 1, 1),
)
"""Between them: one row and more than a block's, odd features in and out, k in one piece and in several."""

FEW_ROWS = {"fp32": 16, "tf32": 8, "fp16": 8, "bf16": 8}
"""Up to so many, the weights' way from memory takes longer than the products of a warp an output."""


class Linear(Operation[LinearProblem]):
    name = "linear"
    ladder = Ladder(
        "linear",
        (
            cuda_core.NAIVE,
            cuda_core.TILED,
            cuda_core.WARP_PER_OUTPUT,
            tensor_core.TENSOR_CORE,
            tensor_core.TENSOR_CORE_SPLIT,
        ),
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: LinearProblem) -> tuple[str, ...]:
        """Not the split products: they make NaN of an infinity."""
        few = ("warp_per_output",) if problem.batch <= FEW_ROWS[problem.dtype] else ()
        return (*few, "tensor_core", "tiled")

    def parse(self, name: str) -> LinearProblem:
        return LinearProblem.parse(name)

    def inputs(self, problem: LinearProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        return reference.random_inputs(problem, device, seed)

    def output(self, problem: LinearProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_output(problem, device)

    def reference(self, problem: LinearProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.reference(problem, inputs)

    def peer(self, problem: LinearProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer(problem, inputs)
