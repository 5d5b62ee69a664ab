"""The networks by name, with what they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.models.autoencoder import ConvAutoencoder
from escalade.models.densenet import densenet121
from escalade.models.lenet import LeNet
from escalade.models.mobilenet import mobilenet_v2
from escalade.models.resnet import resnet18, resnet34, resnet50
from escalade.models.spectral_autoencoder import SpectralAutoencoder
from escalade.models.unet import UNet
from escalade.models.vgg import vgg16_bn

SEED = 20
_SETTLING_BATCH = 4
_SETTLING_SIDE = 64


@dataclass(frozen=True)
class Known:
    make: Callable[[], nn.Module]
    item: tuple[int, ...]
    """Sizes of one item of a batch."""


MODELS = {
    "resnet18": Known(resnet18, (3, 224, 224)),
    "resnet34": Known(resnet34, (3, 224, 224)),
    "resnet50": Known(resnet50, (3, 224, 224)),
    "vgg16_bn": Known(vgg16_bn, (3, 224, 224)),
    "unet": Known(UNet, (3, 256, 256)),
    "mobilenet_v2": Known(mobilenet_v2, (3, 224, 224)),
    "densenet121": Known(densenet121, (3, 224, 224)),
    "autoencoder": Known(ConvAutoencoder, (3, 32, 32)),
    "lenet": Known(LeNet, (1, 86, 86)),
    "spectral_autoencoder": Known(SpectralAutoencoder, (320,)),
}
NAMES = tuple(MODELS)


def known(name: str) -> Known:
    if name not in MODELS:
        raise UnsupportedError(f"there is no model {name!r}; there is {', '.join(MODELS)}")
    return MODELS[name]


def model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The network of that name in evaluation mode and an input of batch 1: the same random numbers every time."""
    wanted = known(name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        made = wanted.make()
        settle(made, torch.randn(_SETTLING_BATCH, *(min(size, _SETTLING_SIDE) for size in wanted.item)))
        return made.eval(), torch.randn(1, *wanted.item)


def example(name: str, batch: int = 1) -> torch.Tensor:
    """Random numbers that the network takes."""
    if batch < 1:
        raise UnsupportedError(f"a batch of {batch}: it must be at least 1")
    return torch.randn(batch, *known(name).item)


def settle(network: nn.Module, x: torch.Tensor) -> None:
    """Gives BatchNorm layers scales, shifts and statistics as training leaves them: the values of a real input.

    Freshly made layers pass their input on unchanged, which folding them would not show; statistics drawn at random
    would let values grow from layer to layer until they leave fp16's range.
    """
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    norms = [layer for layer in network.modules() if isinstance(layer, kinds)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    with torch.no_grad():
        for norm in norms:
            if norm.affine:
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.normal_(0, 0.1)
            norm.momentum = None  # the plain average over all batches, here one
        network.eval()  # a branch that is there for training alone may not fit the input
        for norm in norms:
            norm.train()
        network(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    network.eval()
