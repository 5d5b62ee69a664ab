"""The ladders of batch_norm and batch_statistics."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.batch_norm import normalise, reference, statistics
from escalade.ops.batch_norm.problem import BatchNormProblem, BatchStatisticsProblem
from escalade.ops.shared.images import LAYOUTS

_NORM, _STATISTICS = BatchNormProblem, BatchStatisticsProblem

PROBLEMS = (
    _NORM(32, 64, 112, 112, relu=True),
    _NORM(256, 64, 112, 112, relu=True),
    _NORM(32, 64, 56, 56, relu=True),
    _NORM(32, 64, 56, 56, relu=True, residual=True),
    _NORM(256, 64, 56, 56),
    _NORM(256, 64, 56, 56, relu=True),
    _NORM(256, 64, 56, 56, relu=True, residual=True),
    _NORM(32, 512, 7, 7, relu=True, residual=True),
    _NORM(256, 512, 7, 7, relu=True, residual=True),
)
"""ResNet-18: its first stage, and its last."""

SMALL_PROBLEMS = (
    _NORM(2, 8, 6, 6, relu=True),
    _NORM(3, 16, 7, 7, relu=True, residual=True),  # packs over two planes; a tail in nchw
    _NORM(1, 3, 5, 9),  # one channel a thread in nhwc
    _NORM(2, 24, 4, 4, relu=True, residual=True, epsilon=1e-3),  # 3 packs a row: threads left over
    _NORM(5, 40, 1, 1),  # alike in both layouts
    _NORM(2, 6, 3, 2),  # planes smaller than a pack of fp16
    _NORM(1, 2056, 2, 4),  # wider than a block
    _NORM(2, 64, 24, 24, residual=True),
)

STATISTICS_PROBLEMS = (
    _STATISTICS(32, 64, 112, 112),
    _STATISTICS(256, 64, 112, 112),
    _STATISTICS(32, 64, 56, 56),
    _STATISTICS(256, 64, 56, 56),
    _STATISTICS(32, 512, 7, 7),
    _STATISTICS(256, 512, 7, 7),
)

SMALL_STATISTICS_PROBLEMS = (
    _STATISTICS(2, 8, 6, 6),
    _STATISTICS(3, 16, 7, 7),
    _STATISTICS(1, 3, 5, 9),
    _STATISTICS(2, 24, 9, 4),  # 3 packs a row: threads left over
    _STATISTICS(5, 40, 1, 1),  # alike in both layouts
    _STATISTICS(1, 4, 1, 1),  # one element a channel: a variance of 0
    _STATISTICS(1, 2056, 2, 2),  # wider than a block
    _STATISTICS(2, 16, 64, 64),  # several splits
)


class BatchNorm(Operation[BatchNormProblem]):
    name = "batch_norm"
    ladder = Ladder("batch_norm", normalise.RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: BatchNormProblem) -> tuple[str, ...]:
        return ("vectorised", "scaled")

    def parse(self, name: str) -> BatchNormProblem:
        return BatchNormProblem.parse(name)

    def inputs(self, problem: BatchNormProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
        return reference.random_batch_norm(problem, device, seed)

    def output(self, problem: BatchNormProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_batch_norm(problem, device)

    def reference(self, problem: BatchNormProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.batch_norm(problem, {name: tensor.double() for name, tensor in inputs.items()})

    def peer(self, problem: BatchNormProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.batch_norm(problem, inputs)


class BatchStatistics(Operation[BatchStatisticsProblem]):
    name = "batch_statistics"
    ladder = Ladder("batch_statistics", statistics.RUNGS)
    problems = STATISTICS_PROBLEMS
    small_problems = SMALL_STATISTICS_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: BatchStatisticsProblem) -> tuple[str, ...]:
        return ("split",)

    def parse(self, name: str) -> BatchStatisticsProblem:
        return BatchStatisticsProblem.parse(name)

    def inputs(
        self, problem: BatchStatisticsProblem, device: torch.device, seed: int
    ) -> dict[str, torch.Tensor]:
        return reference.random_statistics(problem, device, seed)

    def output(self, problem: BatchStatisticsProblem, device: torch.device) -> torch.Tensor:
        return reference.empty_statistics(problem, device)

    def reference(self, problem: BatchStatisticsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.statistics(inputs["x"].double())

    def peer(self, problem: BatchStatisticsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return reference.peer_statistics(problem, inputs)


BATCH_NORM = BatchNorm()
BATCH_STATISTICS = BatchStatistics()
