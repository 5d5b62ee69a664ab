"""All units by name, and named sets of units."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from escalade import ops
from escalade.errors import UnsupportedError
from escalade_bench import calls, evaluation, layers, learning
from escalade_bench.campaign import ladders, networks
from escalade_bench.campaign.ladders import FEATURED
from escalade_bench.campaign.units import Unit
from escalade_bench.coverage import run as coverage
from escalade_bench.networks.workloads import TRAINED
from escalade_bench.zoo.layers import CONV_CHAINS

_SPECTRAL = (32, 64, 128, 256, 512, 1_048_576)
_TORCHVISION = (
    "convnext_tiny", "efficientnet_b0", "mobilenet_v2", "alexnet", "convnext_small", "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50", "densenet121", "densenet201", "efficientnet_b3", "efficientnet_v2_s", "fcn_resnet50",
    "googlenet", "inception_v3", "lraspp_mobilenet_v3_large", "mnasnet1_0", "mobilenet_v3_large", "mobilenet_v3_small",
    "regnet_x_400mf", "regnet_x_3_2gf", "regnet_y_400mf", "regnet_y_3_2gf", "resnet18", "resnet34", "resnet50",
    "resnet101", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "swin_t", "vgg11_bn", "vgg16", "vit_b_16",
    "wide_resnet50_2",
)  # fmt: skip
_VARIED = (
    "unet_512", "diffusion_unet", "hrnet", "csp_detector", "ghostnet", "mobilevit", "vit_small", "convmixer",
    "cyclegan", "dcgan", "deeplab", "edsr", "mlp_mixer", "nafnet", "pix2pix", "resnet3d", "retinanet", "sknet", "tcn",
    "wavenet",
)  # fmt: skip
_LAYERS = (
    "conv", "conv_1x1", "conv_grouped", "conv_transposed", "depthwise_3x3_56", "depthwise_7x7_14", "linear",
    "batch_norm", "layer_norm_channels", "group_norm", "instance_norm", "softmax_channels", "avg_pool_3", "max_pool_3",
    "bilinear", "bicubic", "pad_reflect", "sum_channels", "gelu", "conv_relu", "conv_mish_mish", "conv_group_norm_relu",
    "conv_instance_norm_relu", "conv_max_pool", "conv_softmax", "conv_1x1_gelu_1x1", "conv_transposed_gelu",
    "depthwise_separable",
)  # fmt: skip
_LADDERS = {
    "conv2d_weight_gradient": ("fp32", "fp16"),
    "conv2d_input_gradient": ("fp32", "fp16"),
    "max_pool2d": ("fp32",),
    "max_pool2d_backward": ("fp32",),
    "relu": ("fp32",),
    "upsample2d": ("fp32",),
    "upsample2d_backward": ("fp32",),
}
"""The ladders of the autoencoder's kernels, with the dtypes of their climbs."""
_IDEAS = (
    "max_pool2d/64_112_k3s2p1_b256", "max_pool2d_backward/256_32_k2s2_b256_mask", "upsample2d/64_56to112_b32_nearest",
    "upsample2d_backward/256_16to32_b256_nearest", "conv2d_weight_gradient/256to128_16_k3s1_b256_bias",
    "conv2d/3to64_224_k7s2_b256", "relu/relu_51380224", "relu/relu_backward_51380224",
    "pointwise_loss/mean_33554432[t0=x-target;t0*t0,2*t0]_gradient",
)  # fmt: skip
"""The ladders of the ideas of docs/goals.md."""


README = (
    *(f"network/resnet18/batches/b{batch}/fp16" for batch in (1, 32, 256)),
    *(f"network/resnet50/batches/b{batch}/fp16" for batch in (32, 256)),
    *(f"coverage/torchvision/{name}/fp16" for name in ("convnext_tiny", "efficientnet_b0", "mobilenet_v2")),
    "network/autoencoder/training-step/b64/fp16",
    "network/resnet50/training-step/b64/fp16",
    "network/torchvision:mobilenet_v2/training-step/b64/fp16",
    "network/lenet/batches/b10000/fp16",
    "network/spectral_autoencoder/batches/b512/fp16",
)
"""The rows of README."""


def _first(name: str, dtype: str) -> str:
    """Return the unit of an operation's first problem, in another dtype if there is none in this one."""
    operation = ops.OPERATIONS[name]
    known = dtype if dtype in operation.dtypes else operation.dtypes[0]
    return f"ladder/{name}/{operation.problems[0].name}/{known}"


