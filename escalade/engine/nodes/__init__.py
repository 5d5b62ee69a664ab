"""The graph operators, a file each: how each is recognised, computed and lowered to an operation of Escalade's.

`base` says what there is to know of an operator. A new one is a file here, and a line in `OPERATORS`.
"""

from __future__ import annotations

import torch

from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.adaptive_avg_pool2d import AdaptiveAvgPool2d
from escalade.engine.nodes.add import Add
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.avg_pool2d import AvgPool2d
from escalade.engine.nodes.avg_pool2d_backward import AvgPool2dBackward
from escalade.engine.nodes.base import Operator
from escalade.engine.nodes.batch_norm import BatchNorm
from escalade.engine.nodes.batch_norm_backward import BatchNormBackward
from escalade.engine.nodes.batch_norm_training import BatchNormTraining
from escalade.engine.nodes.concatenate import Concatenate
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.conv2d_input_gradient import Conv2dInputGradient
from escalade.engine.nodes.conv2d_weight_gradient import Conv2dWeightGradient
from escalade.engine.nodes.conv_transpose2d import ConvTranspose2d
from escalade.engine.nodes.convert import Convert
from escalade.engine.nodes.cross_entropy import CrossEntropy
from escalade.engine.nodes.few_channels import FewChannels
from escalade.engine.nodes.filter_sums import FilterSums
from escalade.engine.nodes.gelu import Gelu
from escalade.engine.nodes.group_norm import GroupNorm
from escalade.engine.nodes.layer_norm import LayerNorm
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.max_pool2d import MaxPool2d
from escalade.engine.nodes.max_pool2d_backward import MaxPool2dBackward
from escalade.engine.nodes.mlp import Mlp
from escalade.engine.nodes.mlp_backward import MlpBackward
from escalade.engine.nodes.move import Move
from escalade.engine.nodes.normalise import Normalise
from escalade.engine.nodes.pad2d import Pad2d
from escalade.engine.nodes.permute import Permute
from escalade.engine.nodes.pixel_shuffle import PixelShuffle
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.pointwise_loss import PointwiseLoss
from escalade.engine.nodes.quantise import Quantise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.relu import Relu
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.shuffle import Shuffle
from escalade.engine.nodes.side_outputs import Further
from escalade.engine.nodes.slice import Slice
from escalade.engine.nodes.softmax import Softmax
from escalade.engine.nodes.squeeze_excite import SqueezeExcite
from escalade.engine.nodes.stem import Stem
from escalade.engine.nodes.upsample2d import Upsample2d
from escalade.engine.nodes.upsample2d_backward import Upsample2dBackward

OPERATORS: tuple[Operator, ...] = (
    Conv2d(),
    ConvTranspose2d(),
    BatchNormTraining(),
    BatchNormBackward(),  # of gradients that a convolution would mask
    Conv2dInputGradient(),
    Conv2dWeightGradient(),
    BatchNorm(),
    Relu(),
    Add(),
    MaxPool2d(),
    MaxPool2dBackward(),
    AvgPool2d(),
    AvgPool2dBackward(),
    AdaptiveAvgPool2d(),
    Upsample2d(),
    Upsample2dBackward(),
    FilterSums(),
    Pad2d(),
    PixelShuffle(),
    SqueezeExcite(),  # of means that a linear layer would take
    Linear(),
    LayerNorm(),
    GroupNorm(),
    Gelu(),
    Pointwise(),
    PointwiseLoss(),
    Softmax(),
    CrossEntropy(),
    Reshape(),
    Permute(),
    Concatenate(),
    Slice(),
    Shuffle(),
    Normalise(),
    Stem(),
    FewChannels(),  # of what the stem has left
    Mlp(),
    MlpBackward(),
    Reduce(),  # with what the chains of layers have left in front of it
    Convert(),
    Move(lambda name: BY_NAME[name]),
    Quantise(),
    Further(lambda name: BY_NAME[name]),
    Aten(),
)
"""All of them; those that fuse others do so in this order."""
BY_NAME: dict[str, Operator] = {operator.name: operator for operator in OPERATORS}


def operator_of(node: Node) -> Operator:
    """All that the engine knows about nodes of this kind."""
    return BY_NAME[node.op]


def stored_forms(graph: Graph, dtype: str) -> dict[str, Form]:
    """Return how every node's result is stored, in a plan of this dtype and a graph whose sizes are numbers.

    A result that only the caller reads may be stored in the model's own type; kernels read the plan's.
    """
    returned = {*graph.outputs} - {name for node in graph for name in node.inputs.values()}
    return {
        node.name: Form(
            node.shape,  # type: ignore[arg-type]
            operator_of(node).stored_type(
                node,
                getattr(torch, node.dtype) if graph.typed or node.dtype == "float64" else STORAGE[dtype],
                node.name in returned,
            ),
            operator_of(node).layout(node),
        )
        for node in graph
    }
