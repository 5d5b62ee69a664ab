"""What the likeliest classes are: the one reference, and PyTorch's own answer to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.top_k.problem import STEP, TopKProblem


def random_inputs(problem: TopKProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Logits STEP apart in a random order: every dtype holds them exactly, and no two of the best are alike.

    Classes would otherwise be told apart by rounding errors. From the 512th on they are all the same.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    keys = torch.rand((problem.batch, problem.classes), generator=generator, device=device)
    places = keys.argsort(-1).clamp_(max=511)
    return {"x": (16 - STEP * places).to(STORAGE[problem.dtype])}


def empty_output(problem: TopKProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((problem.batch, 2 * problem.k), dtype=torch.float32, device=device)


def exact(problem: TopKProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64: a stable sort of the logits, which has NaN first and leaves equal ones in the order of
    classes."""
    x = inputs["x"].double()
    classes = x.sort(dim=-1, descending=True, stable=True).indices[..., : problem.k]
    return torch.cat((torch.softmax(x, -1).gather(-1, classes), classes.double()), -1)


def peer(problem: TopKProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """torch.topk of an fp32 softmax; of equal ones it takes any, but the inputs have none among the best."""
    probabilities, classes = torch.softmax(inputs["x"], -1, dtype=torch.float32).topk(problem.k, -1)
    return torch.cat((probabilities, classes.float()), -1)
