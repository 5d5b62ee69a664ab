"""Single layers and chains of them, generated from tables. Single layers take items of about 2^18 numbers.

Chains are convolutions followed by one to five other operators, as benchmarks of fusion have them.
`escalade bench coverage escalade_bench.zoo.layers -b 1,16,256` measures them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Sizes = tuple[int, ...]
_IMAGE: Sizes = (64, 64, 64)
"""Channels, height, width."""
_ROWS: Sizes = (64, 4096)
"""Rows and their features, or the channels and steps of a sequence."""
_CHANNELS = 64


@dataclass(frozen=True)
class Layer:
    """A constructor that says what it takes; without arguments it has its usual sizes."""

    make: Callable[..., nn.Module]
    example_shape: Sizes

    def __call__(self, *sizes: Any) -> nn.Module:
        return self.make(*sizes)


class Applied(nn.Module):
    """A function of the input, and of a parameter if there is one."""

    def __init__(self, function: Callable[..., torch.Tensor], parameter: torch.Tensor | None = None) -> None:
        super().__init__()
        self._function = function
        self.parameter = None if parameter is None else nn.Parameter(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x) if self.parameter is None else self._function(x, self.parameter)


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


class OverPixels(nn.Linear):
    """A linear layer over the channels of every pixel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    """Squeeze-and-excite: channels scaled by a gate computed from all channel means."""

    def __init__(self, channels: int = _CHANNELS, fewer: int = 4) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, channels // fewer, 1)
        self.up = nn.Conv2d(channels // fewer, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "add": (torch.add, {"other": 0.3}),
    "subtract": (torch.sub, {"other": 0.5}),
    "multiply": (torch.mul, {"other": 2.0}),
    "divide": (torch.div, {"other": 1.5}),
    "scaled": (torch.mul, {"other": 0.5}),
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
    "softplus_tanh": (lambda x: x * torch.tanh(F.softplus(x)), {}),
    "hardswish": (F.hardswish, {}),
    "hardtanh": (F.hardtanh, {}),
    "softmax": (torch.softmax, {"dim": 1}),
    "logsumexp": (torch.logsumexp, {"dim": 1, "keepdim": True}),
    "min": (torch.amin, {"dim": 1, "keepdim": True}),
    "min_channels": (torch.amin, {"dim": 1, "keepdim": True}),
    "max_channels": (torch.amax, {"dim": 1, "keepdim": True}),
    "mean_channels": (torch.mean, {"dim": 1, "keepdim": True}),
    "sum_channels": (torch.sum, {"dim": 1, "keepdim": True}),
    "mean_pixels": (torch.mean, {"dim": (2, 3), "keepdim": True}),
    "max_pixels": (torch.amax, {"dim": (2, 3), "keepdim": True}),
    "sum_pixels": (torch.sum, {"dim": (2, 3), "keepdim": True}),
    "sum_rows": (torch.sum, {"dim": 2, "keepdim": True}),
    "sum": (torch.sum, {"dim": -1}),
    "sum_all": (torch.sum, {"dim": (1, 2, 3)}),
    "avg_pool": (F.avg_pool2d, {"kernel_size": 2}),
    "max_pool": (F.max_pool2d, {"kernel_size": 2}),
    "global_avg_pool": (F.adaptive_avg_pool2d, {"output_size": 1}),
    "pixel_shuffle": (F.pixel_shuffle, {"upscale_factor": 2}),
    "upsample": (F.interpolate, {"scale_factor": 2}),
}


def _applied(function: Callable[..., Any], options: Mapping[str, Any], channels: int = 0) -> nn.Module:
    return Applied(partial(function, **options))


_OPERATORS: Mapping[str, Callable[[int], nn.Module]] = {
    **{name: partial(_applied, *function) for name, function in _FUNCTIONS.items()},
    "scale": lambda channels: Applied(torch.mul, torch.rand(channels, 1, 1) + 0.5),
    "bias": lambda channels: Applied(torch.add, torch.randn(channels, 1, 1)),
    "1x1": lambda channels: nn.Conv2d(channels, channels, 1),
    "batch_norm": nn.BatchNorm2d,
    "instance_norm": nn.InstanceNorm2d,
    "instance_norm_affine": partial(nn.InstanceNorm2d, affine=True),
    "group_norm": partial(nn.GroupNorm, 8),
    "layer_norm": ChannelLayerNorm,
}
"""Constructors of operators by name, for a number of channels."""


def _chain(first: Callable[[], nn.Module], channels: int, *tail: str) -> nn.Module:
    made = [first()]
    for name in tail:
        if name == "residual":
            made = [Residual(*made)]
        elif name == "skip":
            made = [made[0], Residual(*made[1:])]
        else:
            made.append(_OPERATORS[name](channels))
            channels = channels // 4 if name == "pixel_shuffle" else channels
    return made[0] if len(made) == 1 else nn.Sequential(*made)


