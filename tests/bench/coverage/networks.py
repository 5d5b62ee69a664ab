"""Small networks, each with the typical features of its class: a block or two, few channels, small images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from escalade.models import UNet
from escalade.models.densenet import DenseNet
from escalade.models.mobilenet import MobileNetV2

CLASSES = 10
Activation = Callable[[], nn.Module]


def conv(
    channels: int,
    filters: int,
    size: int = 3,
    stride: int = 1,
    groups: int = 1,
    dilation: int = 1,
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
    activation: Activation | None = nn.ReLU,
) -> nn.Sequential:
    """Convolution, norm, activation."""
    padding = dilation * (size // 2)
    layers = [
        nn.Conv2d(channels, filters, size, stride, padding, dilation, groups, bias=False),
        norm(filters),
    ]
    return nn.Sequential(*layers, *((activation(),) if activation else ()))


class Classified(nn.Module):
    """Features, global average pooling, and a linear layer."""

    def __init__(self, width: int, *features: nn.Module) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.features(x)).flatten(1))


class Around(nn.Module):
    """A block inside a minimal network."""

    def __init__(self, *block: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(*block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)


class SqueezeExcite(nn.Module):
    """Scale each channel by a factor that depends on all channels."""

    def __init__(self, channels: int, activation: Activation, gate: Activation) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)
        self.activation, self.gate = activation(), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = F.adaptive_avg_pool2d(x, 1)
        return x * self.gate(self.up(self.activation(self.down(scale))))


def mobilenet_v3() -> nn.Module:
    """In-place hardswish, and squeeze-and-excite with a hardsigmoid."""
    act = partial(nn.Hardswish, inplace=True)
    block = (
        conv(16, 64, 1, activation=act), conv(64, 64, 5, groups=64, activation=act),
        SqueezeExcite(64, nn.ReLU, nn.Hardsigmoid), conv(64, 16, 1, activation=None),
    )  # fmt: skip
    head = nn.Sequential(nn.Linear(64, 64), act(), nn.Dropout(0.2))
    net = Classified(64, conv(3, 16, 3, 2, activation=act), Around(*block), conv(16, 64, 1, activation=act))
    net.head = nn.Sequential(*head, nn.Linear(64, CLASSES))  # type: ignore[assignment]
    return net


def efficientnet() -> nn.Module:
    """In-place SiLU, and squeeze-and-excite with a sigmoid."""
    act = partial(nn.SiLU, inplace=True)
    block = (
        conv(16, 64, 1, activation=act), conv(64, 64, 3, groups=64, activation=act),
        SqueezeExcite(64, act, nn.Sigmoid), conv(64, 16, 1, activation=None),
    )  # fmt: skip
    return Classified(16, conv(3, 16, 3, 2, activation=act), Around(*block))


class ConvNeXtBlock(nn.Module):
    """A depthwise 7x7 convolution, LayerNorm over channels, two linear layers over pixels, and a factor per channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of an image."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    stem = (nn.Conv2d(3, 16, 4, 4), ChannelLayerNorm(16))
    smaller = (ChannelLayerNorm(16), nn.Conv2d(16, 32, 2, 2))
    return Classified(32, *stem, ConvNeXtBlock(16), *smaller, ConvNeXtBlock(32), ChannelLayerNorm(32))


class Shuffled(nn.Module):
    """Half of the channels pass a block; both halves are then interleaved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.block = nn.Sequential(
            conv(half, half, 1), conv(half, half, groups=half, activation=None), conv(half, half, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=1)
        y = torch.cat((left, self.block(right)), 1)
        batch, channels, height, width = y.shape
        return y.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(y.shape)


def shufflenet() -> nn.Module:
    return Classified(32, conv(3, 32, 3, 2), nn.MaxPool2d(3, 2, 1), Shuffled(32), Shuffled(32))


class Beside(nn.Module):
    """Branches of one input, concatenated over channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def inception() -> nn.Module:
    """Parallel branches, one with a pool, and non-square filters."""
    row_and_column = nn.Sequential(
        nn.Conv2d(16, 16, (1, 7), padding=(0, 3)), nn.ReLU(), nn.Conv2d(16, 16, (7, 1), padding=(3, 0)), nn.ReLU()
    )  # fmt: skip
    pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(16, 16, 1))
    block = Beside(conv(16, 16, 1), nn.Sequential(conv(16, 8, 1), conv(8, 16, 5)), row_and_column, pooled)
    smaller = Beside(conv(64, 32, 3, 2), nn.MaxPool2d(3, 2, 1))
    return Classified(96, conv(3, 16, 3, 2), block, smaller)


