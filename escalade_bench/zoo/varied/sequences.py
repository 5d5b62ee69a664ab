"""Sound and other sequences: dilated causal convolutions, and raw waveforms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.blocks import takes


class CausalConv(nn.Conv1d):
    """A convolution that sees nothing behind its own step."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        before = (self.kernel_size[0] - 1) * self.dilation[0]
        return super().forward(F.pad(input, (before, 0)))


class GatedBlock(nn.Module):
    """A gated dilated convolution, a part of whose result skips to the end."""

    def __init__(self, channels: int, skipped: int, dilation: int) -> None:
        super().__init__()
        self.filter = CausalConv(channels, channels, 2, dilation=dilation)
        self.gate = CausalConv(channels, channels, 2, dilation=dilation)
        self.out, self.skip = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, skipped, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x))
        return x + self.out(y), self.skip(y)


class WaveNet(nn.Module):
    """The likelihood of each value of a waveform, given those in front of it (van den Oord et al., 2016)."""

    def __init__(
        self, width: int = 64, skipped: int = 128, depth: int = 8, stacks: int = 2, values: int = 256
    ) -> None:
        super().__init__()
        self.first = CausalConv(1, width, 2)
        self.blocks = nn.ModuleList(
            GatedBlock(width, skipped, 1 << level) for _ in range(stacks) for level in range(depth)
        )
        self.last = nn.Sequential(
            nn.ReLU(), nn.Conv1d(skipped, skipped, 1), nn.ReLU(), nn.Conv1d(skipped, values, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skipped = self.first(x), []
        for block in self.blocks:
            x, skip = block(x)
            skipped.append(skip)
        return self.last(sum(skipped[1:], skipped[0]))


@takes(1, 4096)
def wavenet() -> nn.Module:
    return WaveNet()


class TemporalBlock(nn.Module):
    """Two dilated causal convolutions with normed weights, and the way around them."""

    def __init__(self, channels: int, filters: int, size: int, dilation: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (channels, filters):
            layer = CausalConv(before, filters, size, dilation=dilation)
            layers += [nn.utils.parametrizations.weight_norm(layer), nn.ReLU(), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Identity() if channels == filters else nn.Conv1d(channels, filters, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.shortcut(x) + self.layers(x))


class TCN(nn.Module):
    """A sequence's class from its last step (Bai et al., 2018)."""

    def __init__(
        self, channels: int = 16, widths: Sequence[int] = (128,) * 6, size: int = 5, classes: int = 10
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                TemporalBlock(before, after, size, 1 << level)
                for level, (before, after) in enumerate(zip([channels, *widths], widths, strict=False))
            )
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)[:, :, -1])


@takes(16, 1024)
def tcn() -> nn.Module:
    return TCN()


class M5(nn.Module):
    """A word from a waveform, by few convolutions and pools (Dai et al., 2017)."""

    def __init__(self, width: int = 128, classes: int = 35) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, size, stride in (
            (1, width, 80, 4), (width, width, 3, 1), (width, 2 * width, 3, 1), (2 * width, 4 * width, 3, 1),
        ):  # fmt: skip
            layers += [
                nn.Conv1d(before, after, size, stride),
                nn.BatchNorm1d(after),
                nn.ReLU(),
                nn.MaxPool1d(4),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.features(x)
        y = F.avg_pool1d(y, y.shape[-1]).permute(0, 2, 1)
        return F.log_softmax(self.head(y), dim=2)


@takes(1, 8000)
def m5() -> nn.Module:
    return M5()
