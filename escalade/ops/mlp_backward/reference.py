"""What the gradients are: autograd of the forward reference, in float64, and PyTorch's own to be compared with."""

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
    """The gradients by autograd, in the dtype of the inputs; joined as the result is, in a dtype no narrower than
    fp32."""
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
    """The gradients in float64."""
    return compute(problem, {name: tensor.double() for name, tensor in inputs.items()})


def peer(problem: MlpBackwardProblem, inputs: Tensors) -> torch.Tensor:
    """PyTorch in the problem's dtype; on the CPU, where some processors sum 16-bit products in 16 bits, in fp32 and
    rounded at the end."""
    if inputs["x"].is_cuda:
        return compute(problem, inputs)
    wide = compute(problem, {name: tensor.float() for name, tensor in inputs.items()})
    return wide.to(STORAGE[problem.dtype]).float()
