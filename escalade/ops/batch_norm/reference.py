"""What normalisation and statistics are: the one reference of each, and PyTorch's own answers to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.batch_norm.problem import BatchNormProblem, BatchStatisticsProblem
from escalade.ops.shared.images import MEMORY_FORMAT, empty_images

Tensors = Mapping[str, torch.Tensor]


def _images(problem: BatchNormProblem | BatchStatisticsProblem, values: torch.Tensor) -> torch.Tensor:
    return values.to(STORAGE[problem.dtype]).contiguous(memory_format=MEMORY_FORMAT[problem.layout])


def random_batch_norm(problem: BatchNormProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
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
        "x": _images(p, x),
        "weight": normal(p.channels),
        "bias": normal(p.channels),
        "mean": mean,
        "variance": variance,
    }
    if p.residual:
        inputs["residual"] = _images(p, normal(*size))
    return inputs


def empty_batch_norm(problem: BatchNormProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.height, p.width), device)


def batch_norm(problem: BatchNormProblem, inputs: Tensors) -> torch.Tensor:
    """The normalised x by PyTorch, in the dtype of the inputs."""
    y = F.batch_norm(
        inputs["x"], inputs["mean"], inputs["variance"], inputs["weight"], inputs["bias"],
        training=False, eps=problem.epsilon,
    )  # fmt: skip
    if problem.residual:
        y = y.add_(inputs["residual"])
    return y.relu_() if problem.relu else y


def random_statistics(
    problem: BatchStatisticsProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Channels that differ in mean and deviation."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    means = torch.randn(p.channels, generator=generator, device=device).mul_(3)
    deviations = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    x = torch.randn((p.batch, p.channels, p.height, p.width), generator=generator, device=device)
    return {"x": _images(p, x.mul_(deviations.view(1, -1, 1, 1)).add_(means.view(1, -1, 1, 1)))}


def empty_statistics(problem: BatchStatisticsProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((2, problem.channels), dtype=torch.float32, device=device)


def statistics(x: torch.Tensor) -> torch.Tensor:
    """Means and variances by PyTorch, in the dtype of x."""
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return torch.stack((mean, variance))


def peer_statistics(problem: BatchStatisticsProblem, inputs: Tensors) -> torch.Tensor:
    """Means and variances as PyTorch's own batch_norm finds them while it trains: sums in fp32, whatever x is stored
    as."""
    x = inputs["x"]
    if not x.is_cuda:
        return statistics(x.float())
    epsilon = 1e-5
    mean, inverse_deviation = torch.batch_norm_stats(x, epsilon)
    return torch.stack((mean, inverse_deviation.pow(-2) - epsilon))
