"""Networks on patches: mixers, vision transformers, and transformers inside a convolutional network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.blocks import Around, classifier, conv


class ConvMixer(nn.Sequential):
    """Depthwise and 1x1 convolutions over patches (Trockman and Kolter, 2022)."""

    def __init__(
        self, width: int = 512, depth: int = 12, size: int = 8, patch: int = 7, classes: int = 1000
    ) -> None:
        def behind(layer: nn.Conv2d) -> nn.Sequential:
            return nn.Sequential(layer, nn.GELU(), nn.BatchNorm2d(width))

        layers = [behind(nn.Conv2d(3, width, patch, patch))]
        for _ in range(depth):
            spatial = behind(nn.Conv2d(width, width, size, groups=width, padding="same"))
            layers.append(nn.Sequential(Around(spatial), behind(nn.Conv2d(width, width, 1))))
        super().__init__(*layers, classifier(width, classes))


def _mlp(features: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(features, inner), nn.GELU(), nn.Linear(inner, features))


class MixerBlock(nn.Module):
    """Mixer block: an MLP over patches, then one over channels."""

    def __init__(self, patches: int, width: int, between_patches: int, between_channels: int) -> None:
        super().__init__()
        self.norm1, self.over_patches = nn.LayerNorm(width), _mlp(patches, between_patches)
        self.norm2, self.over_channels = nn.LayerNorm(width), _mlp(width, between_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.over_patches(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))


class MLPMixer(nn.Module):
    """MLP-Mixer: alternating MLPs over patches and channels: S/16 (Tolstikhin et al., 2021)."""

    def __init__(
        self, side: int = 224, patch: int = 16, width: int = 512, depth: int = 8, classes: int = 1000
    ) -> None:
        super().__init__()
        patches = (side // patch) ** 2
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(
            *(MixerBlock(patches, width, width // 2, 4 * width) for _ in range(depth)), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class SelfAttention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = self.queries_keys_values(x).unflatten(-1, (3, self.heads, -1))
        queries, keys, values = (each.transpose(-3, -2) for each in split.unbind(-3))
        seen = F.scaled_dot_product_attention(queries, keys, values)
        return self.out(seen.transpose(-3, -2).flatten(-2))


def transformer_block(width: int, heads: int, inner: int) -> nn.Sequential:
    """Transformer block: attention and an MLP, each with pre-norm and a skip connection."""
    return nn.Sequential(
        Around(nn.LayerNorm(width), SelfAttention(width, heads)),
        Around(nn.LayerNorm(width), _mlp(width, inner)),
    )


class VisionTransformer(nn.Module):
    """Vision transformer with a class token: S/16 (Dosovitskiy et al., 2021)."""

    def __init__(
        self,
        side: int = 224,
        patch: int = 16,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (side // patch) ** 2 + 1, width))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.Sequential(*(transformer_block(width, heads, 4 * width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


def _silu(channels: int, filters: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return conv(channels, filters, size, stride, groups=groups, activation=nn.SiLU)


def _inverted(channels: int, filters: int, stride: int = 1) -> nn.Module:
    wide = 4 * channels
    layers = (
        _silu(channels, wide, 1),
        _silu(wide, wide, 3, stride, wide),
        conv(wide, filters, 1, activation=nn.Identity),
    )
    return Around(*layers) if stride == 1 and channels == filters else nn.Sequential(*layers)


class TransformerAmongPixels(nn.Module):
    """MobileViT block: a transformer over pixels at the same position of all patches, between convolutions."""

    def __init__(self, channels: int, width: int, depth: int, heads: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.local = nn.Sequential(_silu(channels, channels), nn.Conv2d(channels, width, 1, bias=False))
        blocks = (transformer_block(width, heads, 2 * width) for _ in range(depth))
        self.transformer = nn.Sequential(*blocks, nn.LayerNorm(width))
        self.back, self.joined = _silu(width, channels, 1), _silu(2 * channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.local(x)
        batch, width, rows, columns = y.shape
        side = self.patch
        tall, wide = rows // side, columns // side
        y = y.reshape(batch, width, tall, side, wide, side).permute(0, 3, 5, 2, 4, 1)
        y = self.transformer(y.reshape(batch, side * side, tall * wide, width))
        y = y.reshape(batch, side, side, tall, wide, width).permute(0, 5, 3, 1, 4, 2)
        return self.joined(torch.cat([x, self.back(y.reshape(batch, width, rows, columns))], 1))


class MobileViT(nn.Sequential):
    """MobileViT: inverted bottlenecks with small transformers in between: about XS (Mehta and Rastegari, 2022)."""

    def __init__(self, width: int = 16, features: int = 96, heads: int = 4, classes: int = 1000) -> None:
        w, f = width, features
        super().__init__(
            _silu(3, w, stride=2),
            _inverted(w, 2 * w),
            _inverted(2 * w, 3 * w, 2),
            _inverted(3 * w, 3 * w),
            _inverted(3 * w, 4 * w, 2),
            TransformerAmongPixels(4 * w, f, 2, heads, 2),
            _inverted(4 * w, 5 * w, 2),
            TransformerAmongPixels(5 * w, f + f // 4, 4, heads, 2),
            _inverted(5 * w, 6 * w, 2),
            TransformerAmongPixels(6 * w, f + f // 2, 3, heads, 2),
            _silu(6 * w, 24 * w, 1),
            classifier(24 * w, classes),
        )
