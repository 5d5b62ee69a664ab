"""Networks in plain PyTorch: what the engine compiles and the benchmarks run.

Nothing here knows of Escalade's kernels. Weights are read from files with `load_*` functions; none are shipped.
"""

from escalade.models.autoencoder import ConvAutoencoder, load_autoencoder
from escalade.models.lenet import LeNet, load_lenet
from escalade.models.resnet import ResNet, load_resnet, resnet18, resnet34, resnet50
from escalade.models.spectral_autoencoder import SpectralAutoencoder

__all__ = [
    "ConvAutoencoder",
    "LeNet",
    "ResNet",
    "SpectralAutoencoder",
    "load_autoencoder",
    "load_lenet",
    "load_resnet",
    "resnet18",
    "resnet34",
    "resnet50",
]
