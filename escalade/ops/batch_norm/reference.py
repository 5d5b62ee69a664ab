"""What normalisation is: the one reference, and PyTorch's own answer to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.batch_norm.problem import BatchNormProblem
from escalade.ops.shared import activation
from escalade.ops.shared.images import empty_images, stored_images

Tensors = Mapping[str, torch.Tensor]


def random_inputs(problem: BatchNormProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """x and the statistics of channels that differ; y of order one."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    size, each = (p.batch, p.channels, p.height, p.width), (1, p.channels, 1, 1)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    mean = normal(p.channels)
    variance = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    x = normal(*size).mul_(variance.sqrt().view(each)).add_(mean.view(each))
    inputs = {
        "x": stored_images(p, x),
        "weight": normal(p.channels),
        "bias": normal(p.channels),
        "mean": mean,
        "variance": variance,
    }
    if p.residual:
        inputs["residual"] = stored_images(p, normal(*size))
    return inputs


def empty_output(problem: BatchNormProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def peer(problem: BatchNormProblem, inputs: Tensors) -> torch.Tensor:
    """The normalised x by PyTorch, in the dtype of the inputs."""
    y = torch.batch_norm(  # F.batch_norm of PyTorch 2.11 refuses an eps of zero
        inputs["x"], inputs["weight"], inputs["bias"], inputs["mean"], inputs["variance"],
        False, 0.0, problem.epsilon, torch.backends.cudnn.enabled,
    )  # fmt: skip
    return activation.apply(problem, y, inputs["residual"] if problem.residual else None)


def exact(problem: BatchNormProblem, inputs: Tensors) -> torch.Tensor:
    """The result in float64."""
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})
