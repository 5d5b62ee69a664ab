"""What the statistics of a batch are: the one reference, and PyTorch's own answer to be compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.batch_statistics.problem import BatchStatisticsProblem
from escalade.ops.shared.images import stored_images

Tensors = Mapping[str, torch.Tensor]


def random_inputs(
    problem: BatchStatisticsProblem, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    """Channels that differ in mean and deviation."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    means = torch.randn(p.channels, generator=generator, device=device).mul_(3)
    deviations = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    x = torch.randn((p.batch, p.channels, p.height, p.width), generator=generator, device=device)
    inputs = {"x": stored_images(p, x.mul_(deviations.view(1, -1, 1, 1)).add_(means.view(1, -1, 1, 1)))}
    if p.momentum is not None:
        inputs["running_mean"] = torch.randn(p.channels, generator=generator, device=device)
        inputs["running_variance"] = torch.rand(p.channels, generator=generator, device=device).add_(0.5)
    return inputs


def empty_output(problem: BatchStatisticsProblem, device: torch.device) -> torch.Tensor:
    return torch.empty((2, problem.channels), dtype=torch.float32, device=device)


def _statistics(x: torch.Tensor) -> torch.Tensor:
    """Means and variances by PyTorch, in the dtype of x."""
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    return torch.stack((mean, variance))


def peer(problem: BatchStatisticsProblem, inputs: Tensors) -> torch.Tensor:
    """Means and variances as PyTorch's own batch_norm finds them while it trains: sums in fp32, whatever x is stored
    as."""
    x = inputs["x"]
    if not x.is_cuda:
        return _statistics(x.float())
    epsilon = 1e-5
    mean, inverse_deviation = torch.batch_norm_stats(x, epsilon)
    return torch.stack((mean, inverse_deviation.pow(-2) - epsilon))


def exact(problem: BatchStatisticsProblem, inputs: Tensors) -> torch.Tensor:
    """The result in float64."""
    return _statistics(inputs["x"].double())


def for_training(problem: BatchStatisticsProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
    """What training wants besides, in float64."""
    mean, variance = exact(problem, inputs)
    found = {}
    if problem.epsilon is not None:
        found = {"mean": mean, "rstd": (variance + problem.epsilon).rsqrt()}
    if problem.momentum is not None:
        unbiased = variance * problem.count / (problem.count - 1)
        for name, towards in (("mean", mean), ("variance", unbiased)):
            found[f"moved_{name}"] = torch.lerp(inputs[f"running_{name}"].double(), towards, problem.momentum)
    return found
