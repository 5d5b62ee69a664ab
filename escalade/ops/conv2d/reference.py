"""Convolution in PyTorch: random inputs, the float64 reference, and the peer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import STORAGE, stored_as
from escalade.ops.base.switches import round_to_tf32, with_cudnn
from escalade.ops.batch_statistics import for_training, running_statistics
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.max_pool2d import MaxPool2dProblem
from escalade.ops.max_pool2d import extra_outputs as max_pool2d_extra_outputs
from escalade.ops.max_pool2d import extra_references as max_pool2d_extra_references
from escalade.ops.max_pool2d import peer as max_pool2d_peer
from escalade.ops.shared import activation, prologue
from escalade.ops.shared.images import MEMORY_FORMAT, as_images, as_volumes

INT8_SPREAD = 40.0
"""Standard deviation of random integers: a few of them saturate."""


def random_inputs(problem: Conv2dProblem, draw: Draw) -> dict[str, torch.Tensor]:
    """Return normal deviates, weights scaled to keep outputs of order one; in 8 bits `scale` does that instead.

    Problems with `places` get small integers: sums are then exact in any order, so the argmax does not depend on
    rounding.
    """
    p = problem
    spread = INT8_SPREAD if p.dtype == "int8" else 1.0

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        values = draw.normal(*size)
        values = values.round_().clamp_(-2, 2) if p.places else values.mul_(scale)
        values = stored_as(values * spread if len(size) == 4 else values, STORAGE[p.dtype])
        return values.contiguous(memory_format=MEMORY_FORMAT[p.layout]) if len(size) == 4 else values

    scaled = p.is_quantized
    scale = 1.0 if scaled else p.depth**-0.5
    inputs = {
        "x": normal(p.images, p.channels, p.height, p.width),
        "weight": normal(p.filters, p.group_channels, p.weight_rows, p.filter_width, scale=scale),
    }
    if p.shortcut_channels:
        inputs["shortcut"] = normal(p.batch, p.shortcut_channels, *p.shortcut_size)
        inputs["shortcut_weight"] = normal(p.filters, p.shortcut_channels, 1, 1, scale=scale)
    if p.bias:
        inputs["bias"] = normal(p.filters).float() if scaled else normal(p.filters)
    inputs |= prologue.random_operands(p, draw)
    inputs |= {name: normal(p.filters).float() for name in activation.vectors_of(p.activation)}
    if p.residual:
        inputs["residual"] = normal(p.output_images, p.filters, p.output_height, p.output_width)
    if p.statistics:
        inputs |= running_statistics(p.statistics, draw)
    if scaled:
        factor = draw.uniform(p.filters).add_(0.5)
        inputs["scale"] = factor * p.depth**-0.5 / spread**2
        inputs["scales"] = torch.tensor(
            [0.75 / spread, 5.0 if p.dtype == "fp8" else spread], device=draw.device
        )
    return inputs


def empty_output(problem: Conv2dProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return torch.empty(
        (p.output_images, p.filters, *p.result_size),
        dtype=STORAGE[p.stored], device=device, memory_format=MEMORY_FORMAT[p.layout],
    )  # fmt: skip


def compute(problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return prologue, convolution, epilogue and pool in the dtype of the inputs."""
    return pooled(problem, _multiply(problem, prologue.apply(problem.prologue, inputs)))


def pooled(problem: Conv2dProblem, y: torch.Tensor) -> torch.Tensor:
    """Pool y if the problem has a pool."""
    if problem.mean:
        return F.avg_pool2d(y, problem.pool)
    return max_pool2d_peer(_pool_of(problem), {"x": y}) if problem.pools else y


