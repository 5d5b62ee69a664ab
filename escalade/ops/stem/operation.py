"""The ladder of the stem."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.stem import reference
from escalade.ops.stem.problem import StemProblem
from escalade.ops.stem.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.stem.rungs import separate, sm90_streamed, sm90_warpgroup, tensor_core


class Stem(Operation[StemProblem]):
    name = "stem"
    ladder = Ladder(
        "stem", (*separate.RUNGS, *tensor_core.RUNGS, *sm90_warpgroup.RUNGS, *sm90_streamed.RUNGS)
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = ("fp32", "tf32", "fp16", "bf16")
    layouts = ("nhwc",)

    def preferred(self, problem: StemProblem) -> tuple[str, ...]:
        return ("streamed", "warpgroup", "pooled", "tensor_core", "separate")

    def parse(self, name: str) -> StemProblem:
        return StemProblem.parse(name)

    def inputs(self, problem: StemProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        return reference.random_inputs(problem, device, seed)

    def output(self, problem: StemProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_output(problem, device)

    def reference(self, problem: StemProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.reference(problem, inputs)

    def peer(self, problem: StemProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer(problem, inputs)


STEM = Stem()
