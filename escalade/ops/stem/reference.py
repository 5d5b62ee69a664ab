"""Stem in PyTorch: random inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.dtypes import STORAGE, stored_as
from escalade.ops.base.switches import round_to_tf32, with_cudnn
from escalade.ops.shared import activation
from escalade.ops.stem.problem import StemProblem


def random_inputs(problem: StemProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    """Return x and weights with three dimensions, in memory order; normalized pixels and outputs are of order one."""
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).mul_(scale)

    pixels = p.height * p.width
    size = (p.batch, p.channels, pixels) if p.source_layout == "nchw" else (p.batch, pixels, p.channels)
    if p.source == "uint8":
        x = torch.randint(0, 256, size, generator=generator, device=device, dtype=torch.uint8)
    else:
        x = normal(*size).to(STORAGE[p.source])
    storage = STORAGE[p.storage]
    spread = 75.0 if p.source == "uint8" and not p.normalise else 1.0
    length = p.channels * p.taps
    largest = 40.0 if p.output else 1.0  # of outputs: a few of them saturate in int8
    inputs = {
        "x": x,
        "weight": normal(p.filters, p.channels, p.taps, scale=largest * length**-0.5 / spread).to(storage),
        "bias": normal(p.filters, scale=largest).to(storage),
    }
    if p.normalise:
        unit = 1 / 75.0 if p.source == "uint8" else 1.0
        inputs["scale"] = (1 + 0.1 * normal(p.channels)) * unit
        inputs["shift"] = normal(p.channels) - (1.7 if p.source == "uint8" else 0.0)
    return inputs


def empty_output(problem: StemProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return torch.empty(
        (p.batch, p.filters, p.output_height, p.output_width),
        dtype=STORAGE[p.stored], device=device, memory_format=torch.channels_last,
    )  # fmt: skip


def _pixels(problem: StemProblem, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the image as [N, C, H, W], normalized, in `dtype`."""
    p = problem
    if p.source_layout == "nchw":
        x = inputs["x"].reshape(p.batch, p.channels, p.height, p.width)
    else:
        x = inputs["x"].reshape(p.batch, p.height, p.width, p.channels).permute(0, 3, 1, 2)
    x = x.to(dtype)
    if not p.normalise:
        return x
    return x * inputs["scale"].to(dtype)[:, None, None] + inputs["shift"].to(dtype)[:, None, None]


def _convolve(
    problem: StemProblem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    p = problem
    shaped = weight.reshape(p.filters, p.channels, p.filter_height, p.filter_width)
    return F.conv2d(x, shaped, bias, p.stride, p.padding)


def _finish(problem: StemProblem, y: torch.Tensor) -> torch.Tensor:
    y = activation.apply(problem, y)
    return F.max_pool2d(y, *problem.pool) if problem.pool else y


def exact(problem: StemProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    x = _pixels(problem, inputs, torch.float64)
    return _finish(problem, _convolve(problem, x, inputs["weight"].double(), inputs["bias"].double()))


def peer(problem: StemProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, with fp32 accumulation as on a GPU."""
    return stored_as(_computed(problem, inputs), STORAGE[problem.stored])


def _computed(problem: StemProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    storage = STORAGE[problem.storage]
    x, weight, bias = _pixels(problem, inputs, torch.float32).to(storage), inputs["weight"], inputs["bias"]
    if x.is_cuda:
        x = x.contiguous(memory_format=torch.channels_last)
        return _finish(problem, with_cudnn(problem.dtype, lambda: _convolve(problem, x, weight, bias)))
    if problem.dtype == "tf32":
        x, weight = round_to_tf32(x), round_to_tf32(weight)
    return _finish(problem, _convolve(problem, x.float(), weight.float(), bias.float()).to(storage))
