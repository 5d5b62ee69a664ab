"""Networks from images, sequences and short films to classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.scope import CausalConv, Scope, StandardizedConv, Tensor

# --- channels or pixels weighed by what is seen, cheaper filters, and images that are compared


def weighted(
    m: Scope,
    x: Tensor,
    width: int = 64,
    depth: int = 2,
    classes: int = 1000,
    *,
    attention: Callable[..., Tensor],
) -> Tensor:
    """ResNet-18 with an attention module at the end of every block."""
    return m.classifier(m.stages(x, width, depth, attention)[-1], classes)


def eca(m: Scope, x: Tensor, size: int = 3) -> Tensor:
    """Each channel by a factor that its neighbors among the channels decide on (Wang et al., 2020)."""
    means = x.mean((2, 3)).unsqueeze(1)
    factors = torch.sigmoid(m(means, lambda _: nn.Conv1d(1, 1, size, padding=size // 2, bias=False)))
    return x * factors.transpose(1, 2).unsqueeze(-1)


def se(m: Scope, x: Tensor, fewer: int = 16) -> Tensor:
    """Squeeze-and-excite: gates from two linear layers over channel means (Hu et al., 2018)."""
    batch, channels = x.shape[:2]
    width, means = m.width(x), F.adaptive_avg_pool2d(x, 1).view(batch, channels)
    factors = torch.sigmoid(m.linear(F.relu(m.linear(means, max(1, width // fewer), False)), width, False))
    return x * factors.view(batch, channels, 1, 1).expand_as(x)


def cbam(m: Scope, x: Tensor, fewer: int = 16) -> Tensor:
    """CBAM: channel gates from means and maxima, then pixel gates (Woo et al., 2018)."""
    channels = m.width(x)

    def both(m: Scope, x: Tensor) -> Tensor:
        inner = F.relu(m.conv(x, max(1, channels // fewer), 1, bias=False))
        return m.conv(inner, channels, 1, bias=False)

    shared, means, maxima = m.shared(both), x.mean((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    x = x * torch.sigmoid(shared(means) + shared(maxima))
    seen = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True).values], 1)
    return x * torch.sigmoid(m.conv(seen, 1, 7, bias=False))


def _selective_kernel(m: Scope, x: Tensor, groups: int = 8, fewer: int = 4) -> Tensor:
    """Selective kernel: two filter sizes, blended per channel by softmax attention (Li et al., 2019)."""
    channels = m.width(x)
    seen = torch.stack([m.unit(x, channels, dilation=dilation, groups=groups) for dilation in (1, 2)], 1)
    squeezed = m.linear(seen.sum(1).mean((-2, -1)), max(4, channels // fewer), False)
    shares = m.linear(F.relu(m.norm(squeezed)), 2 * channels)
    return (seen * torch.softmax(shares.unflatten(1, (2, -1)), 1)[..., None, None]).sum(1)


def sknet(m: Scope, x: Tensor, width: int = 64, depth: int = 2, classes: int = 1000) -> Tensor:
    """ResNet bottlenecks with a selective kernel in the middle."""
    x = m.stem(x, width)
    for number in range(3):
        filters = 2 * width << number
        for _ in range(depth):
            shortcut = x if m.width(x) == filters else m.unit(x, filters, 1, activation=None)
            y = _selective_kernel(m, m.unit(x, filters // 2, 1))
            x = F.relu(shortcut + m.unit(y, filters, 1, activation=None))
        x = F.avg_pool2d(x, 2) if number < 2 else x
    return m.classifier(x, classes)


def coord_net(m: Scope, x: Tensor, widths: Sequence[int] = (32, 64, 128, 256), classes: int = 100) -> Tensor:
    """Convolutions that also see where each pixel is, and how far from the middle (Liu et al., 2018)."""
    for width in widths:
        height, columns = x.shape[-2:]
        down = torch.linspace(-1, 1, height, dtype=x.dtype, device=x.device)[:, None].expand(height, columns)
        across = torch.linspace(-1, 1, columns, dtype=x.dtype, device=x.device).expand(height, columns)
        seen = torch.stack([down, across, (down.square() + across.square()).sqrt()])
        y = m.conv(torch.cat([x, seen.expand(x.shape[0], 3, height, columns)], 1), width, stride=2)
        x = F.relu(m.norm(y))
    return m.classifier(x, classes)


def _ghost(m: Scope, x: Tensor, filters: int, activation: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Ghost module: half of the filters, and a cheap depthwise convolution of each (Han et al., 2020)."""
    half = -(-filters // 2)
    y = m.unit(x, half, 1, activation=activation)
    return torch.cat([y, m.unit(y, half, activation=activation, groups=half)], 1)[:, :filters]


_GHOSTS = (
    (16, 16, 3, 1), (48, 24, 3, 2), (72, 24, 3, 1), (72, 40, 5, 2), (120, 40, 5, 1), (240, 80, 3, 2),
    (200, 80, 3, 1), (184, 80, 3, 1), (480, 112, 3, 1), (672, 160, 5, 2), (960, 160, 5, 1),
)  # fmt: skip
"""A widening, filters, a filter size and a stride per stage."""


def ghost_net(
    m: Scope, x: Tensor, stages: Sequence[tuple[int, int, int, int]] = _GHOSTS, classes: int = 1000
) -> Tensor:
    """Bottlenecks of ghost modules."""
    x = m.unit(x, 16, stride=2)
    for wide, filters, size, stride in stages:
        channels, shortcut = m.width(x), x
        if stride > 1 or channels != filters:
            shortcut = m.unit(x, channels, size, stride, None, groups=channels)
            shortcut = m.unit(shortcut, filters, 1, activation=None)
        y = _ghost(m, x, wide, F.relu)
        y = m.unit(y, wide, size, stride, None, groups=wide) if stride > 1 else y
        x = shortcut + _ghost(m, y, filters, None)
    return m.classifier(m.unit(x, stages[-1][0], 1), classes)


def _standardized_block(m: Scope, x: Tensor, filters: int, stride: int, groups: int) -> Tensor:
    """Group norm and ReLU in front of each of three standardized convolutions."""

    def conv(x: Tensor, filters: int, size: int, stride: int = 1) -> Tensor:
        return m(x, lambda c: StandardizedConv(c, filters, size, stride, size // 2, bias=False))

    def normed(x: Tensor) -> Tensor:
        return F.relu(m.group_norm(x, groups))

    inner, y = filters // 4, normed(x)
    z = conv(normed(conv(normed(conv(y, inner, 1)), inner, 3, stride)), filters, 1)
    return z + (x if m.width(x) == filters and stride == 1 else conv(y, filters, 1, stride))


def standardized_resnet(
    m: Scope,
    x: Tensor,
    width: int = 64,
    depths: Sequence[int] = (2, 2, 2, 2),
    groups: int = 32,
    classes: int = 1000,
) -> Tensor:
    """ResNet-v2 with group norms and standardized weights (BiT; Kolesnikov et al., 2020)."""
    x = m(x, lambda c: StandardizedConv(c, width, 7, 2, 3, bias=False))
    x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
    for number, depth in enumerate(depths):
        for position in range(depth):
            stride = 2 if number and not position else 1
            x = _standardized_block(m, x, 4 * width << number, stride, min(groups, m.width(x)))
    return m.classifier(F.relu(m.group_norm(x, groups)), classes)


def siamese(m: Scope, x: Tensor, width: int = 32, features: int = 128) -> tuple[Tensor, Tensor]:
    """Similarity of the two images of a pair are: one network for both, and their distance (Koch et al., 2015)."""

    def network(m: Scope, x: Tensor) -> Tensor:
        x = m.basic_block(m.basic_block(m.unit(x, width, 7, 2), 2 * width, 2), 4 * width, 2)
        return m.classifier(x, features)

    seen = m.shared(network)
    first, second = (F.normalize(seen(x), dim=1) for x in x.unbind(1))
    alike = torch.sigmoid(m.linear((first - second).abs(), 1)).squeeze(1)
    return alike, (first * second).sum(1)


# --- images as patches: mixers, vision transformers, and one inside a convolutional network


def conv_mixer(
    m: Scope, x: Tensor, width: int = 512, depth: int = 12, size: int = 8, patch: int = 7, classes: int = 1000
) -> Tensor:
    """Depthwise and 1x1 convolutions over patches (Trockman and Kolter, 2022)."""

    def behind(y: Tensor) -> Tensor:
        return m.norm(F.gelu(y))

    depthwise = partial(nn.Conv2d, width, width, size, groups=width, padding="same")
    x = behind(m.conv(x, width, patch, patch, padding=0))
    for _ in range(depth):
        x = x + behind(m(x, lambda _: depthwise()))
        x = behind(m.conv(x, width, 1))
    return m.classifier(x, classes)


def _mlp(m: Scope, x: Tensor, inner: int) -> Tensor:
    return m.linear(F.gelu(m.linear(x, inner)), x.shape[-1])


def mlp_mixer(
    m: Scope, x: Tensor, patch: int = 16, width: int = 512, depth: int = 8, classes: int = 1000
) -> Tensor:
    """MLP-Mixer: alternating MLPs over patches and channels: S/16 (Tolstikhin et al., 2021)."""
    x = m.conv(x, width, patch, patch, padding=0).flatten(2).transpose(1, 2)
    for _ in range(depth):
        x = x + _mlp(m, m.layer_norm(x).transpose(1, 2), width // 2).transpose(1, 2)
        x = x + _mlp(m, m.layer_norm(x), 4 * width)
    return m.linear(m.layer_norm(x).mean(1), classes)


def _transformer_block(m: Scope, x: Tensor, heads: int, inner: int) -> Tensor:
    """Transformer block: attention and an MLP, each with pre-norm and a skip connection."""
    width = x.shape[-1]
    split = m.linear(m.layer_norm(x), 3 * width).unflatten(-1, (3, heads, -1))
    queries, keys, values = (each.transpose(-3, -2) for each in split.unbind(-3))
    seen = F.scaled_dot_product_attention(queries, keys, values)
    x = x + m.linear(seen.transpose(-3, -2).flatten(-2), width)
    return x + _mlp(m, m.layer_norm(x), inner)


def vision_transformer(
    m: Scope,
    x: Tensor,
    patch: int = 16,
    width: int = 384,
    depth: int = 12,
    heads: int = 6,
    classes: int = 1000,
) -> Tensor:
    """Vision transformer with a class token: S/16 (Dosovitskiy et al., 2021)."""
    x = m.conv(x, width, patch, patch, padding=0).flatten(2).transpose(1, 2)
    token = m.parameter(x, 1, 1, width)
    x = torch.cat([token.expand(x.shape[0], -1, -1), x], 1)
    x = x + m.parameter(x, 1, x.shape[1], width, deviation=0.02)
    for _ in range(depth):
        x = _transformer_block(m, x, heads, 4 * width)
    return m.linear(m.layer_norm(x)[:, 0], classes)


def _among_pixels(m: Scope, x: Tensor, width: int, depth: int, heads: int, side: int = 2) -> Tensor:
    """A transformer over the pixels at the same place of all patches, between convolutions."""
    channels = x.shape[1]
    y = m.conv(m.unit(x, channels, activation=F.silu), width, 1, bias=False)
    batch, _, rows, columns = y.shape
    tall, wide = rows // side, columns // side
    y = y.reshape(batch, width, tall, side, wide, side).permute(0, 3, 5, 2, 4, 1)
    y = y.reshape(batch, side * side, tall * wide, width)
    for _ in range(depth):
        y = _transformer_block(m, y, heads, 2 * width)
    y = m.layer_norm(y).reshape(batch, side, side, tall, wide, width).permute(0, 5, 3, 1, 4, 2)
    y = m.unit(y.reshape(batch, width, rows, columns), channels, 1, activation=F.silu)
    return m.unit(torch.cat([x, y], 1), channels, activation=F.silu)


def mobile_vit(
    m: Scope, x: Tensor, width: int = 16, features: int = 96, heads: int = 4, classes: int = 1000
) -> Tensor:
    """MobileViT: inverted bottlenecks with small transformers in between: about XS (Mehta and Rastegari, 2022)."""

    def inverted(x: Tensor, filters: int, stride: int = 1) -> Tensor:
        wide = 4 * x.shape[1]
        y = m.unit(m.unit(x, wide, 1, 1, F.silu), wide, 3, stride, F.silu, groups=wide)
        y = m.unit(y, filters, 1, activation=None)
        return x + y if m.width(x) == filters and stride == 1 else y

    w, f = width, features
    x = inverted(m.unit(x, w, 3, 2, F.silu), 2 * w)
    x = inverted(inverted(inverted(x, 3 * w, 2), 3 * w), 4 * w, 2)
    x = inverted(_among_pixels(m, x, f, 2, heads), 5 * w, 2)
    x = inverted(_among_pixels(m, x, f + f // 4, 4, heads), 6 * w, 2)
    x = _among_pixels(m, x, f + f // 2, 3, heads)
    return m.classifier(m.unit(x, 24 * w, 1, 1, F.silu), classes)


# --- sound, other sequences, and short films


def wavenet(
    m: Scope,
    x: Tensor,
    width: int = 64,
    skipped: int = 128,
    depth: int = 8,
    stacks: int = 2,
    values: int = 256,
) -> Tensor:
    """WaveNet: logits of each sample given the preceding ones (van den Oord et al., 2016)."""

    def causal(x: Tensor, dilation: int = 1) -> Tensor:
        return m(x, lambda c: CausalConv(c, width, 2, dilation=dilation))

    def pointwise(x: Tensor, filters: int) -> Tensor:
        return m(x, lambda c: nn.Conv1d(c, filters, 1))

    x, found = causal(x), []
    for level in (level for _ in range(stacks) for level in range(depth)):
        y = torch.tanh(causal(x, 1 << level)) * torch.sigmoid(causal(x, 1 << level))
        x, skip = x + pointwise(y, width), pointwise(y, skipped)
        found.append(skip)
    return pointwise(F.relu(pointwise(F.relu(sum(found[1:], found[0])), skipped)), values)


def tcn(m: Scope, x: Tensor, widths: Sequence[int] = (128,) * 6, size: int = 5, classes: int = 10) -> Tensor:
    """A sequence's class from its last step, by dilated causal convolutions with normed weights (Bai et al., 2018)."""
    normed = nn.utils.parametrizations.weight_norm
    for level, width in enumerate(widths):
        y, shortcut = x, x
        if m.width(x) != width:
            shortcut = m(x, partial(nn.Conv1d, out_channels=width, kernel_size=1))
        causal = partial(CausalConv, out_channels=width, kernel_size=size, dilation=1 << level)
        for _ in range(2):
            y = F.relu(m(y, lambda c, causal=causal: normed(causal(c))))  # type: ignore[misc]
        x = torch.relu(shortcut + y)
    return m.linear(x[:, :, -1], classes)


def m5(m: Scope, x: Tensor, width: int = 128, classes: int = 35) -> Tensor:
    """M5: spoken words from raw waveforms (Dai et al., 2017)."""
    for filters, size, stride in ((width, 80, 4), (width, 3, 1), (2 * width, 3, 1), (4 * width, 3, 1)):
        y = m(x, partial(nn.Conv1d, out_channels=filters, kernel_size=size, stride=stride))
        x = F.max_pool1d(F.relu(m.norm(y)), 4)
    x = F.avg_pool1d(x, x.shape[-1]).permute(0, 2, 1)
    return F.log_softmax(m.linear(x, classes), dim=2)


Cube = tuple[int, int, int]


def resnet3d(m: Scope, x: Tensor, width: int = 64, depth: int = 2, classes: int = 400) -> Tensor:
    """ResNet-18 over time, rows and columns (R3D; Tran et al., 2018)."""

    def conv(x: Tensor, filters: int, size: Cube, stride: Cube) -> Tensor:
        padding = (size[0] // 2, size[1] // 2, size[2] // 2)
        return m.norm(m(x, lambda c: nn.Conv3d(c, filters, size, stride, padding, bias=False)))

    x = F.relu(conv(x, width, (3, 7, 7), (1, 2, 2)))
    for number, position in ((number, position) for number in range(4) for position in range(depth)):
        stride, filters = 2 if number and not position else 1, width << number
        step = (stride, stride, stride)
        y = conv(F.relu(conv(x, filters, (3, 3, 3), step)), filters, (3, 3, 3), (1, 1, 1))
        fits = m.width(x) == filters and stride == 1
        x = F.relu(y + (x if fits else conv(x, filters, (1, 1, 1), step)))
    return m.linear(F.adaptive_avg_pool3d(x, 1).flatten(1), classes)


def frames_and_motion(m: Scope, x: Tensor, width: int = 32, classes: int = 51) -> Tensor:
    """A ResNet per frame, then a temporal convolution over its features."""
    films, frames = x.shape[:2]
    y = x.flatten(0, 1)
    for filters, size in ((width, 5), (2 * width, 3), (4 * width, 3)):
        y = F.relu(m.conv(y, filters, size, 2))
    y = F.adaptive_avg_pool2d(y, 1).reshape(films, frames, -1).transpose(1, 2)
    step = partial(nn.Conv1d, out_channels=4 * width, kernel_size=3, padding=1)
    return m.linear(torch.relu(m(F.relu(m(y, step)), step)).mean(2), classes)
