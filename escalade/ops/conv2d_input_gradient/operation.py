"""The conv2d_input_gradient operation: its problems, its ladder, foot to summit, and the preferred
order of rungs."""

from __future__ import annotations

from dataclasses import replace

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.conv2d_input_gradient import reference
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs import duality, sm90_wgmma
from escalade.ops.conv2d_input_gradient.rungs.depthwise import DEPTHWISE_GATHER
from escalade.ops.conv2d_input_gradient.rungs.direct import ATOMICS, DIRECT, SHARED_TILE
from escalade.ops.conv2d_input_gradient.rungs.few_channels import COL2IM, SKINNY
from escalade.ops.conv2d_input_gradient.rungs.planes import PLANES
from escalade.ops.conv2d_input_gradient.rungs.subpixel import SUBPIXEL
from escalade.ops.shared.images import LAYOUTS

_PARSE = Conv2dInputGradientProblem.parse

PROBLEMS = tuple(
    _PARSE(name)
    for name in (
        # ResNet-18
        "64to64_56_k3s1_b256",
        "64to64_56_k3s1_b256_mask",
        "64to128_56_k3s2_b256",
        "64to128_56_k1s2_b256",
        "128to128_28_k3s1_b256",
        "128to128_28_k3s1_b256_mask",
        "128to256_28_k3s2_b256",
        "256to256_14_k3s1_b256",
        "256to512_14_k3s2_b256",
        "512to512_7_k3s1_b256",
        # ResNet-50
        "64to256_56_k1s1_b256",
        "256to64_56_k1s1_b256_mask",
        "512to128_28_k1s1_b256",
        "256to512_56_k1s2_b256",
        "256to1024_14_k1s1_b256",
        "2048to512_7_k1s1_b256",
        "512to512_14_k3s2_b256",
        # MobileNetV2 and ResNeXt-50
        "144to144_56_k3s1g144_b256",
        "96to96_112_k3s2g96_b256",
        "960to960_7_k3s1g960_b256",
        "128to128_56_k3s1g32_b256",
        # The convolutional autoencoder
        "256to3_32_k3s1_b256",
        # U-Net and a generator, transposed
        "64to128_128_k2s2p0_b16_bias",
        "64to128_64_k4s2p1_b64_bias+relu",
        "3to256_32_k4s2p1_b256_bias",
    )
)

SMALL_PROBLEMS = tuple(
    _PARSE(name)
    for name in (
        "8to16_9_k3s1_b2_mask",
        "3to5_11_k3s1_b1",
        "24to40_12_k1s2_b2_res",  # three of four phases have no tap
        "16to8_13_k3s2p0_b1_mask",  # the last row and column have no tap
        "5to16_12_k3s2_b1",
        "4to6_10x7_k4x3s3x2p2x0_b2",
        "8to12_10_k3s1g4_b2_mask",
        "8to8_9x11_k3s2x1p2d2x3_b1",  # stride and dilation have a common factor
        "3to4_5_k1s1p2_b1",  # more padding than the filter's size
        "1to1_1_k1s3p1_b1",  # the pixel has no tap
        "6to3_23_k7s4_b1",
        "24to24_7x9_k3s1g24_b2_mask",  # depthwise
        "16to16_9x8_k5x3s2g16_b2",
        "12to12_10x7_k4x3s3x2p2x0d2x1g12_b2_mask",
        "8to8_7_k7s1g8_b1_res",
        "32to32_6x7_k3s2g4_b2_mask",
        "64to64_5x6_k3s1_b2_mask",
        "64to128_9x7_k3s2_b1_mask",
        "64to128_9x7_k3s2_b1_res",
        "64to72_6x7_k1s2_b2",
        "16to24_8_k2s2p0_b2_bias+relu",
        "8to16_7_k4s2p1_b1_bias[x*sigmoid(x)]",
        "5to3_9_k3s2_b1_bias",
        "136to3_5x9_k3s1_b2_mask",  # few filters
        "6to4_7_k1s2p0_b1_bias",  # pixels without a tap are the bias
    )
) + tuple(
    _PARSE(name, "fp16", "nhwc")  # by tensor cores only
    for name in (
        "72to24_13x11_k3s1_b2_normx",
        "64to16_9_k1s1_b3_res_normoutput",
        "136to8_11_k1s1_b2_normnone",
        "64to40_5x6_k3s1_b2_f3k3s1p1d1_mask",  # volumes
        "24to64_4x7_k1x3s1_b2_f4k2s1p0d2_res",
        "72to24_5_k3s1p0_b2_f3k3s1p1d1_normx",
    )
)
"""Tested on the twin: odd sizes, strides with and without remainders, dilation, groups, padding beyond the filter, and
epilogues of transposed convolutions."""


def _preference(problem: Conv2dInputGradientProblem) -> tuple[str, ...]:
    if problem.forward.groups > 1:
        return (*GROUPED, "direct")
    if problem.dtype != "fp32":
        return ("planes", "skinny", "col2im", *HOPPER, "subpixel", "tma_wgmma", "tensor_core", "direct")
    few = problem.forward.filters <= FEW_FILTERS
    return ("skinny", "col2im", *(() if few else SPLIT), "subpixel", "implicit_gemm", "direct")


GROUPED = (DEPTHWISE_GATHER.name, *(rung.name for rung in duality.GROUPED_RUNGS))
FEW_FILTERS = 8
"""Up to this many filters, rows of the implicit GEMM are too short for tensor cores in fp32."""
HOPPER = ("window", "streamed_window", "persistent", "one_launch")
"""Kernels that apply the mask and scatter results themselves, in fp16 and bf16; the second and last in TF32 too."""
SPLIT = ("wgmma_split", "tensor_core_split")
WORTH_CONVERTING = (*GROUPED, *HOPPER, "skinny", "col2im", "subpixel", "tma_wgmma", "tensor_core")
"""Worth two layout conversions if the problem has the other layout."""


class Conv2dInputGradientOperation(Operation[Conv2dInputGradientProblem]):
    name = "conv2d_input_gradient"
    problem = Conv2dInputGradientProblem
    in_pytorch = reference
    ladder = Ladder(
        "conv2d_input_gradient",
        (
            ATOMICS,
            DIRECT,
            SHARED_TILE,
            *duality.RUNGS,
            *duality.GROUPED_RUNGS,
            DEPTHWISE_GATHER,
            SKINNY,
            COL2IM,
            SUBPIXEL,
            PLANES,
            sm90_wgmma.PERSISTENT,
            sm90_wgmma.ONE_LAUNCH,
            *sm90_wgmma.RUNGS,
        ),
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = MULTIPLIED
    layouts = LAYOUTS
    weights_change = True
    extra_outputs = staticmethod(reference.extra_outputs)
    extra_references = staticmethod(reference.extra_references)

    def preferred(self, problem: Conv2dInputGradientProblem) -> tuple[str, ...]:
        """Omits `atomics`, which is not deterministic."""
        return ("persistent",) if problem.norm else _preference(problem)

    def tuned_as(self, problem: Conv2dInputGradientProblem) -> Conv2dInputGradientProblem:
        return replace(problem, norm="")

    def forms(self, rung: str, problem: Conv2dInputGradientProblem) -> tuple[Conv2dInputGradientProblem, ...]:
        if rung not in WORTH_CONVERTING:
            return (problem,)
        others = (layout for layout in self.layouts if layout != problem.layout)
        return (problem, *(replace(problem, layout=layout) for layout in others))


CONV2D_INPUT_GRADIENT = Conv2dInputGradientOperation()
