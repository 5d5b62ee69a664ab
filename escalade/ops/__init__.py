"""The operations, by name."""

from __future__ import annotations

from escalade.errors import UnsupportedError
from escalade.ops.adaptive_avg_pool2d import AdaptiveAvgPool2d, adaptive_avg_pool2d
from escalade.ops.add import Add, add
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.base.rung import Config, Rung
from escalade.ops.batch_norm import BatchNorm, BatchStatistics, batch_norm, batch_statistics
from escalade.ops.conv2d import Conv2d, conv2d
from escalade.ops.conv2d_input_gradient import Conv2dInputGradient, conv2d_input_gradient
from escalade.ops.conv2d_weight_gradient import Conv2dWeightGradient, conv2d_weight_gradient
from escalade.ops.convert import Convert
from escalade.ops.few_channels import FewChannels, few_channels
from escalade.ops.linear import Linear, linear
from escalade.ops.max_pool2d import MaxPool2d, max_pool2d
from escalade.ops.mlp import Mlp, mlp
from escalade.ops.mlp_backward import MlpBackward, mlp_backward
from escalade.ops.quantise import Quantise, quantise
from escalade.ops.relu import Relu, relu, relu_
from escalade.ops.softmax import Softmax, softmax
from escalade.ops.stem import Stem
from escalade.ops.top_k import TopK, top_k

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Conv2d(),
        Conv2dInputGradient(),
        Conv2dWeightGradient(),
        Stem(),
        FewChannels(),
        Relu(),
        Add(),
        BatchNorm(),
        BatchStatistics(),
        MaxPool2d(),
        AdaptiveAvgPool2d(),
        Convert(),
        Quantise(),
        Linear(),
        Mlp(),
        MlpBackward(),
        Softmax(),
        TopK(),
    )
}


def operation(name: str) -> Operation:
    if name not in OPERATIONS:
        raise UnsupportedError(f"there is no operation {name!r}; there is {', '.join(OPERATIONS)}")
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
    "batch_norm",
    "batch_statistics",
    "conv2d",
    "conv2d_input_gradient",
    "conv2d_weight_gradient",
    "few_channels",
    "linear",
    "max_pool2d",
    "mlp",
    "mlp_backward",
    "operation",
    "quantise",
    "relu",
    "relu_",
    "softmax",
    "top_k",
]
