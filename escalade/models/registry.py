"""Networks by name, with their input shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.models.autoencoders import ConvAutoencoder, SpectralAutoencoder
from escalade.models.densenet import densenet121
from escalade.models.lenet import LeNet
from escalade.models.mobilenet import mobilenet_v2
from escalade.models.resnet import resnet18, resnet34, resnet50
from escalade.models.unet import UNet
from escalade.models.vgg import vgg16_bn

SEED = 20
_SETTLING_BATCH = 4
_SETTLING_SIDE = 64


@dataclass(frozen=True)
class RegisteredModel:
    make: Callable[[], nn.Module]
    item: tuple[int, ...]
    """Shape of one item of a batch."""


MODELS = {
    "resnet18": RegisteredModel(resnet18, (3, 224, 224)),
    "resnet34": RegisteredModel(resnet34, (3, 224, 224)),
    "resnet50": RegisteredModel(resnet50, (3, 224, 224)),
    "vgg16_bn": RegisteredModel(vgg16_bn, (3, 224, 224)),
    "unet": RegisteredModel(UNet, (3, 256, 256)),
    "mobilenet_v2": RegisteredModel(mobilenet_v2, (3, 224, 224)),
    "densenet121": RegisteredModel(densenet121, (3, 224, 224)),
    "autoencoder": RegisteredModel(ConvAutoencoder, (3, 32, 32)),
    "lenet": RegisteredModel(LeNet, (1, 86, 86)),
    "spectral_autoencoder": RegisteredModel(SpectralAutoencoder, (320,)),
}
NAMES = tuple(MODELS)


def known(name: str) -> RegisteredModel:
    if name not in MODELS:
        raise UnsupportedError(f"model {name!r}: supported are {', '.join(MODELS)}")
    return MODELS[name]


def model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network in evaluation mode with seeded random weights, and an input of batch size 1."""
    entry = known(name)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        network = entry.make()
        settle(network, torch.randn(_SETTLING_BATCH, *(min(size, _SETTLING_SIDE) for size in entry.item)))
        return network.eval(), torch.randn(1, *entry.item)


def example(name: str, batch: int = 1) -> torch.Tensor:
    """Return a random input for the network."""
    if batch < 1:
        raise UnsupportedError(f"batch={batch}: must be at least 1")
    return torch.randn(batch, *known(name).item)


def settle(network: nn.Module, x: torch.Tensor) -> None:
    """Give BatchNorm layers random scales and shifts, and the statistics of a real input.

    New layers are the identity, so a bug in folding them would not show. Random statistics would let activations grow
    from layer to layer until they overflow fp16.
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
            norm.momentum = None  # cumulative average, so that one batch sets the statistics
        network.eval()  # training-only branches may not fit the input
        for norm in norms:
            norm.train()
        network(x)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    network.eval()