def _names() -> tuple[str, ...]:
    resnet18 = [
        f"network/resnet18/batches/b{batch}/{dtype}"
        for dtype, batch in product(("fp16", "tf32", "fp32", "bf16"), (1, 32, 256, 8))
    ]
    resnet50 = [f"network/resnet50/batches/b{batch}/fp16" for batch in (32, 256, 1, 8)]
    eight_bits = [
        f"network/{name}/batches/b{batch}/{dtype}"
        for name, dtype, batch in product(("resnet18", "resnet50"), ("int8", "fp8"), (32, 256, 1))
    ]
    training = [
        *(f"network/{name}/training-step/b64/fp16" for name in ("resnet50", "resnet18", *TRAINED)),
        *(
            f"network/autoencoder/training-step/b{batch}/{dtype}"
            for dtype, batch in product(("fp16", "tf32", "fp32"), (64, 256, 1024))
        ),
    ]
    return (
        *README,
        *resnet18[:4],
        *resnet50,
        "network/lenet/batches/*",
        *(f"network/spectral_autoencoder/batches/b{b}/{t}" for t in ("fp16", "fp32") for b in _SPECTRAL),
        *training,
        *resnet18[4:],
        *eight_bits,
        f"ladder/conv2d/{FEATURED}/fp32",
        f"ladder/conv2d/{FEATURED}/fp16",
        *(_first(name, dtype) for name, dtypes in _LADDERS.items() for dtype in dtypes),
        *(_first(name, "fp16") for name in ops.OPERATIONS),
        *(f"ladder/{idea}/fp32" for idea in _IDEAS),
        *(f"ladder/few_channels/*/{dtype}" for dtype in ("fp32", "tf32", "fp16")),
        "network/spectral_autoencoder/training*/*",
        *(f"coverage/torchvision/{name}/fp16" for name in _TORCHVISION),
        *(f"coverage/escalade_bench.zoo.varied/{name}/fp16" for name in _VARIED),
        *(f"coverage/escalade_bench.zoo.layers/{name}/fp16" for name in _LAYERS),
        *(f"coverage/escalade_bench.zoo.layers/{name}/tf32_nchw" for name in CONV_CHAINS),
        "network/autoencoder/training-pairs/*",
        "network/autoencoder/training-ablation/b64/fp16",
        "network/resnet18/phases/fp16",
        "network/resnet18/phases/fp32",
        "network/resnet18/layer-kinds/*",
        "network/resnet18/stream/fp16",
        "network/resnet18/cpu/fp16",
        *(
            f"network/{name}/accuracy/*"
            for name in ("resnet18", "lenet", "autoencoder", "spectral_autoencoder")
        ),
        "network/lenet/stream/fp16",
        "steps/*",
        "evaluation/*",
        "learning/*",
        "crossover/conv2d/*/fp32",
        "ablation/conv2d/*/fp16",
        "ablation/conv2d/*/fp32",
        "traffic/*",
        "autotune/resnet18/b32/fp16",
        "autotune/resnet18/b1/fp16",
        "autotune/resnet18/b256/fp16",
    )


NAMES = _names()
"""Names and patterns of units."""


STUDIES: tuple[Callable[[], Iterator[Unit]], ...] = (
    ladders.units,
    networks.units,
    layers.units,
    coverage.units,
    evaluation.units,
    learning.units,
    calls.units,
)
HEADLINE, ALL = "headline", "all"
"""The figures of README and the main tables, and the set of all units."""


def units() -> dict[str, Unit]:
    """Return every unit by name."""
    return {unit.name: unit for make in STUDIES for unit in make()}


def named(patterns: Sequence[str]) -> list[Unit]:
    """Return the units that patterns select: a name, its beginning, a pattern with `*`, `headline`, or `all`."""
    every = units()
    found: dict[str, Unit] = {}
    for pattern in patterns or (HEADLINE,):
        wanted = NAMES if pattern == HEADLINE else ("*",) if pattern == ALL else (pattern.rstrip("/"),)
        own = {name: every[name] for one in wanted for name in _selected(every, one)}
        if not own:
            kinds = ", ".join(dict.fromkeys(unit.kind for unit in every.values()))
            raise UnsupportedError(
                f"no unit is named {pattern!r}; names begin with {kinds}: `escalade measure all --list` has them all"
            )
        found |= own
    return list(found.values())


def _selected(every: dict[str, Unit], pattern: str) -> list[str]:
    if pattern in every:
        return [pattern]
    if "*" in pattern or "[" in pattern:
        return fnmatch.filter(every, pattern)
    return [name for name in every if name.startswith(f"{pattern}/")]
