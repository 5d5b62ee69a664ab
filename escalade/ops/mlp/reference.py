"""Perceptron in PyTorch: random inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.base.switches import precision
from escalade.ops.mlp.problem import Layer, MlpProblem

Tensors = Mapping[str, torch.Tensor]
Round = Callable[[torch.Tensor], torch.Tensor]

ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def random_inputs(problem: MlpProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Return normal deviates, weights scaled to keep every layer's result of order one."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(size: tuple[int, ...], scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        values = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(scale).add_(mean).to(STORAGE[problem.dtype])

    inputs = {"x": normal((problem.batch, problem.features))}
    for number, layer in enumerate(problem.layers):
        spread = {"weight": layer.features**-0.5, "bias": 0.5, "norm_weight": 0.2, "norm_bias": 0.2}
        for parameter in layer.parameters:
            mean = 1.0 if parameter == "norm_weight" else 0.0
            inputs[f"{parameter}{number}"] = normal(layer.size(parameter), spread[parameter], mean)
    return inputs


def empty_output(problem: MlpProblem, device: torch.device) -> torch.Tensor:
    if problem.output == "error":
        return torch.empty(problem.batch, dtype=torch.float32, device=device)
    return torch.empty((problem.batch, problem.outputs), dtype=STORAGE[problem.dtype], device=device)


def compute(problem: MlpProblem, inputs: Tensors, rounded: Round = lambda x: x) -> torch.Tensor:
    """Return the chain in the dtype of the inputs; `rounded` is applied to every intermediate result."""
    y = inputs["x"]
    for number, layer in enumerate(problem.layers):
        y = _layer(layer, number, y.reshape(-1, layer.features), inputs, rounded)
    return y.reshape(problem.batch, -1)


def _layer(layer: Layer, number: int, x: torch.Tensor, inputs: Tensors, rounded: Round) -> torch.Tensor:
    if layer.norm:
        scale, shift = inputs[f"norm_weight{number}"], inputs[f"norm_bias{number}"]
        x = rounded(F.layer_norm(x, (layer.features,), scale, shift, layer.epsilon))
    y = rounded(F.linear(x, inputs[f"weight{number}"], inputs.get(f"bias{number}")))
    return y if layer.activation == "none" else rounded(ACTIVATE[layer.activation](y))


def _finish(problem: MlpProblem, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (y - x).square().mean(1) if problem.output == "error" else y


def exact(problem: MlpProblem, inputs: Tensors) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return _finish(problem, wide["x"], compute(problem, wide))


def peer(problem: MlpProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, one operator at a time, with fp32 accumulation as on a GPU.

    Some CPUs accumulate 16-bit products in 16 bits, so the CPU rounds fp32 results. The error is computed in fp32.
    """
    if inputs["x"].is_cuda:
        with precision(problem.dtype):
            y = compute(problem, inputs)
    else:
        wide = {name: tensor.float() for name, tensor in inputs.items()}
        y = compute(problem, wide, lambda result: result.to(STORAGE[problem.dtype]).float())
    if problem.output == "error":
        return _finish(problem, inputs["x"].float(), y.float())
    return y.to(STORAGE[problem.dtype])
