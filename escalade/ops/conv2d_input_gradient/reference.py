"""Input gradient in PyTorch: random inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from escalade.ops.base.draw import Draw
from escalade.ops.base.switches import precision, round_to_tf32
from escalade.ops.batch_norm_backward import gradients, masked
from escalade.ops.batch_norm_backward import random_inputs as random_normalization
from escalade.ops.conv2d.reference import frames_backward
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.shared import activation
from escalade.ops.shared.images import MEMORY_FORMAT, empty_images

Tensors = Mapping[str, torch.Tensor]


def random_inputs(problem: Conv2dInputGradientProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return normal deviates, weights scaled to keep results of order one."""
    p, f = problem, problem.forward
    normal = partial(draw.stored, p)
    inputs = {
        "gradient": normal(f.output_images, f.filters, f.output_height, f.output_width),
        "weight": normal(f.filters, f.group_channels, f.weight_rows, f.filter_width, scale=p.depth**-0.5),
    }
    if f.bias:
        inputs["bias"] = normal(f.channels, scale=0.5)
    if p.aux:
        inputs[p.aux] = normal(f.images, f.channels, f.height, f.width)
    if p.normalization is not None:
        norm = random_normalization(p.normalization, draw.next)
        inputs |= {f"norm_{name}": value for name, value in norm.items() if name != "gradient"}
    return inputs


def empty_output(problem: Conv2dInputGradientProblem, device: torch.device) -> torch.Tensor:
    f = problem.forward
    return empty_images(problem, (f.images, f.channels, f.height, f.width), device)


def _convolve_back(
    problem: Conv2dInputGradientProblem, gradient: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Return PyTorch's gradient in the dtype of the inputs; it only needs the shape and layout of x."""
    f = problem.forward
    if f.has_frames:
        of_x = frames_backward(f, gradient, None, weight, (True, False, False))[0]
        assert of_x is not None
        return of_x
    x = torch.empty(
        (f.batch, f.channels, f.height, f.width),
        dtype=gradient.dtype, device=gradient.device, memory_format=MEMORY_FORMAT[problem.layout],
    )  # fmt: skip
    return torch.ops.aten.convolution_backward(
        gradient, x, weight, None, f.stride, f.padding, f.dilation, False, [0, 0], f.groups, [True, False, False]
    )[0]  # fmt: skip


def _finish(problem: Conv2dInputGradientProblem, dx: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    if "mask" in inputs:
        return torch.ops.aten.threshold_backward(dx, inputs["mask"], 0)
    if "residual" in inputs:
        dx = dx + inputs["residual"].to(dx.dtype)
    if problem.normalization is not None:
        return masked(problem.normalization, _normalized(inputs, dx))
    if "bias" in inputs:
        dx = dx + inputs["bias"].to(dx.dtype).view(-1, 1, 1)
    return activation.apply(problem.forward, dx)


def exact(problem: Conv2dInputGradientProblem, inputs: Tensors) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return _finish(problem, _convolve_back(problem, wide["gradient"], wide["weight"]), wide)


def _normalized(inputs: Tensors, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the inputs of the normalization's gradients."""
    own = {name.removeprefix("norm_"): value for name, value in inputs.items() if name.startswith("norm_")}
    return {**own, "gradient": gradient}


def extra_outputs(problem: Conv2dInputGradientProblem, device: torch.device) -> dict[str, torch.Tensor]:
    names = ("weight_gradient", "bias_gradient") if problem.norm else ()
    return {name: torch.empty(problem.forward.channels, device=device) for name in names}


def extra_references(problem: Conv2dInputGradientProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
    if problem.normalization is None:
        return {}
    dx = exact(problem, inputs)
    _, weight_gradient, bias_gradient = gradients(problem.normalization, _normalized(inputs, dx))
    return {"weight_gradient": weight_gradient, "bias_gradient": bias_gradient}


def peer(problem: Conv2dInputGradientProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, with fp32 accumulation as on a GPU.

    The CPU has no TF32, so operands are rounded here, and some CPUs accumulate 16-bit products in 16 bits.
    """
    gradient, weight = inputs["gradient"], inputs["weight"]
    if gradient.is_cuda:
        with precision(problem.dtype, algorithms=0):
            return _finish(problem, _convolve_back(problem, gradient, weight), inputs)
    if problem.dtype == "tf32":
        dx = _convolve_back(problem, round_to_tf32(gradient), round_to_tf32(weight))
    else:
        dx = _convolve_back(problem, gradient.float(), weight.float())
    return _finish(problem, dx, inputs).to(gradient.dtype)
