"""Networks from images (or noise) to images, maps and boxes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.scope import MaskedConv, PixelNorm, Scope, Tensor

# --- a value for every pixel, and boxes and classes at several sizes at once


def _resized(x: Tensor, like: Tensor, corners: bool | None = None) -> Tensor:
    return F.interpolate(x, like.shape[-2:], mode="bilinear", align_corners=corners)


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0)


def deeplab(
    m: Scope, x: Tensor, width: int = 64, classes: int = 21, rates: Sequence[int] = (6, 12, 18)
) -> Tensor:
    """Dilated convolutions on a small ResNet, joined with earlier features (DeepLabv3+; Chen et al., 2018)."""
    wide, early = 4 * width, m.basic_block(m.stem(x, width), width)
    late = m.basic_block(m.basic_block(m.basic_block(early, 2 * width, 2), wide, 2), wide)
    pooled = _resized(m.unit(F.adaptive_avg_pool2d(late, 1), wide, 1), late, False)
    branches = [m.unit(late, wide, 1), *(m.unit(late, wide, dilation=rate) for rate in rates)]
    seen = _resized(m.unit(torch.cat([*branches, pooled], 1), wide, 1), early)
    y = m.unit(torch.cat([seen, m.unit(early, 48, 1)], 1), wide)
    return _resized(m.conv(y, classes, 1), x, False)


def _exchange(m: Scope, images: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
    """Blocks at every resolution, then an exchange: each resolution becomes the sum of all, resized."""

    def brought(x: Tensor, source: int, target: int) -> Tensor:
        if source > target:
            small = m.unit(x, widths[target], 1, activation=None)
            return F.interpolate(small, scale_factor=2 ** (source - target))
        for step in range(source, target):
            last = step == target - 1
            x = m.unit(x, widths[target if last else source], 3, 2, None if last else F.relu)
        return x

    done = [m.basic_block(x, width) for x, width in zip(images, widths, strict=True)]
    sums = ([brought(x, source, target) for source, x in enumerate(done)] for target in range(len(widths)))
    return [torch.relu(torch.stack(each).sum(0)) for each in sums]


def hrnet(m: Scope, x: Tensor, width: int = 32, exchanges: int = 3, keypoints: int = 17) -> Tensor:
    """HRNet: three parallel resolutions with repeated exchange (Wang et al., 2019)."""
    widths = [width, 2 * width, 4 * width]
    images = [m.unit(m.unit(x, 2 * width, stride=2), width, stride=2)]
    for further in widths[1:]:
        images.append(m.unit(images[-1], further, stride=2))
    for _ in range(exchanges):
        images = _exchange(m, images, widths)
    brought = (_resized(x, images[0], True) for x in images[1:])
    return m.conv(torch.cat([images[0], *brought], 1), keypoints, 1)


def _preactivated(m: Scope, x: Tensor) -> Tensor:
    channels = x.shape[1]
    y = m.conv(F.relu(m.norm(x)), channels // 2, 1)
    y = m.conv(F.relu(m.norm(y)), channels // 2)
    return x + m.conv(F.relu(m.norm(y)), channels, 1)


def _glass(m: Scope, x: Tensor, depth: int) -> Tensor:
    """Hourglass level: a branch at half size, and one at full size."""
    y = _preactivated(m, F.max_pool2d(x, 2))
    y = _preactivated(m, _glass(m, y, depth - 1) if depth > 1 else _preactivated(m, y))
    return _preactivated(m, x) + _doubled(y)


def hourglass(
    m: Scope, x: Tensor, width: int = 128, depth: int = 4, keypoints: int = 16
) -> tuple[Tensor, Tensor]:
    """Two stacked hourglasses, each with its own heatmaps (Newell et al., 2016)."""
    y = _preactivated(m, m.unit(m.unit(x, width // 2, 7, 2), width, 1))
    x = _preactivated(m, F.max_pool2d(y, 2))
    features = m.unit(_glass(m, x, depth), width, 1)
    first = m.conv(features, keypoints, 1)
    x = x + m.conv(features, width, 1) + m.conv(first, width, 1)
    return first, m.conv(m.unit(_glass(m, x, depth), width, 1), keypoints, 1)


def _pyramid(m: Scope, images: Sequence[Tensor], width: int) -> list[Tensor]:
    """Feature pyramid with a top-down path (FPN; Lin et al., 2017)."""
    levels = [m.conv(x, width, 1) for x in images]
    for at in reversed(range(len(levels) - 1)):
        levels[at] = levels[at] + F.interpolate(levels[at + 1], size=levels[at].shape[-2:])
    levels = [m.conv(x, width) for x in levels]
    sixth = m.conv(images[-1], width, 3, 2)
    return [*levels, sixth, m.conv(torch.relu(sixth), width, 3, 2)]


def retinanet(
    m: Scope,
    x: Tensor,
    width: int = 64,
    depth: int = 2,
    features: int = 256,
    anchors: int = 9,
    classes: int = 80,
) -> dict[str, Tensor]:
    """RetinaNet: classes and boxes per anchor, by heads shared across pyramid levels (Lin et al., 2017)."""

    def head(numbers: int, m: Scope, x: Tensor) -> Tensor:
        """Return an anchor's numbers as a row."""
        for _ in range(4):
            x = F.relu(m.conv(x, features))
        x = m.conv(x, anchors * numbers)
        return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, numbers)

    levels = _pyramid(m, m.stages(x, width, depth)[1:], features)
    scores, boxes = (m.shared(partial(head, numbers)) for numbers in (classes, 4))
    found, places = [scores(level) for level in levels], [boxes(level) for level in levels]
    return {"scores": torch.cat(found, 1).sigmoid(), "boxes": torch.cat(places, 1)}


