"""What a group norm's result is: the one reference, and PyTorch's own answer to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.group_norm.problem import GroupNormProblem
from escalade.ops.shared import activation
from escalade.ops.shared.images import empty_images, stored_images


def random_inputs(problem: GroupNormProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Images of normal deviates, each channel with a mean and a spread of its own."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    each = (p.batch, p.channels, 1, 1)
    x = normal(p.batch, p.channels, p.height, p.width) * (1 + normal(*each).abs()) + normal(*each)
    tensors = {"x": stored_images(p, x)}
    if p.weight:
        tensors["weight"] = (1 + 0.3 * normal(p.channels)).to(STORAGE[p.dtype])
    if p.bias:
        tensors["bias"] = (0.3 * normal(p.channels)).to(STORAGE[p.dtype])
    return tensors


def empty_output(problem: GroupNormProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def exact(problem: GroupNormProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The images in float64."""
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: GroupNormProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    y = torch.group_norm(
        inputs["x"], problem.groups, inputs.get("weight"), inputs.get("bias"), problem.epsilon
    )
    return activation.apply(problem, y)
