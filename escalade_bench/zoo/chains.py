"""Convolutions followed by one to five other operators, as in benchmarks of fusion, generated from a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Sizes = tuple[int, ...]
Function = Callable[[torch.Tensor], torch.Tensor]


class Applied(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


class Scaled(nn.Module):
    """Learned factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Shifted(nn.Module):
    """Learned bias per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


class Residual(nn.Module):
    """Layers with a skip connection around them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class Start:
    """A convolution on images of one size."""

    made: Callable[[], nn.Module]
    channels: int
    example_shape: Sizes


def _start(
    inputs: int, channels: int, size: int, side: int, kind: type[nn.Module] = nn.Conv2d, **options: int
) -> Start:
    return Start(partial(kind, inputs, channels, size, **options), channels, (inputs, side, side))


def _applied(function: Function, channels: int) -> nn.Module:
    return Applied(function)


def _softplus_tanh(x: torch.Tensor) -> torch.Tensor:
    return x * torch.tanh(F.softplus(x))


_STARTS: Mapping[str, Start] = {
    "conv_3to16": _start(3, 16, 3, 256),
    "conv_3to32_stride2": _start(3, 32, 3, 256, stride=2, padding=1),
    "conv_3to64_7x7_stride2": _start(3, 64, 7, 512, stride=2, padding=3),
    "conv_8to64": _start(8, 64, 3, 128),
    "conv_16to16": _start(16, 16, 3, 128, padding=1),
    "conv_16to64_1x1": _start(16, 64, 1, 128),
    "conv_16to32_4x4_stride2": _start(16, 32, 4, 256, stride=2, padding=1),
    "conv_32to64_5x5": _start(32, 64, 5, 128, padding=2),
    "conv_64to128": _start(64, 128, 3, 128),
    "transposed_3to16": _start(3, 16, 3, 256, nn.ConvTranspose2d, padding=1),
    "transposed_64to64": _start(64, 64, 3, 128, nn.ConvTranspose2d),
    "transposed_32to16_4x4_stride2": _start(32, 16, 4, 128, nn.ConvTranspose2d, stride=2, padding=1),
    "transposed_64to32_stride2": _start(
        64, 32, 3, 128, nn.ConvTranspose2d, stride=2, padding=1, output_padding=1
    ),
}
"""First layers of chains, by the beginning of the chain's name."""
_FUNCTIONS: Mapping[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "add": (torch.add, {"other": 0.3}),
    "subtract": (torch.sub, {"other": 0.5}),
    "multiply": (torch.mul, {"other": 2.0}),
    "divide": (torch.div, {"other": 1.5}),
    "minimum": (torch.clamp, {"max": 0.5}),
    "maximum": (torch.clamp, {"min": -0.25}),
    "clamp": (torch.clamp, {"min": 0.0, "max": 1.0}),
    "tanh": (torch.tanh, {}),
    "sigmoid": (torch.sigmoid, {}),
    "relu": (F.relu, {}),
    "leaky_relu": (F.leaky_relu, {"negative_slope": 0.2}),
    "gelu": (F.gelu, {}),
    "silu": (F.silu, {}),
    "mish": (F.mish, {}),
    "softplus_tanh": (_softplus_tanh, {}),
    "hardswish": (F.hardswish, {}),
    "hardtanh": (F.hardtanh, {}),
    "softmax": (torch.softmax, {"dim": 1}),
    "logsumexp": (torch.logsumexp, {"dim": 1, "keepdim": True}),
    "min_channels": (torch.amin, {"dim": 1, "keepdim": True}),
    "max_channels": (torch.amax, {"dim": 1, "keepdim": True}),
    "mean_channels": (torch.mean, {"dim": 1, "keepdim": True}),
    "sum_channels": (torch.sum, {"dim": 1, "keepdim": True}),
    "mean_pixels": (torch.mean, {"dim": (2, 3), "keepdim": True}),
    "max_pixels": (torch.amax, {"dim": (2, 3), "keepdim": True}),
    "sum_pixels": (torch.sum, {"dim": (2, 3), "keepdim": True}),
    "sum_rows": (torch.sum, {"dim": 2, "keepdim": True}),
    "sum_all": (torch.sum, {"dim": (1, 2, 3)}),
    "avg_pool": (F.avg_pool2d, {"kernel_size": 2}),
    "max_pool": (F.max_pool2d, {"kernel_size": 2}),
    "pixel_shuffle": (F.pixel_shuffle, {"upscale_factor": 2}),
    "upsample": (F.interpolate, {"scale_factor": 2}),
}
_OPERATORS: Mapping[str, Callable[[int], nn.Module]] = {
    **{name: partial(_applied, partial(made, **options)) for name, (made, options) in _FUNCTIONS.items()},
    "scale": Scaled,
    "bias": Shifted,
    "batch_norm": nn.BatchNorm2d,
    "instance_norm": nn.InstanceNorm2d,
    "group_norm": partial(nn.GroupNorm, 8),
    "layer_norm": ChannelLayerNorm,
}
"""Constructors of operators by name, for a number of channels."""
_TAILS: Mapping[str, tuple[str, ...]] = {
    "conv_3to16": (
        "relu bias", "mish mish", "hardswish relu", "scale min_channels", "subtract tanh subtract avg_pool",
        "batch_norm multiply", "min_channels tanh tanh", "softmax max_pool max_pool",
    ),
    "conv_3to32_stride2": (
        "batch_norm hardswish", "batch_norm relu max_pool", "gelu layer_norm", "instance_norm relu upsample",
    ),
    "conv_3to64_7x7_stride2": ("batch_norm relu max_pool", "instance_norm leaky_relu max_pool"),
    "conv_8to64": (
        "multiply leaky_relu gelu", "avg_pool sigmoid sum_all", "gelu mean_pixels", "divide leaky_relu",
        "group_norm tanh hardswish skip logsumexp", "subtract subtract mish", "softplus_tanh batch_norm",
        "tanh multiply bias max_pool", "group_norm scale max_pool clamp", "add scale sigmoid group_norm",
        "logsumexp mish", "pixel_shuffle leaky_relu", "mean_channels sigmoid", "layer_norm gelu divide",
    ),
    "conv_16to16": (
        "instance_norm divide", "residual relu", "batch_norm residual relu", "mish residual",
        "group_norm silu residual", "hardtanh residual avg_pool", "upsample tanh",
    ),
    "conv_16to64_1x1": (
        "gelu multiply", "batch_norm hardswish max_pixels", "softmax multiply", "minimum add multiply",
    ),
    "conv_16to32_4x4_stride2": (
        "leaky_relu", "instance_norm leaky_relu", "batch_norm leaky_relu sigmoid", "max_channels subtract tanh",
    ),
    "conv_32to64_5x5": (
        "relu max_pool", "subtract hardswish max_pool mish", "maximum clamp divide", "sum_channels gelu",
    ),
    "conv_64to128": (
        "relu bias", "minimum bias multiply", "subtract hardswish max_pool mish", "batch_norm silu avg_pool",
        "group_norm gelu mean_pixels", "softmax sum_pixels",
    ),
    "transposed_3to16": ("tanh multiply", "relu batch_norm hardtanh"),
    "transposed_64to64": (
        "bias clamp multiply clamp divide", "mish add hardtanh multiply", "min_channels sum_rows gelu add",
        "batch_norm tanh max_pool group_norm", "mean_pixels bias logsumexp sum_all multiply",
        "max_pool hardtanh mean_pixels tanh",
    ),
    "transposed_32to16_4x4_stride2": (
        "subtract tanh", "gelu group_norm", "softmax bias multiply sigmoid", "add minimum gelu multiply",
        "instance_norm relu tanh", "batch_norm leaky_relu",
    ),
    "transposed_64to32_stride2": (
        "bias clamp multiply clamp divide", "multiply mean_pixels mean_pixels", "batch_norm relu",
        "instance_norm relu", "group_norm hardswish max_pool", "logsumexp sigmoid",
    ),
}  # fmt: skip
"""Names of `_OPERATORS` after each first layer; `skip` adds the first layer's result, `residual` the input."""


def _chain(start: Start, tail: Sequence[str]) -> nn.Module:
    made, channels = [start.made()], start.channels
    for name in tail:
        if name == "residual":
            made = [Residual(*made)]
        elif name == "skip":
            made = [made[0], Residual(*made[1:])]
        else:
            made.append(_OPERATORS[name](channels))
            channels = channels // 4 if name == "pixel_shuffle" else channels
    return nn.Sequential(*made)


CONV_CHAINS: Mapping[str, tuple[Callable[[], nn.Module], Sizes]] = {
    "_".join((name, *tail.split())): (partial(_chain, start, tail.split()), start.example_shape)
    for name, start in _STARTS.items()
    for tail in _TAILS[name]
}
"""Constructors, and the shape of one item, by a name that lists the operators."""
