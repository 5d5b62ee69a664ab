"""ResNet-18, -34 and -50 with torchvision's parameter names, and readers for their weights."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.models.weight_files import load_weights, read_tensors, require_fit
from escalade.terminal_text import printable


def _conv_bn(channels: int, filters: int, size: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(channels, filters, size, stride, size // 2, bias=False)
    return conv, nn.BatchNorm2d(filters)


def _shortcut(channels: int, filters: int, stride: int) -> nn.Sequential | None:
    """Return None for the identity if the shapes match, else a strided 1x1 convolution."""
    if stride == 1 and channels == filters:
        return None
    return nn.Sequential(*_conv_bn(channels, filters, 1, stride))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv_bn(channels, width, 3, stride)
        self.conv2, self.bn2 = _conv_bn(width, width, 3)
        self.downsample = _shortcut(channels, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + shortcut)


class Bottleneck(nn.Module):
    """1x1 reduction, 3x3 with the stride, 1x1 expansion, with a shortcut."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        filters = width * self.expansion
        self.conv1, self.bn1 = _conv_bn(channels, width, 1)
        self.conv2, self.bn2 = _conv_bn(width, width, 3, stride)
        self.conv3, self.bn3 = _conv_bn(width, filters, 1)
        self.downsample = _shortcut(channels, filters, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + shortcut)


class ResNet(nn.Module):
    """Stem, four stages of blocks, global average pool, classifier.

    With `small_images` (CIFAR's 32x32) the stem is one 3x3 convolution without downsampling. `width` is the number of
    channels of the stem, doubled by every stage but the first.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        classes: int = 1000,
        small_images: bool = False,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.layers = sum(depths) * (2 if block is BasicBlock else 3) + 2
        self.small_images = small_images
        self.conv1, self.bn1 = _conv_bn(3, width, 3) if small_images else _conv_bn(3, width, 7, 2)
        self.maxpool = nn.Identity() if small_images else nn.MaxPool2d(3, 2, 1)
        channels = width
        stages = []
        for number, depth in enumerate(depths):
            inner = width << number
            blocks = []
            for position in range(depth):
                blocks.append(block(channels, inner, 2 if number > 0 and position == 0 else 1))
                channels = inner * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def resnet18(classes: int = 1000, small_images: bool = False) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), classes, small_images)


def resnet34(classes: int = 1000, small_images: bool = False) -> ResNet:
    return ResNet(BasicBlock, (3, 4, 6, 3), classes, small_images)


def resnet50(classes: int = 1000, small_images: bool = False) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, small_images)


def load_resnet(model: ResNet, path: str | pathlib.Path) -> ResNet:
    """Load weights from a `.safetensors`, `.pth` or `.pt` file. The model is returned in evaluation mode.

    Parameter names are torchvision's (and timm's), or those common for CIFAR (`shortcut`, `linear`). `.pth` and `.pt`
    files are read with `weights_only`, so no code in them runs.
    """
    file = pathlib.Path(path)
    return _filled(model, _read_state(file), file)


def read_resnet(path: str | pathlib.Path) -> ResNet:
    """Create a ResNet from a weights file. Depth, width and classes follow from the shapes of the weights."""
    file = pathlib.Path(path)
    state = _read_state(file)
    stages = (re.match(r"layer(\d)\.(\d+)\.", name) for name in state)
    blocks = {(int(match[1]), int(match[2])) for match in stages if match}
    depths = [sum(stage == number for stage, _ in blocks) for number in range(1, 5)]
    stem, head = state.get("conv1.weight"), state.get("fc.weight")
    if not all(depths) or stem is None or stem.dim() != 4 or head is None or not head.dim():
        raise UnsupportedError(
            f"{file.name} does not contain a ResNet with torchvision's names (conv1, layer1 to layer4, fc); "
            f"its first tensors are {sorted(state)[:3]}"
        )
    block = Bottleneck if "layer1.0.conv3.weight" in state else BasicBlock
    make = partial(ResNet, block, depths, len(head), stem.shape[2:] == (3, 3), len(stem))
    with torch.device("meta"):  # check the shapes before allocating memory for them
        require_fit(make(), state, printable(file.name))
    return _filled(make(), state, file)


def _filled(model: ResNet, state: Mapping[str, torch.Tensor], file: pathlib.Path) -> ResNet:
    load_weights(model, state, printable(file.name))
    return model.eval()


def _read_state(file: pathlib.Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file, renamed to torchvision's names."""
    return {_torchvision_name(name): value for name, value in read_tensors(file).items()}


def _torchvision_name(name: str) -> str:
    name = name.removeprefix("module.")  # added by DataParallel and DDP
    name = re.sub(r"^(layer\d\.\d+)\.shortcut\.", r"\1.downsample.", name)
    return re.sub(r"^linear\.", "fc.", name)