def squeezenet() -> nn.Module:
    """Fire modules, a convolutional classifier, and pools with ceil_mode."""
    squeeze = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU())
    wide = Beside(
        nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()),
    )
    head = (nn.Dropout(), nn.Conv2d(32, CLASSES, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    stem = (nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True))
    return nn.Sequential(*stem, squeeze, wide, *head)


class Resized(nn.Module):
    """An interpolated feature map."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.interpolate(self.inner(x), x.shape[-2:], mode="bilinear", align_corners=False)


class Segmented(nn.Module):
    """Parallel dilated convolutions and the global mean, and class scores at the size of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 32, dilation=2))
        mean = Resized(nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(32, 16, 1)))
        self.head = nn.Sequential(
            Beside(conv(32, 16, 1), conv(32, 16, dilation=2), conv(32, 16, dilation=4), mean),
            conv(64, 16, 1),
            nn.Conv2d(16, CLASSES, 1),
        )
        self.aux = nn.Sequential(conv(32, 8), nn.Conv2d(8, CLASSES, 1))

    def forward(self, x: torch.Tensor) -> OrderedDict[str, torch.Tensor]:
        features = self.backbone(x)
        parts = (("out", self.head), ("aux", self.aux))
        size = x.shape[-2:]
        return OrderedDict(
            (name, F.interpolate(part(features), size, mode="bilinear")) for name, part in parts
        )


def regnet() -> nn.Module:
    """Grouped 3x3 convolutions between 1x1, and a shortcut of a different width."""
    grouped = (conv(32, 32, 1), conv(32, 32, groups=4), conv(32, 32, 1, activation=None))
    return Classified(32, conv(3, 32, 3, 2), Around(*grouped), nn.ReLU(), Around(*grouped), nn.ReLU())


def group_norm() -> nn.Module:
    """GroupNorm, InstanceNorm and weight-standardized convolutions: statistics are computed at each call."""
    groups: Callable[[int], nn.Module] = lambda width: nn.GroupNorm(4, width)  # noqa: E731
    instances: Callable[[int], nn.Module] = lambda width: nn.InstanceNorm2d(width, affine=True)  # noqa: E731
    return Classified(
        32, conv(3, 32, 3, 2, norm=groups), Around(conv(32, 32, norm=groups)), conv(32, 32, norm=instances)
    )


def vgg() -> nn.Module:
    """Plain stages with activations of every kind."""
    activations = (nn.ELU, nn.LeakyReLU, nn.Mish, nn.Softplus, nn.Tanh, nn.CELU)
    layers = [layer for each in activations for layer in (nn.Conv2d(16, 16, 3, padding=1), each())]
    return Classified(16, nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(16), nn.MaxPool2d(2), *layers)


def alexnet() -> nn.Module:
    """LocalResponseNorm, reflection padding, and overlapping pools."""
    first = (nn.ReflectionPad2d(2), nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.LocalResponseNorm(5))
    return Classified(16, *first, nn.MaxPool2d(3, 2), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.AvgPool2d(2))


class Attention(nn.Module):
    """A vision-transformer block over the patches of an image."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).flatten(2).transpose(1, 2)
        y = torch.cat([self.token.expand(y.shape[0], -1, -1), y], 1)
        z = self.norm1(y)
        y = y + self.attention(z, z, z, need_weights=False)[0]
        y = y + self.mlp(self.norm2(y))
        return self.head(self.norm3(y)[:, 0])


def upscaling() -> nn.Module:
    """Upscaling by a pixel shuffle; one activation for the image."""
    body = (nn.Conv2d(3, 16, 5, padding=2), nn.Tanh(), nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2))
    return nn.Sequential(*body, nn.Sigmoid())


STAGES: Sequence[tuple[int, int, int, int]] = ((1, 16, 1, 1), (4, 16, 2, 2))
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mobilenet_v2": lambda: MobileNetV2(STAGES, CLASSES, first=16, last=64),
    "mobilenet_v3": mobilenet_v3,
    "efficientnet": efficientnet,
    "convnext": convnext,
    "densenet": lambda: DenseNet((2, 1), growth=8, first=16, classes=CLASSES),
    "shufflenet": shufflenet,
    "inception": inception,
    "squeezenet": squeezenet,
    "unet": lambda: UNet(width=8, depth=1),
    "unet_upsampled": lambda: UNet(width=8, depth=1, upsample=True),
    "segmentation": Segmented,
    "regnet": regnet,
    "group_norm": group_norm,
    "vgg": vgg,
    "alexnet": alexnet,
    "vit": Attention,
    "upscaling": upscaling,
}