def _cross_stage(m: Scope, x: Tensor, filters: int, depth: int, around: bool = True) -> Tensor:
    """Cross-stage partial block: half of the channels bypass the residual blocks (CSPNet; Wang et al., 2020)."""
    half = filters // 2
    through = m.unit(x, half, 1, 1, F.silu)
    for _ in range(depth):
        y = m.unit(m.unit(through, half, 1, 1, F.silu), half, 3, 1, F.silu)
        through = through + y if around else y
    return m.unit(torch.cat([through, m.unit(x, half, 1, 1, F.silu)], 1), filters, 1, 1, F.silu)


def csp_detector(
    m: Scope, x: Tensor, width: int = 32, depth: int = 1, anchors: int = 3, classes: int = 80
) -> list[Tensor]:
    """Three detection grids from a CSP backbone with a path-aggregation neck (YOLOv4; Bochkovskiy et al., 2020)."""
    w, stage = width, partial(_cross_stage, m, depth=depth)
    joined = partial(stage, around=False)

    def halved(x: Tensor, filters: int) -> Tensor:
        return m.unit(x, filters, 3, 2, F.silu)

    def narrow(x: Tensor, filters: int) -> Tensor:
        return m.unit(x, filters, 1, 1, F.silu)

    def grid(x: Tensor) -> Tensor:
        """Return boxes per anchor and cell in the last dimension, between 0 and 1."""
        y = m.conv(x, anchors * (classes + 5), 1)
        batch, _, height, columns = y.shape
        return y.view(batch, anchors, -1, height, columns).permute(0, 1, 3, 4, 2).sigmoid()

    x = stage(halved(m.unit(x, w, 6, 2, F.silu), 2 * w), 2 * w)
    third = stage(halved(x, 4 * w), 4 * w, depth=2 * depth)
    fourth = stage(halved(third, 8 * w), 8 * w, depth=2 * depth)
    fifth = stage(halved(fourth, 16 * w), 16 * w)
    seen = [
        narrow(fifth, 8 * w)
    ]  # maxima over larger and larger windows, side by side (SPP; He et al., 2014)
    for _ in range(3):
        seen.append(F.max_pool2d(seen[-1], 5, 1, 2))
    five = narrow(narrow(torch.cat(seen, 1), 16 * w), 8 * w)
    four = narrow(joined(torch.cat([_doubled(five), fourth], 1), 8 * w), 4 * w)
    three = joined(torch.cat([_doubled(four), third], 1), 4 * w)
    middle = joined(torch.cat([halved(three, 4 * w), four], 1), 8 * w)
    small = joined(torch.cat([halved(middle, 8 * w), five], 1), 16 * w)
    return [grid(x) for x in (three, middle, small)]


