"""Networks as functions: a layer is made by its first call, for the channels that it is given."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensor = torch.Tensor
Activation = Callable[[Tensor], Tensor] | None
_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


class Net(nn.Module):
    """A network that computes `function(scope, *inputs)`. Its layers are made by a first call without data."""

    def __init__(self, function: Callable[..., Any], item: Sequence[int] | None = None) -> None:
        super().__init__()
        self.function, self.layers, self.built = function, nn.ModuleList(), False
        self.widths: list[int] = []
        if item is not None:
            self.run(True, torch.empty(2, *item, device="meta"))

    def run(self, without_data: bool, *inputs: Any) -> Any:
        result = self.function(Scope(self, without_data), *inputs)
        if not self.built:
            self.built = True
        return result

    def forward(self, x: Tensor) -> Any:
        return self.run(False, x)


class _Parameter(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value)

    def forward(self, x: Tensor) -> Tensor:
        return self.value


class PixelNorm(nn.Module):
    """Layer norm over the channels of each pixel, of an image as it is stored."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(1, keepdim=True)
        y = centered / (centered.square().mean(1, keepdim=True) + self.eps).sqrt()
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class StandardizedConv(nn.Conv2d):
    """Weight standardization: filters are normalized at every call (Qiao et al., 2019)."""

    def forward(self, input: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, correction=0)
        weight = (self.weight - mean) / (variance * math.prod(self.weight.shape[1:]) + 1e-5).sqrt()
        return F.conv2d(input, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class MaskedConv(nn.Conv2d):
    """Masked convolution over preceding pixels only; with `itself` also the current one."""

    mask: Tensor

    def __init__(self, channels: int, filters: int, size: int, itself: bool) -> None:
        super().__init__(channels, filters, size, padding=size // 2)
        seen = torch.zeros(size, size)
        seen[: size // 2] = 1
        seen[size // 2, : size // 2 + itself] = 1
        self.register_buffer("mask", seen)

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.weight * self.mask, self.bias, padding=self.padding)


class CausalConv(nn.Conv1d):
    """Causal convolution."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.pad(input, ((self.kernel_size[0] - 1) * self.dilation[0], 0)))


class Scope:
    """The layers of one call of a network, in the order of their calls."""

    def __init__(self, net: Net, without_data: bool) -> None:
        self._net, self._without_data, self._building = net, without_data, not net.built
        self._layer = self._width = 0

    def _next(self, make: Callable[[], nn.Module]) -> nn.Module:
        if self._building:
            self._net.layers.append(make())
        self._layer += 1
        return self._net.layers[self._layer - 1]

    def width(self, x: Tensor, dim: int = 1) -> int:
        """Return a size as the first call had it: a number that code may depend on, also when it is traced."""
        if self._building:
            self._net.widths.append(x.shape[dim])
        self._width += 1
        return self._net.widths[self._width - 1]

    def __call__(self, x: Tensor, make: Callable[[int], nn.Module], dim: int = 1) -> Tensor:
        """Return the result of a layer that is made for the size of one dimension of x."""
        layer = self._next(lambda: make(x.shape[dim]))
        return copy.deepcopy(layer).to("meta")(x) if self._without_data else layer(x)

    def shared(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of several calls with the same layers."""
        net = self._next(lambda: Net(function))
        assert isinstance(net, Net)
        return lambda *inputs: net.run(self._without_data, *inputs)

    def parameter(self, x: Tensor, *size: int, deviation: float = 0.0) -> Tensor:
        return self(x, lambda _: _Parameter(torch.randn(size) * deviation))

    def conv(
        self,
        x: Tensor,
        filters: int,
        size: int = 3,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        padding: int | None = None,
    ) -> Tensor:
        """Return a convolution that keeps its image's sizes but for the stride."""
        pad = dilation * ((size - 1) // 2) if padding is None else padding
        return self(x, lambda c: nn.Conv2d(c, filters, size, stride, pad, dilation, groups, bias))

    def linear(self, x: Tensor, features: int, bias: bool = True) -> Tensor:
        return self(x, lambda c: nn.Linear(c, features, bias), -1)

    def norm(self, x: Tensor) -> Tensor:
        return self(x, lambda c: _NORMS[x.dim()](c))

    def layer_norm(self, x: Tensor) -> Tensor:
        return self(x, nn.LayerNorm, -1)

    def group_norm(self, x: Tensor, groups: int = 8) -> Tensor:
        return self(x, lambda c: nn.GroupNorm(groups, c))

    def unit(
        self,
        x: Tensor,
        filters: int,
        size: int = 3,
        stride: int = 1,
        activation: Activation = F.relu,
        dilation: int = 1,
        groups: int = 1,
    ) -> Tensor:
        """Return a convolution without a bias, a norm and an activation."""
        y = self.norm(self.conv(x, filters, size, stride, dilation, groups, bias=False))
        return activation(y) if activation else y

    def basic_block(
        self, x: Tensor, filters: int, stride: int = 1, attention: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """ResNet's block of two 3x3 convolutions, with optional attention before the sum."""
        fits = self.width(x) == filters and stride == 1
        shortcut = x if fits else self.unit(x, filters, 1, stride, None)
        y = self.unit(self.unit(x, filters, 3, stride), filters, activation=None)
        return F.relu(shortcut + (attention(self, y) if attention else y))

    def stages(
        self, x: Tensor, width: int, depth: int, attention: Callable[..., Tensor] | None = None
    ) -> list[Tensor]:
        """Return the results of ResNet's stem and four stages: each but the first halves the image."""
        found = [self.stem(x, width)]
        for number, position in ((number, position) for number in range(4) for position in range(depth)):
            stride = 2 if number and not position else 1
            y = self.basic_block(found[-1], width << number, stride, attention)
            found = [*found[: number + 1], y]
        return found[1:]

    def stem(self, x: Tensor, width: int) -> Tensor:
        """ResNet's first convolution and its pool, which reduce height and width to a quarter."""
        return F.max_pool2d(self.unit(x, width, 7, 2), 3, 2, 1)

    def classifier(self, x: Tensor, classes: int) -> Tensor:
        """Global average pool and a linear layer."""
        return self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), classes)
