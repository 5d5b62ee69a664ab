"""Gradients by autograd of the forward reference: inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.mlp import reference as forward
from escalade.ops.mlp_backward.problem import MlpBackwardProblem

Tensors = Mapping[str, torch.Tensor]


def random_inputs(problem: MlpBackwardProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    inputs = dict(forward.random_inputs(problem.forward, device, seed))
    generator = torch.Generator(device=device).manual_seed(seed + 1)
    gradient = torch.randn((problem.batch, problem.outputs), generator=generator, device=device)
    inputs["grad_y"] = gradient.to(STORAGE[problem.dtype])
    return inputs


def empty_output(problem: MlpBackwardProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.result_elements, dtype=torch.float32, device=device)


def compute(problem: MlpBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """Return the gradients by autograd in the dtype of the inputs, concatenated in at least fp32."""
    wanted = [*problem.sizes, *(("x",) if problem.input_gradient else ())]
    with torch.enable_grad():
        leaves = {
            name: tensor.detach().requires_grad_(name in wanted)
            for name, tensor in inputs.items()
            if name != "grad_y"
        }
        y = forward.compute(problem.forward, leaves)
        gradients = torch.autograd.grad(y, [leaves[name] for name in wanted], inputs["grad_y"])
    wide = torch.promote_types(inputs["x"].dtype, torch.float32)
    return torch.cat([gradient.to(wide).flatten() for gradient in gradients])


def exact(problem: MlpBackwardProblem, inputs: Tensors) -> torch.Tensor:
    return compute(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: MlpBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype. Some CPUs accumulate 16-bit products in 16 bits: there it is
    fp32, rounded at the end."""
    if inputs["x"].is_cuda:
        return compute(problem, inputs)
    wide = compute(problem, {name: tensor.float() for name, tensor in inputs.items()})
    return wide.to(STORAGE[problem.dtype]).float()
