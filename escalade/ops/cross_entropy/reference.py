"""What a cross-entropy is, and its gradient: the one reference, and PyTorch's own answer to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.cross_entropy.problem import CrossEntropyProblem
from escalade.ops.shared.losses import gradient_of

_NEVER = -1
"""A target that no row has."""


def random_inputs(problem: CrossEntropyProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Normal deviates, and targets of which every third does not count, if any may."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn((p.batch, p.classes), generator=generator, device=device)
    target = torch.randint(0, p.classes, (p.batch,), generator=generator, device=device)
    if p.ignored is not None:
        target[1::3] = p.ignored
    inputs = {"x": x.to(STORAGE[p.dtype]), "target": target}
    # Large enough that the gradients of a mean are no subnormal numbers in fp16.
    scale = torch.tensor([0.75 * (p.batch if p.reduction == "mean" else 1)], device=device)
    return {**inputs, "scale": scale} if p.gradient else inputs


def empty_output(problem: CrossEntropyProblem, device: torch.device) -> torch.Tensor:
    if problem.gradient:
        return torch.empty((problem.batch, problem.classes), dtype=STORAGE[problem.dtype], device=device)
    return torch.empty(1, device=device)


def exact(problem: CrossEntropyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradient, or without it the loss, in float64."""
    return _asked(problem, inputs, torch.float64)


def peer(problem: CrossEntropyProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The gradient or the loss by PyTorch in fp32; a gradient is rounded to the problem's dtype."""
    found = _asked(problem, inputs, torch.float32)
    return found.to(STORAGE[problem.dtype]) if problem.gradient else found


def loss(problem: CrossEntropyProblem, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """PyTorch's loss in the dtype of x, one element."""
    found = F.cross_entropy(
        x, target, reduction=problem.reduction, label_smoothing=problem.smoothing,
        ignore_index=_NEVER if problem.ignored is None else problem.ignored,
    )  # fmt: skip
    return found.reshape(1)


def _asked(
    problem: CrossEntropyProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    x = inputs["x"].to(dtype)
    if not problem.gradient:
        return loss(problem, x, inputs["target"])
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return gradient_of(loss(problem, x, inputs["target"]), x, inputs["scale"])
