"""What a movement gives: strided copies by PyTorch, which are exact in every dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.copy.problem import CopyProblem


def random_inputs(problem: CopyProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    storage = STORAGE[problem.dtype]
    found = {}
    for name in problem.sources:
        size = (problem.source_elements(name),)
        if storage.is_floating_point:
            found[name] = torch.randn(size, generator=generator, device=device).to(storage)
        else:
            found[name] = torch.randint(0, 256, size, generator=generator, device=device).to(storage)
    return found


def empty_output(problem: CopyProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.elements, dtype=STORAGE[problem.dtype], device=device)


def exact(problem: CopyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64, zeros where nothing is written."""
    return _moved(problem, {name: x.double() for name, x in inputs.items()})


def peer(problem: CopyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A copy for each part."""
    return _moved(problem, inputs)


def _moved(problem: CopyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    given = next(iter(inputs.values()))
    # Parts that leave nothing out are all that PyTorch needs to do.
    make = torch.empty if problem.moved == problem.elements else torch.zeros
    y = make(problem.elements, dtype=given.dtype, device=given.device)
    for part in problem.parts:
        x = inputs[f"x{part.source}"].reshape(-1)
        backwards = [axis for axis, stride in enumerate(part.x_strides) if stride < 0]
        strides = tuple(map(abs, part.x_strides))  # PyTorch has none below 0
        seen = torch.as_strided(x, part.sizes, strides, x.storage_offset() + part.x_begin).flip(backwards)
        torch.as_strided(y, part.sizes, part.y_strides, part.y_first).copy_(seen)
    return y