# --- images from noise, from other images, and from the pixels before


def _transposed(
    m: Scope,
    x: Tensor,
    filters: int,
    size: int = 4,
    stride: int = 2,
    bias: bool = False,
    output_padding: int = 0,
) -> Tensor:
    padding = 1 if stride > 1 else 0
    return m(x, lambda c: nn.ConvTranspose2d(c, filters, size, stride, padding, output_padding, bias=bias))


def dcgan(m: Scope, x: Tensor, width: int = 64, channels: int = 3) -> Tensor:
    """DCGAN: a 64x64 image from a vector, by transposed convolutions (Radford et al., 2015)."""
    x = F.relu(m.norm(_transposed(m, x, 8 * width, stride=1)))
    for filters in (4 * width, 2 * width, width):
        x = F.relu(m.norm(_transposed(m, x, filters)))
    return torch.tanh(_transposed(m, x, channels))


def pix2pix(m: Scope, x: Tensor, width: int = 64, depth: int = 8) -> Tensor:
    """An image from another one through a U-Net of `depth` levels (Isola et al., 2017)."""

    def level(x: Tensor, number: int) -> Tensor:
        """Half the size and back through an inner block, concatenated with the input."""
        channels, last = x.shape[1], number == depth - 1
        y = F.leaky_relu(x, 0.2) if number else x
        y = m.conv(y, min(width << number, 8 * width), 4, 2, bias=False)
        if not last:
            y = level(m.norm(y) if number else y, number + 1)
        y = _transposed(m, F.relu(y), channels, bias=not number)
        return torch.cat([x, m.norm(y)], 1) if number else torch.tanh(y)

    return level(x, 0)


Norm = Callable[[int], nn.Module]


