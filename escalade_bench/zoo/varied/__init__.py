"""Networks of many families besides classifiers in plain PyTorch, each at a usual size.

Their functions take sizes after the input, usual ones by default. The sizes of one item are the `example_shape`.
`escalade bench coverage escalade_bench.zoo.varied` measures them all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from escalade.models.unet import UNet
from escalade_bench.zoo.varied import to_classes, to_images
from escalade_bench.zoo.varied.scope import Net

Sizes = tuple[int, ...]
_IMAGE: Sizes = (3, 224, 224)


@dataclass(frozen=True)
class Network:
    """A constructor with its input shape as `example_shape`."""

    function: Callable[..., Any]
    example_shape: Sizes

    def __call__(self) -> nn.Module:
        return self.sized()

    def sized(self, *sizes: Any, item: Sequence[int] | None = None) -> nn.Module:
        """Return the network with other sizes, for items of another shape."""
        if self.function is UNet:
            return UNet(*sizes)
        return Net(lambda m, x: self.function(m, x, *sizes), item or self.example_shape)


NETWORKS: Mapping[str, Network] = {
    "cbam_resnet": Network(partial(to_classes.weighted, attention=to_classes.cbam), _IMAGE),
    "convmixer": Network(to_classes.conv_mixer, _IMAGE),
    "coordconv": Network(to_classes.coord_net, (3, 128, 128)),
    "csp_detector": Network(to_images.csp_detector, (3, 416, 416)),
    "cyclegan": Network(to_images.cyclegan, (3, 256, 256)),
    "dcgan": Network(to_images.dcgan, (100, 1, 1)),
    "deeplab": Network(to_images.deeplab, (3, 256, 256)),
    "diffusion_unet": Network(to_images.diffusion_unet, (4, 64, 64)),
    "dncnn": Network(to_images.dncnn, (1, 256, 256)),
    "eca_resnet": Network(partial(to_classes.weighted, attention=to_classes.eca), _IMAGE),
    "edsr": Network(to_images.edsr, (3, 128, 128)),
    "espcn": Network(to_images.espcn, (1, 240, 320)),
    "frames_and_motion": Network(to_classes.frames_and_motion, (8, 3, 112, 112)),
    "fsrcnn": Network(to_images.fsrcnn, (1, 240, 320)),
    "ghostnet": Network(to_classes.ghost_net, _IMAGE),
    "hourglass": Network(to_images.hourglass, (3, 256, 256)),
    "hrnet": Network(to_images.hrnet, (3, 256, 192)),
    "m5": Network(to_classes.m5, (1, 8000)),
    "mlp_mixer": Network(to_classes.mlp_mixer, _IMAGE),
    "mobilevit": Network(to_classes.mobile_vit, (3, 256, 256)),
    "nafnet": Network(to_images.nafnet, (3, 256, 256)),
    "pix2pix": Network(to_images.pix2pix, (3, 256, 256)),
    "pixelcnn": Network(to_images.pixelcnn, (1, 28, 28)),
    "rcan": Network(to_images.rcan, (3, 64, 64)),
    "resnet3d": Network(to_classes.resnet3d, (3, 16, 112, 112)),
    "retinanet": Network(to_images.retinanet, (3, 256, 256)),
    "se_resnet": Network(partial(to_classes.weighted, attention=to_classes.se), _IMAGE),
    "siamese": Network(to_classes.siamese, (2, 1, 105, 105)),
    "sknet": Network(to_classes.sknet, _IMAGE),
    "standardised_resnet": Network(to_classes.standardized_resnet, _IMAGE),
    "style_transfer": Network(to_images.style_transfer, (3, 256, 256)),
    "tcn": Network(to_classes.tcn, (16, 1024)),
    "unet_512": Network(UNet, (3, 512, 512)),
    "vit_small": Network(to_classes.vision_transformer, _IMAGE),
    "wavenet": Network(to_classes.wavenet, (1, 4096)),
    "zero_dce": Network(to_images.zero_dce, (3, 256, 256)),
}
__all__ = list(NETWORKS)


def __getattr__(name: str) -> Network:
    """Return a network's constructor as an attribute of the module."""
    try:
        return NETWORKS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
