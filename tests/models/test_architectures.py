"""Networks against their published formulas, written with PyTorch functions over the names of their weights.

Parameter counts do not show the position of a stride, a ReLU or a shortcut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade import models
from escalade.models.resnet import BasicBlock, Bottleneck

State = Mapping[str, torch.Tensor]


def _conv(x: torch.Tensor, state: State, name: str, stride: int = 1, groups: int = 1) -> torch.Tensor:
    """With padding that keeps the size for a stride of 1."""
    weight = state[f"{name}.weight"]
    return F.conv2d(x, weight, state.get(f"{name}.bias"), stride, weight.shape[2] // 2, groups=groups)


def _norm(x: torch.Tensor, state: State, name: str) -> torch.Tensor:
    mean, variance, weight, bias = (
        state[f"{name}.{part}"] for part in ("running_mean", "running_var", "weight", "bias")
    )
    shaped = [each[:, None, None] for each in (mean, variance, weight, bias)]
    return (x - shaped[0]) / (shaped[1] + 1e-5).sqrt() * shaped[2] + shaped[3]


def _linear(x: torch.Tensor, state: State, name: str) -> torch.Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def _resnet(state: State, x: torch.Tensor) -> torch.Tensor:
    small = state["conv1.weight"].shape[2] == 3
    x = F.relu(_norm(_conv(x, state, "conv1", 1 if small else 2), state, "bn1"))
    x = x if small else F.max_pool2d(x, 3, 2, 1)
    for stage in range(1, 5):
        for number in range(2):
            block = f"layer{stage}.{number}"
            stride = 2 if stage > 1 and number == 0 else 1
            around = x
            if f"{block}.downsample.0.weight" in state:
                around = _norm(
                    _conv(x, state, f"{block}.downsample.0", stride), state, f"{block}.downsample.1"
                )
            deep = f"{block}.conv3.weight" in state
            y = F.relu(_norm(_conv(x, state, f"{block}.conv1", 1 if deep else stride), state, f"{block}.bn1"))
            y = _norm(_conv(y, state, f"{block}.conv2", stride if deep else 1), state, f"{block}.bn2")
            if deep:
                y = _norm(_conv(F.relu(y), state, f"{block}.conv3"), state, f"{block}.bn3")
            x = F.relu(y + around)
    return _linear(x.mean((2, 3)), state, "fc")


def _vgg(state: State, x: torch.Tensor) -> torch.Tensor:
    for convolutions in ((0,), (4, 7)):
        for place in convolutions:
            x = F.relu(_norm(_conv(x, state, f"features.{place}"), state, f"features.{place + 1}"))
        x = F.max_pool2d(x, 2)
    x = F.adaptive_avg_pool2d(x, 2).flatten(1)
    x = F.relu(_linear(F.relu(_linear(x, state, "classifier.0")), state, "classifier.3"))
    return _linear(x, state, "classifier.6")


def _mobilenet(state: State, x: torch.Tensor) -> torch.Tensor:
    def layer(x: torch.Tensor, name: str, stride: int = 1, groups: int = 1) -> torch.Tensor:
        return F.relu6(_norm(_conv(x, state, f"{name}.0", stride, groups), state, f"{name}.1"))

    x = layer(x, "features.0", 2)
    for number, (stride, expands) in enumerate(((1, False), (2, True), (1, True)), start=1):
        block, y = f"features.{number}.conv", x
        if expands:
            y = layer(y, f"{block}.0")
        y = layer(y, f"{block}.{int(expands)}", stride, groups=y.shape[1])
        y = _norm(_conv(y, state, f"{block}.{1 + expands}"), state, f"{block}.{2 + expands}")
        x = x + y if x.shape == y.shape else y
    return _linear(layer(x, "features.4").mean((2, 3)), state, "classifier.1")


def _densenet(state: State, x: torch.Tensor) -> torch.Tensor:
    x = F.relu(_norm(_conv(x, state, "features.conv0", 2), state, "features.norm0"))
    x = F.max_pool2d(x, 3, 2, 1)
    for block, depth in ((1, 1), (2, 2)):
        for number in range(1, depth + 1):
            layer, y = f"features.denseblock{block}.denselayer{number}", x
            for half in (1, 2):
                y = _conv(F.relu(_norm(y, state, f"{layer}.norm{half}")), state, f"{layer}.conv{half}")
            x = torch.cat([x, y], 1)
        if block == 1:
            x = _conv(
                F.relu(_norm(x, state, "features.transition1.norm")), state, "features.transition1.conv"
            )
            x = F.avg_pool2d(x, 2)
    return _linear(F.relu(_norm(x, state, "features.norm5")).mean((2, 3)), state, "classifier")


def _unet(state: State, x: torch.Tensor) -> torch.Tensor:
    def twice(x: torch.Tensor, name: str) -> torch.Tensor:
        for place in (0, 3):
            x = F.relu(_norm(_conv(x, state, f"{name}.{place}"), state, f"{name}.{place + 1}"))
        return x

    kept = [twice(x, "down.0")]
    for level in (1, 2):
        kept.append(twice(F.max_pool2d(kept[-1], 2), f"down.{level}"))
    x = kept.pop()
    for number in range(2):
        if f"up.{number}.up.weight" in state:
            x = F.conv_transpose2d(x, state[f"up.{number}.up.weight"], state[f"up.{number}.up.bias"], 2)
        else:
            x = _conv(F.interpolate(x, scale_factor=2), state, f"up.{number}.up.1")
        x = twice(torch.cat([kept.pop(), x], 1), f"up.{number}.conv")
    return _conv(x, state, "head")


def _autoencoder(state: State, x: torch.Tensor) -> torch.Tensor:
    for number in range(2):
        x = F.max_pool2d(F.relu(_conv(x, state, f"convolutions.{number}")), 2)
    for number in (2, 3):
        x = F.interpolate(F.relu(_conv(x, state, f"convolutions.{number}")), scale_factor=2)
    return _conv(x, state, "convolutions.4")


def _lenet(state: State, x: torch.Tensor) -> torch.Tensor:
    x = F.max_pool2d(F.relu(F.conv2d(x, state["conv1.weight"])), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, state["conv2.weight"])), 4, ceil_mode=True)
    return _linear(F.relu(_linear(x.flatten(1), state, "fc1")), state, "fc2")


def _spectral(state: State, x: torch.Tensor) -> torch.Tensor:
    frames = F.layer_norm(x.view(-1, 3, 8), (8,), state["frame_norm.weight"], state["frame_norm.bias"])
    joined = F.gelu(_linear(frames, state, "frame_encoder")).flatten(1)
    basis = state["basis"] / state["basis"].norm(dim=1, keepdim=True)
    weights = (state["latent_norm.weight"], state["latent_norm.bias"])
    latent = F.layer_norm(joined @ basis.T, (5,), *weights)
    latent = F.gelu(_linear(latent, state, "latent_layer"))
    return _linear((latent @ basis).view(-1, 3, 8), state, "frame_decoder").flatten(1)


IMAGE = (3, 32, 32)
NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[State, torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "basic": (lambda: models.ResNet(BasicBlock, (2,) * 4, 5, width=4), _resnet, (3, 64, 64)),
    "bottleneck": (lambda: models.ResNet(Bottleneck, (2,) * 4, 5, True, 4), _resnet, IMAGE),
    "vgg": (lambda: models.VGG(((4,), (8, 8)), 5, 3, 8, 2), _vgg, IMAGE),
    "mobilenet": (
        lambda: models.MobileNetV2(((1, 8, 1, 1), (6, 16, 2, 2)), 5, 3, 1.0, 8, 16), _mobilenet, IMAGE,
    ),
    "densenet": (lambda: models.DenseNet((1, 2), 4, 8, 2, 5), _densenet, IMAGE),
    "unet": (lambda: models.UNet(3, 5, 4, 2), _unet, IMAGE),
    "unet_upsampled": (lambda: models.UNet(3, 5, 4, 2, upsample=True), _unet, IMAGE),
    "autoencoder": (lambda: models.ConvAutoencoder(6), _autoencoder, IMAGE),
    "lenet": (models.LeNet, _lenet, (1, 86, 86)),
    "spectral": (lambda: models.SpectralAutoencoder(8, 3, 5), _spectral, (24,)),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_their_formulas(name: str) -> None:
    make, formula, item = NETWORKS[name]
    torch.manual_seed(3)
    model, x = make(), torch.randn(2, *item)
    models.settle(model, torch.randn(4, *item))
    model.eval().double()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.testing.assert_close(model(x.double()), formula(model.state_dict(), x.double()))
