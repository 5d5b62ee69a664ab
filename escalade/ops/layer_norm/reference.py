"""What a layer norm's result is: the one reference, and PyTorch's own answer to be compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.layer_norm.problem import LayerNormProblem
from escalade.ops.shared import activation


def random_inputs(problem: LayerNormProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Rows of normal deviates, each with a mean and a spread of its own."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator, device=device)

    rows, features = problem.rows, problem.features
    x = normal(rows, features) * (1 + normal(rows, 1).abs()) + normal(rows, 1)
    tensors = {"x": x if problem.inner == 1 else x.view(-1, problem.inner, features).mT.contiguous()}
    if problem.weight:
        tensors["weight"] = 1 + 0.3 * normal(features)
    if problem.bias:
        tensors["bias"] = 0.3 * normal(features)
    return {name: tensor.to(STORAGE[problem.dtype]) for name, tensor in tensors.items()}


def empty_output(problem: LayerNormProblem, device: torch.device) -> torch.Tensor:
    sizes: tuple[int, ...] = (problem.batch, problem.features)
    if problem.inner > 1:
        sizes = (problem.batch, problem.features, problem.inner)
    return torch.empty(sizes, dtype=STORAGE[problem.dtype], device=device)


def exact(problem: LayerNormProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The rows in float64."""
    return peer(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: LayerNormProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if problem.inner > 1:
        return peer(replace(problem, inner=1), {**inputs, "x": inputs["x"].mT}).mT
    x, weight, bias = inputs["x"], inputs.get("weight"), inputs.get("bias")
    if problem.rms:
        y = F.rms_norm(x, x.shape[-1:], weight, problem.epsilon)
        y = y if bias is None else y + bias
    else:
        y = F.layer_norm(x, x.shape[-1:], weight, bias, problem.epsilon)
    return activation.apply(problem, y)