def _on(shape: Sizes, made: Callable[..., nn.Module], *given: Any, **options: Any) -> Layer:
    return Layer(partial(made, *given, **options), shape)


_of = partial(_on, _IMAGE)
_of_rows = partial(_on, _ROWS)


def _function(function: Callable[..., Any], on: Sizes = _IMAGE, **options: Any) -> Layer:
    return _on(on, _applied, function, options)


def _depthwise(channels: int, size: int, side: int) -> Layer:
    shape = channels, side, side
    return _on(shape, nn.Conv2d, channels, channels, size, padding=size // 2, groups=channels)


_conv = partial(nn.Conv2d, _CHANNELS, _CHANNELS, 3, padding=1)
_transposed = partial(nn.ConvTranspose2d, _CHANNELS, _CHANNELS, 4, 2, 1)
_SINGLE: Mapping[str, Layer] = {
    "conv": _of(_conv),
    "conv_1x1": _of(nn.Conv2d, _CHANNELS, _CHANNELS, 1),
    "conv_1x1_odd": _on((50, 64, 82), nn.Conv2d, 50, 75, 1),
    "conv_1x1_80_a_group": _on((240, 33, 33), nn.Conv2d, 240, 240, 1, groups=3),
    "conv_grouped": _of(_conv, groups=4),
    "conv_few_channels": _on((3, 296, 296), nn.Conv2d, 3, 32, 3, padding=1),
    "conv1d": _of_rows(nn.Conv1d, 64, 64, 3, padding=1),
    "conv1d_transposed": _of_rows(nn.ConvTranspose1d, 64, 64, 4, 2, 1),
    "conv_transposed": _of(_transposed),
    "conv_transposed_3x3": _of(nn.ConvTranspose2d, _CHANNELS, 32, 3),
    "depthwise_3x3_56": _depthwise(128, 3, 56),
    "depthwise_7x7_56": _depthwise(128, 7, 56),
    "depthwise_3x3_14": _depthwise(1024, 3, 14),
    "depthwise_7x7_14": _depthwise(1024, 7, 14),
    "linear": _of_rows(nn.Linear, 4096, 1024),
    "linear_over_pixels": _of(OverPixels, _CHANNELS, _CHANNELS),
    "matmul": _of_rows(lambda: Applied(torch.matmul, torch.randn(4096, 1024) / 64)),
    "batch_norm": _of(nn.BatchNorm2d, _CHANNELS),
    "layer_norm_channels": _of(ChannelLayerNorm, _CHANNELS),
    "layer_norm": _of_rows(nn.LayerNorm, 4096),
    "layer_norm_image": _of(nn.LayerNorm, _IMAGE),
    "rms_norm": _of_rows(nn.RMSNorm, 4096),
    "group_norm": _of(nn.GroupNorm, 8, _CHANNELS),
    "instance_norm": _of(nn.InstanceNorm2d, _CHANNELS, affine=True),
    "local_response_norm": _of(nn.LocalResponseNorm, 5),
    "softmax": _function(torch.softmax, _ROWS, dim=-1),
    "softmax_channels": _function(torch.softmax, dim=1),
    "log_softmax": _function(torch.log_softmax, _ROWS, dim=-1),
    "avg_pool_2": _of(nn.AvgPool2d, 2),
    "avg_pool_3": _of(nn.AvgPool2d, 3, 2, 1),
    "max_pool_2": _of(nn.MaxPool2d, 2),
    "max_pool_3": _of(nn.MaxPool2d, 3, 2, 1),
    "max_pool1d": _of_rows(nn.MaxPool1d, 2),
    "adaptive_avg_pool": _of(nn.AdaptiveAvgPool2d, 7),
    "adaptive_max_pool": _of(nn.AdaptiveMaxPool2d, 7),
    "global_avg_pool": _of(nn.AdaptiveAvgPool2d, 1),
    "squeeze_excite": _of(SqueezeExcite),
    "nearest": _of(nn.Upsample, scale_factor=2),
    "bilinear": _of(nn.Upsample, scale_factor=2, mode="bilinear"),
    "bicubic": _of(nn.Upsample, scale_factor=2, mode="bicubic"),
    "pixel_shuffle": _of(nn.PixelShuffle, 2),
    "pad_zeros": _of(nn.ZeroPad2d, 2),
    "pad_reflect": _of(nn.ReflectionPad2d, 2),
    "pad_replicate": _of(nn.ReplicationPad2d, 2),
    "pad_circular": _of(nn.CircularPad2d, 2),
    "sum_rows": _function(torch.sum, _ROWS, dim=-1),
    "sum_channels": _function(torch.sum, dim=1),
    "mean_image": _function(torch.mean, dim=(2, 3)),
    "var_image": _function(torch.var, dim=(2, 3)),
    "amax_rows": _function(torch.amax, _ROWS, dim=-1),
    "argmax_rows": _function(torch.argmax, _ROWS, dim=-1),
    "argmax_channels": _function(torch.argmax, dim=1),
    "logsumexp_rows": _function(torch.logsumexp, _ROWS, dim=-1),
    "norm_rows": _function(torch.linalg.vector_norm, _ROWS, dim=-1),
    **{
        made.__name__.lower(): _of(made)
        for made in (nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus, nn.ELU, nn.Tanh, nn.PReLU)
    },
}


def _chained(first: Layer, *tail: str, channels: int = _CHANNELS) -> Layer:
    return Layer(partial(_chain, first.make, channels, *tail), first.example_shape)


_TAILS = {
    "conv": (
        "relu", "gelu", "mish mish", "scale hardswish", "batch_norm silu", "relu batch_norm", "group_norm relu",
        "instance_norm_affine relu", "layer_norm gelu", "max_pool", "relu avg_pool", "relu global_avg_pool", "softmax",
        "min tanh",
    ),
    "conv_1x1": ("gelu 1x1",),
    "conv_transposed": ("gelu", "batch_norm tanh max_pool"),
    "batch_norm": ("relu 1x1 avg_pool",),
    "linear": ("gelu scaled", "relu sum"),
}  # fmt: skip
"""Names of `_OPERATORS` after a single layer."""


def _name(first: str, tail: str) -> str:
    return "_".join((first, *tail.replace("_affine", "").split()))


_FIRST = {
    "conv_3to16": (nn.Conv2d, 3, 16, 3, 256, {}),
    "conv_3to32_stride2": (nn.Conv2d, 3, 32, 3, 256, {"stride": 2, "padding": 1}),
    "conv_3to64_7x7_stride2": (nn.Conv2d, 3, 64, 7, 512, {"stride": 2, "padding": 3}),
    "conv_8to64": (nn.Conv2d, 8, 64, 3, 128, {}),
    "conv_16to16": (nn.Conv2d, 16, 16, 3, 128, {"padding": 1}),
    "conv_16to64_1x1": (nn.Conv2d, 16, 64, 1, 128, {}),
    "conv_16to32_4x4_stride2": (nn.Conv2d, 16, 32, 4, 256, {"stride": 2, "padding": 1}),
    "conv_32to64_5x5": (nn.Conv2d, 32, 64, 5, 128, {"padding": 2}),
    "conv_64to128": (nn.Conv2d, 64, 128, 3, 128, {}),
    "transposed_3to16": (nn.ConvTranspose2d, 3, 16, 3, 256, {"padding": 1}),
    "transposed_64to64": (nn.ConvTranspose2d, 64, 64, 3, 128, {}),
    "transposed_32to16_4x4_stride2": (nn.ConvTranspose2d, 32, 16, 4, 128, {"stride": 2, "padding": 1}),
    "transposed_64to32_stride2": (
        nn.ConvTranspose2d, 64, 32, 3, 128, {"stride": 2, "padding": 1, "output_padding": 1},
    ),
}  # fmt: skip
"""First layers of convolution chains: kind, channels, filters, size, side of the images, options."""
_FURTHER_TAILS: Mapping[str, tuple[str, ...]] = {
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


def _convolution_chains() -> dict[str, Layer]:
    found = {}
    for first, (kind, channels, filters, size, side, options) in _FIRST.items():
        begun = _on((channels, side, side), kind, channels, filters, size, **options)
        for tail in _FURTHER_TAILS[first]:
            found[_name(first, tail)] = _chained(begun, *tail.split(), channels=filters)
    return found


CONV_CHAINS: Mapping[str, Layer] = _convolution_chains()
CHAINS: Mapping[str, Layer] = {
    **{
        _name(first, tail): _chained(_SINGLE[first], *tail.split())
        for first, tails in _TAILS.items()
        for tail in tails
    },
    "conv_transposed_group_norm": _chained(_SINGLE["conv_transposed"], "gelu", "group_norm"),
    "depthwise_separable": _of(
        lambda: nn.Sequential(_conv(groups=_CHANNELS), _OPERATORS["1x1"](_CHANNELS), nn.ReLU6())
    ),
    **CONV_CHAINS,
}
LAYERS: Mapping[str, Layer] = {**_SINGLE, **CHAINS}
__all__ = list(LAYERS)


def __getattr__(name: str) -> Layer:
    """Return a layer's constructor as an attribute of the module."""
    try:
        return LAYERS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
