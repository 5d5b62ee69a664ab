"""Single layers and short chains of them. Single layers take items of about 2^18 numbers: 1 MB per item in fp32.

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

from escalade_bench.zoo.chains import CONV_CHAINS, Applied, ChannelLayerNorm, Scaled, Sizes

IMAGE: Sizes = (64, 64, 64)
"""Channels, height, width."""
ROWS: Sizes = (64, 4096)
"""Rows and their features, or the channels and steps of a sequence."""
_CHANNELS, _, _SIDE = IMAGE


class SqueezeExcite(nn.Module):
    """Squeeze-and-excite: channels scaled by a gate computed from all channel means."""

    def __init__(self, channels: int = _CHANNELS, fewer: int = 4) -> None:
        super().__init__()
        self.down, self.up = (
            nn.Conv2d(channels, channels // fewer, 1),
            nn.Conv2d(channels // fewer, channels, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class OverPixels(nn.Linear):
    """A linear layer over the channels of every pixel."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Product(nn.Module):
    """A matrix product with a parameter."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * rows**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@dataclass(frozen=True)
class Layer:
    """A constructor with its input shape as `example_shape`."""

    parts: tuple[Callable[[], nn.Module], ...]
    example_shape: Sizes = IMAGE

    def __call__(self) -> nn.Module:
        made = [part() for part in self.parts]
        return made[0] if len(made) == 1 else nn.Sequential(*made)


def _of(*parts: Callable[[], nn.Module], on: Sizes = IMAGE) -> Layer:
    return Layer(parts, on)


def _function(function: Callable[..., Any], on: Sizes = IMAGE, **options: Any) -> Layer:
    return _of(partial(Applied, partial(function, **options)), on=on)


_conv = partial(nn.Conv2d, _CHANNELS, _CHANNELS, 3, padding=1)
_pointwise_conv = partial(nn.Conv2d, _CHANNELS, _CHANNELS, 1)
_transposed = partial(nn.ConvTranspose2d, _CHANNELS, _CHANNELS, 4, 2, 1)
_norm = partial(nn.BatchNorm2d, _CHANNELS)
_groups = partial(nn.GroupNorm, 8, _CHANNELS)
_instances = partial(nn.InstanceNorm2d, _CHANNELS, affine=True)


def _depthwise(channels: int, size: int, side: int) -> Layer:
    made = partial(nn.Conv2d, channels, channels, size, padding=size // 2, groups=channels)
    return _of(made, on=(channels, side, side))


CONVOLUTIONS: Mapping[str, Layer] = {
    "conv": _of(_conv),
    "conv_1x1": _of(_pointwise_conv),
    "conv_1x1_odd": _of(partial(nn.Conv2d, 50, 75, 1), on=(50, 64, 82)),
    "conv_1x1_80_a_group": _of(partial(nn.Conv2d, 240, 240, 1, groups=3), on=(240, 33, 33)),
    "conv_grouped": _of(partial(nn.Conv2d, _CHANNELS, _CHANNELS, 3, padding=1, groups=4)),
    "conv_few_channels": _of(partial(nn.Conv2d, 3, 32, 3, padding=1), on=(3, 296, 296)),
    "conv1d": _of(partial(nn.Conv1d, 64, 64, 3, padding=1), on=ROWS),
    "conv1d_transposed": _of(partial(nn.ConvTranspose1d, 64, 64, 4, 2, 1), on=ROWS),
    "conv_transposed": _of(_transposed),
    "conv_transposed_3x3": _of(partial(nn.ConvTranspose2d, _CHANNELS, 32, 3)),
    "depthwise_3x3_56": _depthwise(128, 3, 56),
    "depthwise_7x7_56": _depthwise(128, 7, 56),
    "depthwise_3x3_14": _depthwise(1024, 3, 14),
    "depthwise_7x7_14": _depthwise(1024, 7, 14),
}
PRODUCTS: Mapping[str, Layer] = {
    "linear": _of(partial(nn.Linear, 4096, 1024), on=ROWS),
    "linear_over_pixels": _of(partial(OverPixels, _CHANNELS, _CHANNELS)),
    "matmul": _of(partial(Product, 4096, 1024), on=ROWS),
}
NORMS: Mapping[str, Layer] = {
    "batch_norm": _of(_norm),
    "layer_norm_channels": _of(partial(ChannelLayerNorm, _CHANNELS)),
    "layer_norm": _of(partial(nn.LayerNorm, 4096), on=ROWS),
    "layer_norm_image": _of(partial(nn.LayerNorm, IMAGE)),
    "rms_norm": _of(partial(nn.RMSNorm, 4096), on=ROWS),
    "group_norm": _of(_groups),
    "instance_norm": _of(_instances),
    "local_response_norm": _of(partial(nn.LocalResponseNorm, 5)),
    "softmax": _function(torch.softmax, ROWS, dim=-1),
    "softmax_channels": _function(torch.softmax, dim=1),
    "log_softmax": _function(torch.log_softmax, ROWS, dim=-1),
}
POOLS: Mapping[str, Layer] = {
    "avg_pool_2": _of(partial(nn.AvgPool2d, 2)),
    "avg_pool_3": _of(partial(nn.AvgPool2d, 3, 2, 1)),
    "max_pool_2": _of(partial(nn.MaxPool2d, 2)),
    "max_pool_3": _of(partial(nn.MaxPool2d, 3, 2, 1)),
    "max_pool1d": _of(partial(nn.MaxPool1d, 2), on=ROWS),
    "adaptive_avg_pool": _of(partial(nn.AdaptiveAvgPool2d, 7)),
    "adaptive_max_pool": _of(partial(nn.AdaptiveMaxPool2d, 7)),
    "global_avg_pool": _of(partial(nn.AdaptiveAvgPool2d, 1)),
    "squeeze_excite": _of(SqueezeExcite),
}
RESIZED: Mapping[str, Layer] = {
    "nearest": _of(partial(nn.Upsample, scale_factor=2)),
    "bilinear": _of(partial(nn.Upsample, scale_factor=2, mode="bilinear")),
    "bicubic": _of(partial(nn.Upsample, scale_factor=2, mode="bicubic")),
    "pixel_shuffle": _of(partial(nn.PixelShuffle, 2)),
    "pad_zeros": _of(partial(nn.ZeroPad2d, 2)),
    "pad_reflect": _of(partial(nn.ReflectionPad2d, 2)),
    "pad_replicate": _of(partial(nn.ReplicationPad2d, 2)),
    "pad_circular": _of(partial(nn.CircularPad2d, 2)),
}
REDUCTIONS: Mapping[str, Layer] = {
    "sum_rows": _function(torch.sum, ROWS, dim=-1),
    "sum_channels": _function(torch.sum, dim=1),
    "mean_image": _function(torch.mean, dim=(2, 3)),
    "var_image": _function(torch.var, dim=(2, 3)),
    "amax_rows": _function(torch.amax, ROWS, dim=-1),
    "argmax_rows": _function(torch.argmax, ROWS, dim=-1),
    "argmax_channels": _function(torch.argmax, dim=1),
    "logsumexp_rows": _function(torch.logsumexp, ROWS, dim=-1),
    "norm_rows": _function(torch.linalg.vector_norm, ROWS, dim=-1),
}
ACTIVATIONS: Mapping[str, Layer] = {
    made.__name__.lower(): _of(made)
    for made in (nn.ReLU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus, nn.ELU, nn.Tanh, nn.PReLU)
}
CHAINS: Mapping[str, Layer] = {
    "conv_relu": _of(_conv, nn.ReLU),
    "conv_gelu": _of(_conv, nn.GELU),
    "conv_mish_mish": _of(_conv, nn.Mish, nn.Mish),
    "conv_scale_hardswish": _of(_conv, partial(Scaled, _CHANNELS), nn.Hardswish),
    "conv_batch_norm_silu": _of(_conv, _norm, nn.SiLU),
    "conv_relu_batch_norm": _of(_conv, nn.ReLU, _norm),
    "conv_group_norm_relu": _of(_conv, _groups, nn.ReLU),
    "conv_instance_norm_relu": _of(_conv, _instances, nn.ReLU),
    "conv_layer_norm_gelu": _of(_conv, partial(ChannelLayerNorm, _CHANNELS), nn.GELU),
    "conv_max_pool": _of(_conv, partial(nn.MaxPool2d, 2)),
    "conv_relu_avg_pool": _of(_conv, nn.ReLU, partial(nn.AvgPool2d, 2)),
    "conv_relu_global_avg_pool": _of(_conv, nn.ReLU, partial(nn.AdaptiveAvgPool2d, 1)),
    "conv_softmax": _of(_conv, partial(nn.Softmax, 1)),
    "conv_min_tanh": _of(_conv, partial(Applied, partial(torch.amin, dim=1, keepdim=True)), nn.Tanh),
    "conv_1x1_gelu_1x1": _of(_pointwise_conv, nn.GELU, _pointwise_conv),
    "conv_transposed_gelu": _of(_transposed, nn.GELU),
    "conv_transposed_batch_norm_tanh_max_pool": _of(_transposed, _norm, nn.Tanh, partial(nn.MaxPool2d, 2)),
    "conv_transposed_group_norm": _of(_transposed, nn.GELU, _groups),
    "depthwise_separable": _of(partial(_conv, groups=_CHANNELS), _pointwise_conv, nn.ReLU6),
    "batch_norm_relu_1x1_avg_pool": _of(_norm, nn.ReLU, _pointwise_conv, partial(nn.AvgPool2d, 2)),
    "linear_gelu_scaled": _of(
        partial(nn.Linear, 4096, 1024), nn.GELU, partial(Applied, partial(torch.mul, other=0.5)), on=ROWS
    ),
    "linear_relu_sum": _of(
        partial(nn.Linear, 4096, 1024), nn.ReLU, partial(Applied, partial(torch.sum, dim=-1)), on=ROWS
    ),
    **{name: Layer((made,), shape) for name, (made, shape) in CONV_CHAINS.items()},
}
LAYERS: Mapping[str, Layer] = {
    **CONVOLUTIONS, **PRODUCTS, **NORMS, **POOLS, **RESIZED, **REDUCTIONS, **ACTIVATIONS, **CHAINS,
}  # fmt: skip
__all__ = list(LAYERS)


def __getattr__(name: str) -> Layer:
    """Return a layer's constructor as an attribute of the module."""
    try:
        return LAYERS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
