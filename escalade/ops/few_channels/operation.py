"""The ladder of few_channels, foot to summit."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.few_channels import reference
from escalade.ops.few_channels.problem import DTYPES, FewChannelsProblem
from escalade.ops.few_channels.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.few_channels.rungs import direct, matrix, rows, tensor_core
from escalade.ops.shared.images import LAYOUTS


class FewChannels(Operation[FewChannelsProblem]):
    name = "few_channels"
    ladder = Ladder("few_channels", (*matrix.RUNGS, *direct.RUNGS, *rows.RUNGS, *tensor_core.RUNGS))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: FewChannelsProblem) -> tuple[str, ...]:
        return ("pooled", "images_a_tile", "split_halves", "rows", "direct", "matrix_unroll")

    def parse(self, name: str) -> FewChannelsProblem:
        return FewChannelsProblem.parse(name)

    def inputs(self, problem: FewChannelsProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        return reference.random_inputs(problem, device, seed)

    def output(self, problem: FewChannelsProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_output(problem, device)

    def reference(self, problem: FewChannelsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.reference(problem, inputs)

    def peer(self, problem: FewChannelsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer(problem, inputs)


FEW_CHANNELS = FewChannels()
