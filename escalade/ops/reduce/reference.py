"""What a reduction's result is: the one reference, and PyTorch's own answer to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.expressions import Expression
from escalade.ops.reduce.problem import ReduceProblem
from escalade.ops.shared import activation

_BY_KIND: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
    "logsumexp": lambda x: x.logsumexp(1),
}


def random_inputs(problem: ReduceProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates around 1, so that sums do not cancel."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    x = 1 + torch.randn((p.batch, p.reduced, p.inner), generator=generator, device=device)
    return {"x": x.to(STORAGE[p.dtype])}


def empty_output(problem: ReduceProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, problem.inner), dtype=STORAGE[problem.dtype], device=device)


def exact(problem: ReduceProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The results in float64."""
    return peer(problem, {"x": inputs["x"].double()})


def peer(problem: ReduceProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    x = inputs["x"].reshape(problem.batch, problem.reduced, problem.inner)
    if problem.before:
        (x,) = Expression.parse(problem.before).evaluate({"x": x})
    y = x.var(1, correction=problem.correction) if problem.kind == "var" else _BY_KIND[problem.kind](x)
    return activation.apply(problem, y)