def _reflected(
    m: Scope, x: Tensor, filters: int, size: int, stride: int = 1, norm: Norm | None = None
) -> Tensor:
    y = m.conv(F.pad(x, (size // 2,) * 4, mode="reflect"), filters, size, stride, padding=0)
    return m(y, norm) if norm else y


def _residual(m: Scope, x: Tensor, norm: Norm) -> Tensor:
    width = x.shape[1]
    return x + _reflected(m, F.relu(_reflected(m, x, width, 3, norm=norm)), width, 3, norm=norm)


def cyclegan(m: Scope, x: Tensor, width: int = 64, blocks: int = 9) -> Tensor:
    """An image from another one through residual blocks with instance norms (Zhu et al., 2017)."""
    channels, norm = x.shape[1], nn.InstanceNorm2d
    x = F.relu(_reflected(m, x, width, 7, norm=norm))
    for filters in (2 * width, 4 * width):
        x = F.relu(m(m.conv(x, filters, 3, 2), norm))
    for _ in range(blocks):
        x = _residual(m, x, norm)
    for filters in (2 * width, width):
        x = F.relu(m(_transposed(m, x, filters, 3, bias=True, output_padding=1), norm))
    return torch.tanh(_reflected(m, x, channels, 7))


def style_transfer(m: Scope, x: Tensor, width: int = 32, blocks: int = 5) -> Tensor:
    """Style transfer: affine instance norms, and nearest upsampling before convolutions (Johnson et al., 2016; Ulyanov
    et al., 2016)."""
    norm = partial(nn.InstanceNorm2d, affine=True)
    for filters, size, stride in ((width, 9, 1), (2 * width, 3, 2), (4 * width, 3, 2)):
        x = F.relu(_reflected(m, x, filters, size, stride, norm))
    for _ in range(blocks):
        x = _residual(m, x, norm)
    for filters in (2 * width, width):
        x = F.relu(_reflected(m, F.interpolate(x, scale_factor=2), filters, 3, norm=norm))
    return _reflected(m, x, 3, 9)


def pixelcnn(m: Scope, x: Tensor, width: int = 128, blocks: int = 7, values: int = 256) -> Tensor:
    """PixelCNN: logits of every pixel's value given the preceding pixels (van den Oord et al., 2016)."""
    channels, half = x.shape[1], width // 2
    x = m(x, lambda c: MaskedConv(c, width, 7, False))
    for _ in range(blocks):
        y = F.relu(m.conv(F.relu(x), half, 1))
        x = x + m.conv(F.relu(m(y, lambda c: MaskedConv(c, half, 3, True))), width, 1)
    return m.conv(F.relu(m.conv(F.relu(x), width, 1)), channels * values, 1)


_PERIOD = 10_000.0


def _sinusoids(times: Tensor, features: int) -> Tensor:
    """Sinusoidal embedding of times."""
    steps = torch.arange(features // 2, device=times.device) / (features // 2)
    angles = times[:, None].float() * torch.exp(-math.log(_PERIOD) * steps)
    return torch.cat([angles.sin(), angles.cos()], 1).to(times.dtype)


def diffusion_unet(m: Scope, x: Tensor, width: int = 64, factors: Sequence[int] = (1, 2, 4)) -> Tensor:
    """The noise in an image at a time of its diffusion, a plane behind its channels (DDPM; Ho et al., 2020)."""

    def block(x: Tensor, filters: int) -> Tensor:
        """Residual block with group norms and a time embedding added between its two convolutions."""
        y = m.conv(F.silu(m.group_norm(x)), filters)
        y = y + m.linear(F.silu(time), filters)[:, :, None, None]
        shortcut = x if m.width(x) == filters else m.conv(x, filters, 1)
        return shortcut + m.conv(F.silu(m.group_norm(y)), filters)

    def attention(x: Tensor) -> Tensor:
        """Self-attention over all pixels, with a skip connection."""
        queries, keys, values = m.conv(m.group_norm(x), 3 * x.shape[1], 1).flatten(2).chunk(3, 1)
        weights = torch.softmax(queries.transpose(1, 2) @ keys * x.shape[1] ** -0.5, -1)
        return x + m.conv((values @ weights.transpose(1, 2)).reshape(x.shape), x.shape[1], 1)

    x, times = x[:, :-1], x[:, -1, 0, 0]
    channels, widths, across = x.shape[1], [width * factor for factor in factors], []
    time = m.linear(F.silu(m.linear(_sinusoids(times, width), 4 * width)), 4 * width)
    x = m.conv(x, width)
    for filters in widths:
        x = block(x, filters)
        across.append(x)
        x = x if filters == widths[-1] else m.conv(x, filters, 3, 2)
    x = block(attention(block(x, widths[-1])), widths[-1])
    for filters in reversed(widths):
        x = block(torch.cat([x, across.pop()], 1), filters)
        x = x if filters == widths[0] else m.conv(F.interpolate(x, scale_factor=2), filters)
    return m.conv(F.silu(m.group_norm(x)), channels)


# --- images made larger or freed of noise


def espcn(m: Scope, x: Tensor, scale: int = 3, width: int = 64) -> Tensor:
    """ESPCN: three convolutions on the small image, and a pixel shuffle (Shi et al., 2016)."""
    y = torch.tanh(m.conv(torch.tanh(m.conv(x, width, 5)), width // 2))
    return F.pixel_shuffle(m.conv(y, scale**2), scale)


def fsrcnn(m: Scope, x: Tensor, scale: int = 3, width: int = 56, narrow: int = 12, depth: int = 4) -> Tensor:
    """FSRCNN: narrow layers, and a transposed convolution at the end (Dong et al., 2016)."""
    for filters, size in ((width, 5), (narrow, 1), *((narrow, 3),) * depth, (width, 1)):
        x = m(m.conv(x, filters, size), nn.PReLU)
    return m(x, lambda c: nn.ConvTranspose2d(c, 1, 9, scale, 4, output_padding=scale - 1))


def _upscaled(m: Scope, x: Tensor, scale: int, width: int, body: Callable[[Tensor], Tensor]) -> Tensor:
    """Blocks and the way around them, then twice the size again and again, by shuffled pixels."""
    x = m.conv(x, width)
    x = x + m.conv(body(x), width)
    for _ in range(scale.bit_length() - 1):
        x = F.pixel_shuffle(m.conv(x, 4 * width), 2)
    return m.conv(x, 3)


def edsr(
    m: Scope, x: Tensor, scale: int = 2, width: int = 64, blocks: int = 16, factor: float = 0.1
) -> Tensor:
    """EDSR: residual blocks without norms, scaled down (Lim et al., 2017)."""

    def body(x: Tensor) -> Tensor:
        for _ in range(blocks):
            x = x + m.conv(F.relu(m.conv(x, width)), width) * factor
        return x

    return _upscaled(m, x, scale, width, body)


def rcan(m: Scope, x: Tensor, scale: int = 4, width: int = 64, groups: int = 4, blocks: int = 5) -> Tensor:
    """Groups of residual blocks whose channels are weighed by what their means decide on (Zhang et al., 2018)."""

    def block(x: Tensor) -> Tensor:
        y = m.conv(F.relu(m.conv(x, width)), width)
        inner = F.relu(m.conv(F.adaptive_avg_pool2d(y, 1), max(1, width // 16), 1))
        return x + y * torch.sigmoid(m.conv(inner, width, 1))

    def body(x: Tensor) -> Tensor:
        for _ in range(groups):
            y = x
            for _ in range(blocks):
                y = block(y)
            x = x + m.conv(y, width)
        return x

    return _upscaled(m, x, scale, width, body)


def dncnn(m: Scope, x: Tensor, width: int = 64, depth: int = 17) -> Tensor:
    """DnCNN: seventeen layers predict the noise, which is subtracted (Zhang et al., 2017)."""
    y = F.relu(m.conv(x, width))
    for _ in range(depth - 2):
        y = m.unit(y, width)
    return x - m.conv(y, x.shape[1], bias=False)


def _naf_block(m: Scope, x: Tensor) -> Tensor:
    """NAFNet block: a gated convolution with channel attention, then a gated MLP of 1x1 convolutions, no activation."""
    channels = x.shape[1]

    def gated(y: Tensor) -> Tensor:
        one, other = y.chunk(2, 1)
        return one * other

    def widened(y: Tensor) -> Tensor:
        return m.conv(m(y, PixelNorm), 2 * channels, 1)

    def scaled(y: Tensor) -> Tensor:
        return m.conv(y, channels, 1) * m.parameter(y, 1, channels, 1, 1)

    y = gated(m.conv(widened(x), 2 * channels, groups=2 * channels))
    y = x + scaled(y * m.conv(F.adaptive_avg_pool2d(y, 1), channels, 1))
    return y + scaled(gated(widened(y)))


def nafnet(
    m: Scope, x: Tensor, width: int = 32, down: Sequence[int] = (1, 1, 4), middle: int = 1,
    up: Sequence[int] = (1, 1, 1),
) -> Tensor:  # fmt: skip
    """A U-Net of gated blocks for deblurring and denoising (Chen et al., 2022)."""

    def blocks(y: Tensor, depth: int) -> Tensor:
        for _ in range(depth):
            y = _naf_block(m, y)
        return y

    y, across = m.conv(x, width), []
    for depth in down:
        y = blocks(y, depth)
        across.append(y)
        y = m.conv(y, 2 * y.shape[1], 2, 2, padding=0)
    y = blocks(y, middle)
    for depth in up:
        y = F.pixel_shuffle(m.conv(y, 2 * y.shape[1], 1, bias=False), 2)
        y = blocks(y + across.pop(), depth)
    return x + m.conv(y, 3)


def zero_dce(m: Scope, x: Tensor, width: int = 32, iterations: int = 8) -> Tensor:
    """Zero-DCE: iterated curves that brighten a dark image with values from 0 to 1 (Guo et al., 2020)."""
    x = x.clamp(0, 1)
    seen = [x]
    for _ in range(4):
        seen.append(F.relu(m.conv(seen[-1], width)))
    y = seen[4]
    for beside in (seen[3], seen[2]):
        y = F.relu(m.conv(torch.cat([beside, y], 1), width))
    for curve in torch.tanh(m.conv(torch.cat([seen[1], y], 1), 3 * iterations)).split(3, 1):
        x = x + curve * (x * x - x)
    return x
