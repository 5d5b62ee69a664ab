"""Weight gradient in PyTorch: random inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.base.switches import round_to_tf32, with_cudnn
from escalade.ops.conv2d.reference import frames_backward
from escalade.ops.conv2d_weight_gradient.problem import Conv2dWeightGradientProblem
from escalade.ops.shared.images import MEMORY_FORMAT, empty_images, layout_of

Tensors = Mapping[str, torch.Tensor]


def random_inputs(problem: Conv2dWeightGradientProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return normal deviates, the gradient scaled to keep results of order one."""
    f = problem.forward
    size, scale = (
        (f.output_images, f.filters, f.output_height, f.output_width),
        max(1, f.output_pixels) ** -0.5,
    )
    x = draw.stored(problem, f.images, f.channels, f.height, f.width)
    return {"x": x, "gradient": draw.stored(problem, *size, scale=scale)}


def empty_output(problem: Conv2dWeightGradientProblem, device: torch.device) -> torch.Tensor:
    f = problem.forward
    return empty_images(problem, (f.filters, f.group_channels, f.weight_rows, f.filter_width), device)


def extra_outputs(problem: Conv2dWeightGradientProblem, device: torch.device) -> dict[str, torch.Tensor]:
    if not problem.bias:
        return {}
    return {
        "bias_gradient": torch.empty(problem.forward.filters, dtype=STORAGE[problem.dtype], device=device)
    }


def extra_references(problem: Conv2dWeightGradientProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
    return {"bias_gradient": inputs["gradient"].double().sum((0, 2, 3))} if problem.bias else {}


def compute(
    problem: Conv2dWeightGradientProblem, inputs: Tensors
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of weights and bias in the dtype of the inputs."""
    f, x = problem.forward, inputs["x"]
    if f.has_frames:
        _, of_weight, of_bias = frames_backward(f, inputs["gradient"], x, None, (False, True, f.bias))
        assert of_weight is not None
        return of_weight, of_bias
    weight = torch.empty(  # only its size is read
        (f.filters, f.group_channels, f.filter_height, f.filter_width),
        dtype=x.dtype, device=x.device, memory_format=MEMORY_FORMAT[layout_of(x)],
    )  # fmt: skip
    _, of_weight, of_bias = torch.ops.aten.convolution_backward(
        inputs["gradient"], x, weight, [f.filters] if f.bias else None, f.stride, f.padding, f.dilation, False,
        [0, 0], f.groups, [False, True, f.bias],
    )  # fmt: skip
    return of_weight, of_bias


def exact(problem: Conv2dWeightGradientProblem, inputs: Tensors) -> torch.Tensor:
    return compute(problem, {name: tensor.double() for name, tensor in inputs.items()})[0]


def peer(problem: Conv2dWeightGradientProblem, inputs: Tensors) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype. The CPU has no TF32, and some CPUs accumulate 16-bit products in
    16 bits: there it is fp32 with rounded operands."""
    if inputs["x"].is_cuda:
        return with_cudnn(problem.dtype, lambda: compute(problem, inputs)[0])
    rounded = round_to_tf32 if problem.dtype == "tf32" else torch.Tensor.float
    wide = compute(problem, {name: rounded(tensor) for name, tensor in inputs.items()})[0]
    return wide.to(STORAGE[problem.dtype])
