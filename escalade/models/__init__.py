"""Networks in plain PyTorch, for examples and benchmarks.

Only FusedSpectralAutoencoder uses Escalade's kernels directly. `load_*` functions read weights from files; none are
included.
"""

from escalade.models.autoencoders import (
    ConvAutoencoder,
    FusedSpectralAutoencoder,
    SpectralAutoencoder,
    load_autoencoder,
)
from escalade.models.densenet import DenseNet, densenet121
from escalade.models.lenet import LeNet, load_lenet
from escalade.models.mobilenet import MobileNetV2, mobilenet_v2
from escalade.models.registry import MODELS, NAMES, example, model, settle
from escalade.models.resnet import ResNet, load_resnet, read_resnet, resnet18, resnet34, resnet50
from escalade.models.unet import UNet
from escalade.models.vgg import VGG, vgg16_bn

__all__ = [
    "MODELS",
    "NAMES",
    "VGG",
    "ConvAutoencoder",
    "DenseNet",
    "FusedSpectralAutoencoder",
    "LeNet",
    "MobileNetV2",
    "ResNet",
    "SpectralAutoencoder",
    "UNet",
    "densenet121",
    "example",
    "load_autoencoder",
    "load_lenet",
    "load_resnet",
    "mobilenet_v2",
    "model",
    "read_resnet",
    "resnet18",
    "resnet34",
    "resnet50",
    "settle",
    "vgg16_bn",
]
