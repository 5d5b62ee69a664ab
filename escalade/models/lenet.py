"""Small LeNet for 86x86 images: two 7x7 convolutions, two linear layers."""

from __future__ import annotations

import pathlib

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.models.weight_files import FlatFile


class LeNet(nn.Module):
    """LeNet for inputs of [batch, 1, 86, 86] with gray values from 0 to 255."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 7, bias=False)
        self.pool1 = nn.MaxPool2d(2)
        self.conv2 = nn.Conv2d(4, 16, 7, bias=False)
        self.pool2 = nn.MaxPool2d(4, ceil_mode=True)
        self.fc1 = nn.Linear(16 * 9 * 9, 32)
        self.fc2 = nn.Linear(32, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool1(torch.relu(self.conv1(x)))
        x = self.pool2(torch.relu(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


def load_lenet(path: str | pathlib.Path) -> LeNet:
    """Read a flat file with a layer count, then for each layer its size (0 without parameters), weight and bias.

    The file has biases for the convolutions, which the network that it was trained with ignores; so does this one.
    """
    model = LeNet()
    file = FlatFile(path)
    ignored = torch.empty(4), torch.empty(16)
    layers = iter(
        (
            (model.conv1.weight, ignored[0]),
            (model.conv2.weight, ignored[1]),
            tuple(model.fc1.parameters()),
            tuple(model.fc2.parameters()),
        )
    )
    filled = 0
    for _ in range(file.count()):
        size = file.count()
        if size:
            parameters = next(layers, None)
            if parameters is None:
                raise UnsupportedError(
                    f"{pathlib.Path(path).name} has more than LeNet's four layers with parameters"
                )
            file.fill(parameters, size)
            filled += 1
    file.end()
    if filled != 4:
        raise UnsupportedError(
            f"{pathlib.Path(path).name} has {filled} layers with parameters; LeNet has four"
        )
    return model.eval()
