"""ResNet-18, -34 and -50 for images, with torchvision's parameter names."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import torch
from torch import nn

from escalade.errors import UnsupportedError


def _conv_bn(channels: int, filters: int, size: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(channels, filters, size, stride, size // 2, bias=False)
    return conv, nn.BatchNorm2d(filters)


def _shortcut(channels: int, filters: int, stride: int) -> nn.Sequential | None:
    """The identity where it fits, else a strided 1x1 convolution."""
    if stride == 1 and channels == filters:
        return None
    return nn.Sequential(*_conv_bn(channels, filters, 1, stride))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the way around them."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv_bn(channels, width, 3, stride)
        self.conv2, self.bn2 = _conv_bn(width, width, 3)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + around)


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (which carries the stride), 1x1 up, and the way around them."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        filters = width * self.expansion
        self.conv1, self.bn1 = _conv_bn(channels, width, 1)
        self.conv2, self.bn2 = _conv_bn(width, width, 3, stride)
        self.conv3, self.bn3 = _conv_bn(width, filters, 1)
        self.downsample = _shortcut(channels, filters, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        around = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + around)


class ResNet(nn.Module):
    """Stem, four stages of blocks, global average, classifier."""

    def __init__(
        self, block: type[BasicBlock] | type[Bottleneck], depths: Sequence[int], classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv_bn(3, 64, 7, 2)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels = 64
        stages = []
        for number, depth in enumerate(depths):
            width = 64 << number
            blocks = []
            for position in range(depth):
                blocks.append(block(channels, width, 2 if number > 0 and position == 0 else 1))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(classes: int = 1000) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet34(classes: int = 1000) -> ResNet:
    return ResNet(BasicBlock, (3, 4, 6, 3), classes)


def resnet50(classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def load_resnet(model: ResNet, path: str | pathlib.Path) -> ResNet:
    """Fills `model` from a `.safetensors` or `.pth` file with torchvision's names; evaluation mode, fp32.

    Of a `.pth` file only tensors are read (`weights_only`), never code.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise UnsupportedError(f"there is no file {file}")
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        state = load_file(str(file))
    elif file.suffix in (".pth", ".pt"):
        state = torch.load(file, map_location="cpu", weights_only=True)
    else:
        raise UnsupportedError(f"{file.name}: weights are read from .safetensors, .pth and .pt files")
    wanted = model.state_dict()
    counters = {name for name in wanted if name.endswith("num_batches_tracked")}
    missing = sorted(set(wanted) - set(state) - counters)
    extra = sorted(set(state) - set(wanted))
    wrong = sorted(name for name in set(wanted) & set(state) if wanted[name].shape != state[name].shape)
    if missing or extra or wrong:
        raise UnsupportedError(
            f"{file.name} does not fit this network: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(extra)} are not known {extra[:3]}, {len(wrong)} have another shape {wrong[:3]}"
        )
    model.load_state_dict({name: value.to(wanted[name].dtype) for name, value in state.items()}, strict=False)
    return model.eval()
