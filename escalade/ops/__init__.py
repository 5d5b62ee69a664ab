"""Registry: all operations by name, and their operators.

Modules below do not import it; they pass operations along.
"""

from __future__ import annotations

from escalade.errors import UnsupportedError
from escalade.ops import autograd
from escalade.ops.adaptive_avg_pool2d import ADAPTIVE_AVG_POOL2D, adaptive_avg_pool2d
from escalade.ops.add import ADD, add
from escalade.ops.attention import ATTENTION, attention
from escalade.ops.avg_pool2d import AVG_POOL2D, avg_pool2d
from escalade.ops.avg_pool2d_backward import AVG_POOL2D_BACKWARD, avg_pool2d_backward
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.base.rung import Config, Rung
from escalade.ops.batch_norm import BATCH_NORM, batch_norm
from escalade.ops.batch_norm_backward import BATCH_NORM_BACKWARD, batch_norm_backward
from escalade.ops.batch_norm_training import BATCH_NORM_TRAINING, batch_norm_training
from escalade.ops.batch_statistics import BATCH_STATISTICS, batch_statistics
from escalade.ops.conv2d import CONV2D, conv2d
from escalade.ops.conv2d_input_gradient import CONV2D_INPUT_GRADIENT, conv2d_input_gradient
from escalade.ops.conv2d_weight_gradient import CONV2D_WEIGHT_GRADIENT, conv2d_weight_gradient
from escalade.ops.convert import CONVERT
from escalade.ops.copy import COPY
from escalade.ops.cross_entropy import CROSS_ENTROPY, cross_entropy, cross_entropy_with_gradient
from escalade.ops.ctc_loss import CTC_LOSS, ctc_loss
from escalade.ops.few_channels import FEW_CHANNELS, few_channels
from escalade.ops.filter_sums import FILTER_SUMS
from escalade.ops.group_norm import GROUP_NORM, group_norm
from escalade.ops.group_norm_backward import GROUP_NORM_BACKWARD
from escalade.ops.layer_norm import LAYER_NORM, layer_norm
from escalade.ops.layer_norm_backward import LAYER_NORM_BACKWARD
from escalade.ops.linear import LINEAR, linear
from escalade.ops.max_pool2d import MAX_POOL2D, max_pool2d, max_pool2d_with_places
from escalade.ops.max_pool2d_backward import MAX_POOL2D_BACKWARD, max_pool2d_backward
from escalade.ops.mlp import MLP, mlp
from escalade.ops.mlp_backward import MLP_BACKWARD, mlp_backward
from escalade.ops.optimizer_step import OPTIMIZER_STEP, optimizer_step
from escalade.ops.pad2d import PAD2D, pad2d
from escalade.ops.pixel_shuffle import PIXEL_SHUFFLE, pixel_shuffle
from escalade.ops.pointwise import POINTWISE, pointwise
from escalade.ops.pointwise_loss import POINTWISE_LOSS, mse_loss, pointwise_loss, pointwise_loss_with_gradient
from escalade.ops.quantise import QUANTISE, quantise
from escalade.ops.reduce import REDUCE, reduce
from escalade.ops.relu import RELU, relu, relu_
from escalade.ops.softmax import SOFTMAX, softmax
from escalade.ops.softmax_backward import SOFTMAX_BACKWARD
from escalade.ops.squeeze_excite import SQUEEZE_EXCITE, squeeze_excite
from escalade.ops.stem import STEM
from escalade.ops.top_k import TOP_K, top_k
from escalade.ops.upsample2d import UPSAMPLE2D, upsample2d
from escalade.ops.upsample2d_backward import UPSAMPLE2D_BACKWARD, upsample2d_backward

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        CONV2D,
        CONV2D_INPUT_GRADIENT,
        CONV2D_WEIGHT_GRADIENT,
        STEM,
        FEW_CHANNELS,
        RELU,
        ADD,
        POINTWISE,
        BATCH_NORM,
        BATCH_NORM_TRAINING,
        BATCH_NORM_BACKWARD,
        BATCH_STATISTICS,
        MAX_POOL2D,
        MAX_POOL2D_BACKWARD,
        AVG_POOL2D,
        AVG_POOL2D_BACKWARD,
        ADAPTIVE_AVG_POOL2D,
        SQUEEZE_EXCITE,
        UPSAMPLE2D,
        UPSAMPLE2D_BACKWARD,
        PAD2D,
        PIXEL_SHUFFLE,
        FILTER_SUMS,
        CONVERT,
        COPY,
        QUANTISE,
        LINEAR,
        MLP,
        MLP_BACKWARD,
        LAYER_NORM,
        LAYER_NORM_BACKWARD,
        GROUP_NORM,
        GROUP_NORM_BACKWARD,
        REDUCE,
        SOFTMAX,
        SOFTMAX_BACKWARD,
        ATTENTION,
        TOP_K,
        POINTWISE_LOSS,
        CROSS_ENTROPY,
        CTC_LOSS,
        OPTIMIZER_STEP,
    )
}

autograd.register()


def operation(name: str) -> Operation:
    """Return an operation by name, for commands, files and graphs."""
    if name not in OPERATIONS:
        raise UnsupportedError(f"unknown operation {name!r}; known: {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


__all__ = [
    "OPERATIONS",
    "Config",
    "Ladder",
    "Operation",
    "Problem",
    "Rung",
    "adaptive_avg_pool2d",
    "add",
    "attention",
    "avg_pool2d",
    "avg_pool2d_backward",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_training",
    "batch_statistics",
    "conv2d",
    "conv2d_input_gradient",
    "conv2d_weight_gradient",
    "cross_entropy",
    "cross_entropy_with_gradient",
    "ctc_loss",
    "few_channels",
    "group_norm",
    "layer_norm",
    "linear",
    "max_pool2d",
    "max_pool2d_backward",
    "max_pool2d_with_places",
    "mlp",
    "mlp_backward",
    "mse_loss",
    "operation",
    "optimizer_step",
    "pad2d",
    "pixel_shuffle",
    "pointwise",
    "pointwise_loss",
    "pointwise_loss_with_gradient",
    "quantise",
    "reduce",
    "relu",
    "relu_",
    "softmax",
    "squeeze_excite",
    "top_k",
    "upsample2d",
    "upsample2d_backward",
]
