"""What a softmax's result is: the one reference, and PyTorch's own answer to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.softmax.problem import SoftmaxProblem


def random_inputs(problem: SoftmaxProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates: much wider, and a few large probabilities would hide errors in all the others."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(_sizes(problem), generator=generator, device=device)
    return {"x": x.to(STORAGE[problem.dtype])}


def empty_output(problem: SoftmaxProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(_sizes(problem), dtype=STORAGE[problem.dtype], device=device)


def exact(problem: SoftmaxProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The probabilities in float64."""
    return torch.softmax(inputs["x"].double(), 1)


def peer(problem: SoftmaxProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.softmax(inputs["x"], 1)


def _sizes(problem: SoftmaxProblem) -> tuple[int, ...]:
    if problem.inner == 1:
        return problem.batch, problem.classes
    return problem.batch, problem.classes, problem.inner