def _multiply(problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return _finish(problem, _convolve(problem, inputs), inputs)


def _convolve(problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the terms of the sum: the convolution, and the one of the shortcut."""
    p = problem
    if p.has_frames:
        bias = None if p.is_quantized else inputs.get("bias")
        return [convolve_frames(p, inputs["x"], inputs["weight"], bias)]
    convolved = [
        F.conv2d(
            inputs["x"], inputs["weight"], None if p.is_quantized else inputs.get("bias"), p.stride, p.padding,
            p.dilation, p.groups,
        )
    ]  # fmt: skip
    if p.shortcut_channels:
        convolved.append(F.conv2d(inputs["shortcut"], inputs["shortcut_weight"], stride=p.shortcut_stride))
    return convolved


def convolve_frames(
    problem: Conv2dProblem, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return PyTorch's convolution of volumes, of which x and the result have the frames as images."""
    p = problem
    y = F.conv3d(
        as_volumes(x, p.frames),
        weight.unflatten(2, (p.filter_frames, -1)),
        bias,
        *_frame_windows(p),
        p.groups,
    )
    return as_images(y)


def frames_backward(
    problem: Conv2dProblem,
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return PyTorch's gradients by x, the weights and the bias of a convolution of volumes.

    That of x needs the weights, and that of the weights x; of the other only the shape matters.
    """
    p = problem
    if x is None:
        x = gradient.new_empty((p.images, p.channels, p.height, p.width))
    if weight is None:
        weight = gradient.new_empty((p.filters, p.group_channels, p.weight_rows, p.filter_width))
    of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(
        as_volumes(gradient, p.output_frames), as_volumes(x, p.frames), weight.unflatten(2, (p.filter_frames, -1)),
        [p.filters] if wanted[2] else None, *_frame_windows(p), False, [0, 0, 0], p.groups, wanted,
    )  # fmt: skip
    return (
        None if of_x is None else as_images(of_x),
        None if of_weight is None else of_weight.flatten(2, 3),
        of_bias,
    )


def _frame_windows(
    problem: Conv2dProblem,
) -> tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]:
    """Return stride, padding and dilation of frames, rows and columns."""
    p = problem
    return (p.frame_stride, *p.stride), (p.frame_padding, *p.padding), (p.frame_dilation, *p.dilation)


def _finish(
    problem: Conv2dProblem, terms: list[torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    if problem.is_quantized:
        return _finish_scaled(problem, terms, inputs)
    y, *others = terms
    for other in others:
        y = y + other
    return activation.apply(problem, y, inputs["residual"] if problem.residual else None, inputs)


def _finish_scaled(
    problem: Conv2dProblem, terms: list[torch.Tensor], inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    y = sum(terms[1:], terms[0]) * inputs["scale"].view(-1, 1, 1)
    if problem.bias:
        y = y + inputs["bias"].view(-1, 1, 1)
    residual = inputs["residual"] * inputs["scales"][0] if problem.residual else None
    return activation.apply(problem, y, residual, inputs) * inputs["scales"][1]


def exact(problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    y = compute(problem, {name: tensor.double() for name, tensor in inputs.items()})
    return y.clamp(-128, 127) if problem.stored == "int8" else y  # integers saturate


def peer(problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return PyTorch's result in the problem's dtype, with fp32 accumulation as on a GPU.

    The CPU has no TF32, so operands are rounded here, and some CPUs accumulate 16-bit products in 16 bits. PyTorch
    has no FP8 convolution anywhere: it is computed in fp32 and rounded; so is INT8, with sums in float64.
    """
    y = _compute_as_peer(problem, inputs)
    return stored_as(y, STORAGE[problem.stored])


def _compute_as_peer(problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if problem.dtype == "int8":
        return compute(problem, {name: tensor.double() for name, tensor in inputs.items()}).float()
    if problem.dtype == "fp8":
        wide = {name: tensor.float() for name, tensor in inputs.items()}
        return with_cudnn("fp32", lambda: compute(problem, wide))
    if inputs["x"].is_cuda:
        return with_cudnn(problem.dtype, lambda: compute(problem, inputs))
    inputs = prologue.apply(problem.prologue, inputs)
    if problem.dtype == "tf32":
        factors = ("x", "weight", "shortcut", "shortcut_weight")
        rounded = {name: round_to_tf32(inputs[name]) for name in factors if name in inputs}
        return pooled(problem, _multiply(problem, {**inputs, **rounded}))
    wide = {name: tensor.float() for name, tensor in inputs.items()}
    terms = [term.to(STORAGE[problem.dtype]) for term in _convolve(problem, wide)]
    return pooled(problem, _finish(problem, terms, inputs))


def extra_outputs(problem: Conv2dProblem, device: torch.device) -> dict[str, torch.Tensor]:
    if problem.statistics:
        names = ("variance", *problem.statistics.for_training)
        return {name: torch.empty(problem.filters, device=device) for name in names}
    return max_pool2d_extra_outputs(_pool_of(problem), device) if problem.pools else {}


def extra_references(problem: Conv2dProblem, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if not problem.places and not problem.statistics:
        return {}
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    y = _multiply(problem, prologue.apply(problem.prologue, wide))
    if problem.statistics:
        found = for_training(problem.statistics, {**inputs, "x": y})
        return {"variance": y.var((0, 2, 3), correction=0), **found}
    return max_pool2d_extra_references(_pool_of(problem), {"x": y})


def _pool_of(p: Conv2dProblem) -> MaxPool2dProblem:
    """Return the pool as its own problem."""
    return MaxPool2dProblem(
        p.batch, p.filters, p.output_height, p.output_width, p.pool, p.pool, layout=p.layout,
        places=p.places, behind_relu=p.places and p.relu,
    )  # fmt: skip
