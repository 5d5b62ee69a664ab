"""Convolution of few channels in PyTorch: random inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.base.switches import round_to_tf32, with_cudnn
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.shared import activation
from escalade.ops.shared.images import MEMORY_FORMAT, empty_images


def random_inputs(problem: FewChannelsProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Return normal deviates or uint8 values, weights scaled to keep outputs of order one.

    Weights have three dimensions ([K, C, R * S]): their order does not depend on the layout.
    """
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale)

    size = (p.batch, p.channels, p.height, p.width)
    if p.x_type == "uint8":
        x = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
    else:
        x = normal(*size).to(STORAGE[p.x_type])
    storage = STORAGE[p.storage]
    spread = 75.0 if p.x_type == "uint8" else 1.0
    scale = (p.channels * p.taps) ** -0.5 / spread
    inputs = {
        "x": x.contiguous(memory_format=MEMORY_FORMAT[p.layout]),
        "weight": normal(p.filters, p.channels, p.taps, scale=scale).to(storage),
    }
    if p.bias:
        inputs["bias"] = normal(p.filters).to(storage)
    return inputs


def empty_output(problem: FewChannelsProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.filters, p.output_height, p.output_width), device)


def _convolve(
    problem: FewChannelsProblem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    p = problem
    shaped = weight.reshape(p.filters, p.channels, p.filter_height, p.filter_width)
    if p.layout == "nhwc":
        x, shaped = _channels_last(x), _channels_last(shaped)
    return F.conv2d(x, shaped, bias, padding=p.padding)


def _channels_last(images: torch.Tensor) -> torch.Tensor:
    """Return images with channels_last strides even for one channel, where PyTorch cannot tell the layouts apart."""
    _, channels, height, width = images.shape
    laid_out = images.contiguous(memory_format=torch.channels_last)
    return laid_out.as_strided(images.shape, (channels * height * width, 1, channels * width, channels))


def _finish(problem: FewChannelsProblem, y: torch.Tensor) -> torch.Tensor:
    p = problem
    y = activation.apply(p, y)
    return F.max_pool2d(y, p.pool, ceil_mode=p.ceil_mode) if p.pool > 1 else y


def exact(problem: FewChannelsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    return _finish(problem, _convolve(problem, wide["x"], wide["weight"], wide.get("bias")))


def peer(problem: FewChannelsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, with fp32 accumulation as on a GPU."""
    storage = STORAGE[problem.storage]
    x, weight, bias = inputs["x"].to(storage), inputs["weight"], inputs.get("bias")
    if x.is_cuda:
        return _finish(problem, with_cudnn(problem.dtype, lambda: _convolve(problem, x, weight, bias)))
    if problem.dtype == "tf32":
        x, weight = round_to_tf32(x), round_to_tf32(weight)
    y = _convolve(problem, x.float(), weight.float(), None if bias is None else bias.float())
    return _finish(problem, y.to(storage))
