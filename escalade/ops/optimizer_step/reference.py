"""What a step of an optimiser is: the expression by PyTorch, function by function."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.optimizer_step.problem import OptimizerStepProblem
from escalade.ops.optimizer_step.rules import GRADIENT, PARAMETER, STEP, adam, sgd

TAKEN, SKIPPED = 2.0, 1.0
"""Steps that random inputs are said to be behind."""
_TYPICAL = dict((*sgd(momentum=0.9, dampening=0.1, weight_decay=1e-4).values,
                 *adam(weight_decay=1e-2).scaled(1024.0).values))  # fmt: skip
"""Values of the scalars that rules have; others are one half."""


def random_inputs(problem: OptimizerStepProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates for parameters and gradients, and between 0 and 1 for the state, among it squares."""
    generator = torch.Generator(device=device).manual_seed(seed)
    inputs = {
        "scalars": torch.tensor([_TYPICAL.get(name, 0.5) for name in problem.scalars], device=device),
        "counts": torch.tensor([TAKEN, SKIPPED, 1.0], device=device),
    }
    for tensor, size in enumerate(problem.sizes):
        parameter, gradient, *state = problem.read(tensor)
        inputs[parameter] = torch.randn(size, generator=generator, device=device)
        inputs[gradient] = torch.randn(size, generator=generator, device=device).to(STORAGE[problem.dtype])
        inputs |= {name: torch.rand(size, generator=generator, device=device) for name in state}
    return inputs


def empty_output(problem: OptimizerStepProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.sizes[0], device=device)


def further_outputs(problem: OptimizerStepProblem, device: torch.device) -> dict[str, torch.Tensor]:
    """Room for the other parameters, the state, the copies, and how many steps have been taken and skipped, and whether
    this one was."""
    made = {"counted": torch.empty(3, device=device)}
    for tensor, size in enumerate(problem.sizes):
        for name in problem.written(tensor):
            copied = problem.copy and name.startswith("copy")
            made[name] = torch.empty(size, device=device, dtype=STORAGE[problem.copy if copied else "fp32"])
    del made["y"]
    return made


def exact(problem: OptimizerStepProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first parameter in float64."""
    return _results(problem, inputs, 0, torch.float64)[0]


def further(problem: OptimizerStepProblem, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All else in float64, copies rounded to their type."""
    counted = torch.tensor([TAKEN + 1, SKIPPED, 0.0], dtype=torch.float64, device=inputs["counts"].device)
    found = {"counted": counted}
    for tensor in range(len(problem.sizes)):
        results = _results(problem, inputs, tensor, torch.float64)
        copies = (results[0].to(STORAGE[problem.copy]).double(),) if problem.copy else ()
        found |= dict(zip(problem.written(tensor), (*results, *copies), strict=True))
    del found["y"]
    return found


def peer(problem: OptimizerStepProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The first parameter by PyTorch in fp32."""
    return _results(problem, inputs, 0, torch.float32)[0]


def _results(
    problem: OptimizerStepProblem, inputs: Mapping[str, torch.Tensor], tensor: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    arrays = zip((PARAMETER, GRADIENT, *problem.state), problem.read(tensor), strict=True)
    given = {name: inputs[buffer].to(dtype) for name, buffer in arrays}
    given |= dict(zip(problem.scalars, inputs["scalars"].to(dtype), strict=True))
    given[STEP] = inputs["counts"][0].to(dtype) + 1
    return problem.program.evaluate(given)
