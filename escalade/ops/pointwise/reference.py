"""What a pointwise program's result is: by PyTorch, function by function."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.pointwise.problem import PointwiseProblem
from escalade.ops.shared.pointwise import empty_output, random_inputs

__all__ = ["empty_output", "exact", "peer", "random_inputs", "results"]


def exact(problem: PointwiseProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first result in float64."""
    return results(problem, inputs, torch.float64)[0]


def peer(problem: PointwiseProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """PyTorch's first result in the problem's dtype."""
    return results(problem, inputs, STORAGE[problem.dtype])[0]


def results(
    problem: PointwiseProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """All results in a dtype, in the order in which they lie in memory."""
    seen = {
        operand.name: in_memory(inputs[operand.name]).as_strided(problem.shape, operand.strides).to(dtype)
        for operand in problem.operands
    }
    return tuple(result.expand(problem.shape) for result in problem.program.evaluate(seen))


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as they lie in memory, without gaps."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.contiguous().view(-1)
