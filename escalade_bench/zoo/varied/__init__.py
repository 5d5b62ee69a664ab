"""Networks of many families in plain PyTorch, each at a usual size: what is compiled beside classifiers.

A constructor takes nothing and has the sizes of one item as its `example_shape`; the classes behind them take widths
and depths, and are smaller then. `escalade bench coverage escalade_bench.zoo.varied` measures them all.
"""

from escalade_bench.zoo.varied.classifiers import (
    cbam_resnet,
    coordconv,
    eca_resnet,
    ghostnet,
    se_resnet,
    siamese,
    sknet,
    standardised_resnet,
)
from escalade_bench.zoo.varied.dense import csp_detector, deeplab, hourglass, hrnet, retinanet, unet_512
from escalade_bench.zoo.varied.generators import (
    cyclegan,
    dcgan,
    diffusion_unet,
    pix2pix,
    pixelcnn,
    style_transfer,
)
from escalade_bench.zoo.varied.patches import convmixer, mlp_mixer, mobilevit, vit_small
from escalade_bench.zoo.varied.restoration import dncnn, edsr, espcn, fsrcnn, nafnet, rcan, zero_dce
from escalade_bench.zoo.varied.sequences import frames_and_motion, m5, resnet3d, tcn, wavenet

__all__ = [
    "cbam_resnet",
    "convmixer",
    "coordconv",
    "csp_detector",
    "cyclegan",
    "dcgan",
    "deeplab",
    "diffusion_unet",
    "dncnn",
    "eca_resnet",
    "edsr",
    "espcn",
    "frames_and_motion",
    "fsrcnn",
    "ghostnet",
    "hourglass",
    "hrnet",
    "m5",
    "mlp_mixer",
    "mobilevit",
    "nafnet",
    "pix2pix",
    "pixelcnn",
    "rcan",
    "resnet3d",
    "retinanet",
    "se_resnet",
    "siamese",
    "sknet",
    "standardised_resnet",
    "style_transfer",
    "tcn",
    "unet_512",
    "vit_small",
    "wavenet",
    "zero_dce",
]
