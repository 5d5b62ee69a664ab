"""The networks that `escalade bench` measures: random weights, and images that are told apart by them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from escalade import models
from escalade.errors import UnsupportedError
from escalade.models import ResNet
from escalade.models.resnet import BasicBlock, Bottleneck

SIZE = 224
_CALIBRATION_IMAGES = 4
_BLOCK_SCALE = 0.3
_REFERENCE_CHUNK = 16
"""Images whose float64 values are in memory at once."""


@dataclass(frozen=True)
class Workload:
    name: str
    make: Callable[[], ResNet]

    def model(self, size: int = SIZE, seed: int = 0) -> ResNet:
        """On the CPU, in fp32 and evaluation mode; the same for the same seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
            x = images(_CALIBRATION_IMAGES, size, seed + 1)
            models.settle(model, x)
            _damp(model, x)
        return model


WORKLOADS = {
    make.__name__: Workload(make.__name__, make)
    for make in (models.resnet18, models.resnet34, models.resnet50)
}


def workload(name: str) -> Workload:
    if name not in WORKLOADS:
        raise UnsupportedError(f"there is no workload {name!r}; there is {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _damp(model: ResNet, x: torch.Tensor) -> None:
    """Blocks of a trained network add little to what goes around them.

    With full scales a network of random weights is chaotic: rounding errors grow from block to block, eightfold over
    a ResNet-50.
    """
    with torch.no_grad():
        for block in model.modules():
            if isinstance(block, BasicBlock | Bottleneck):
                last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
                last.weight.mul_(_BLOCK_SCALE)
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.reset_running_stats()
                norm.momentum = None  # a plain average, of one batch
        model.train()(x)
    model.eval()


def images(count: int, size: int = SIZE, seed: int = 0) -> torch.Tensor:
    """Normalised images [count, 3, size, size]: blotches of several sizes, each with its own colours and contrast.

    White noise would not do: to a network all of it looks the same.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x = noise(count, 3, 1, 1).expand(count, 3, size, size)
    for cells in itertools.takewhile(lambda cells: cells <= size // 2, (2, 5, 14, 40, 112)):
        blotches = F.interpolate(noise(count, 3, cells, cells), (size, size), mode="bilinear")
        x = x + noise(count, 1, 1, 1) * blotches
    return 0.5 * x + 0.1 * noise(count, 3, size, size)


def reference(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The logits in float64, where x is."""
    exact = copy.deepcopy(model).to(x.device).double()
    with torch.no_grad():
        return torch.cat([exact(part.double()) for part in x.split(_REFERENCE_CHUNK)])
