"""Networks of many families besides classifiers in plain PyTorch, each at a usual size.

Constructors take no arguments and have the sizes of one item as `example_shape`. The underlying classes take widths and
depths, for smaller versions. `escalade bench coverage escalade_bench.zoo.varied` measures them all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from escalade.models.unet import UNet
from escalade_bench.zoo.varied import classifiers, dense, generators, patches, restoration, sequences


@dataclass(frozen=True)
class Network:
    """A constructor with its input shape as `example_shape`."""

    make: Callable[[], nn.Module]
    example_shape: tuple[int, ...]

    def __call__(self) -> nn.Module:
        return self.make()


NETWORKS: Mapping[str, Network] = {
    "cbam_resnet": Network(partial(classifiers.Weighted, classifiers.CBAM), (3, 224, 224)),
    "convmixer": Network(patches.ConvMixer, (3, 224, 224)),
    "coordconv": Network(classifiers.CoordNet, (3, 128, 128)),
    "csp_detector": Network(dense.CSPDetector, (3, 416, 416)),
    "cyclegan": Network(generators.ResNetGenerator, (3, 256, 256)),
    "dcgan": Network(generators.DCGenerator, (100, 1, 1)),
    "deeplab": Network(dense.DeepLab, (3, 256, 256)),
    "diffusion_unet": Network(lambda: generators.NoiseMapped(generators.DiffusionUNet()), (4, 64, 64)),
    "dncnn": Network(restoration.DnCNN, (1, 256, 256)),
    "eca_resnet": Network(partial(classifiers.Weighted, classifiers.ECA), (3, 224, 224)),
    "edsr": Network(restoration.EDSR, (3, 128, 128)),
    "espcn": Network(restoration.ESPCN, (1, 240, 320)),
    "frames_and_motion": Network(sequences.FramesAndMotion, (8, 3, 112, 112)),
    "fsrcnn": Network(restoration.FSRCNN, (1, 240, 320)),
    "ghostnet": Network(classifiers.GhostNet, (3, 224, 224)),
    "hourglass": Network(dense.Hourglass, (3, 256, 256)),
    "hrnet": Network(dense.HRNet, (3, 256, 192)),
    "m5": Network(sequences.M5, (1, 8000)),
    "mlp_mixer": Network(patches.MLPMixer, (3, 224, 224)),
    "mobilevit": Network(patches.MobileViT, (3, 256, 256)),
    "nafnet": Network(restoration.NAFNet, (3, 256, 256)),
    "pix2pix": Network(generators.UNetGenerator, (3, 256, 256)),
    "pixelcnn": Network(generators.PixelCNN, (1, 28, 28)),
    "rcan": Network(restoration.RCAN, (3, 64, 64)),
    "resnet3d": Network(sequences.ResNet3D, (3, 16, 112, 112)),
    "retinanet": Network(dense.RetinaNet, (3, 256, 256)),
    "se_resnet": Network(partial(classifiers.Weighted, classifiers.SE), (3, 224, 224)),
    "siamese": Network(lambda: classifiers.OnPairs(classifiers.Siamese()), (2, 1, 105, 105)),
    "sknet": Network(classifiers.SKNet, (3, 224, 224)),
    "standardised_resnet": Network(classifiers.StandardisedResNet, (3, 224, 224)),
    "style_transfer": Network(generators.StyleTransfer, (3, 256, 256)),
    "tcn": Network(sequences.TCN, (16, 1024)),
    "unet_512": Network(UNet, (3, 512, 512)),
    "vit_small": Network(patches.VisionTransformer, (3, 224, 224)),
    "wavenet": Network(sequences.WaveNet, (1, 4096)),
    "zero_dce": Network(restoration.ZeroDCE, (3, 256, 256)),
}
__all__ = list(NETWORKS)


def __getattr__(name: str) -> Network:
    """Return a network's constructor as an attribute of the module."""
    try:
        return NETWORKS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
