"""Graph operators: how each is matched, computed with PyTorch, and lowered to one of Escalade's operations.

`base` defines the interface. A new operator is a class in one of these modules, and a line in `OPERATORS`.
"""

from __future__ import annotations

import torch

from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph, Input, Node
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.attention import Attention, AttentionBackward, AttentionBias, AttentionForward
from escalade.engine.nodes.base import Operator
from escalade.engine.nodes.batch_norm import BatchNorm, BatchNormBackward, BatchNormTraining
from escalade.engine.nodes.conv2d import Conv2d, Conv2dInputGradient, Conv2dWeightGradient, ConvTranspose2d
from escalade.engine.nodes.conv3d import Conv3d, Conv3dInputGradient, Conv3dWeightGradient
from escalade.engine.nodes.convert import Convert, FakeQuantize, Normalize, Quantize
from escalade.engine.nodes.elementwise import Add, Gelu, Relu
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.losses import CrossEntropy, PointwiseLoss
from escalade.engine.nodes.mlp import Mlp, MlpBackward, SqueezeExcite
from escalade.engine.nodes.movement import Move, SliceScatter
from escalade.engine.nodes.norms import (
    GroupNorm,
    GroupNormBackward,
    LayerNorm,
    LayerNormBackward,
    LogSoftmax,
    Softmax,
    SoftmaxBackward,
)
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.pools import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    AvgPool2dBackward,
    MaxPool2d,
    MaxPool2dBackward,
)
from escalade.engine.nodes.rearrange import Pad2d, PixelShuffle, Shuffle
from escalade.engine.nodes.reduce import ArgReduce, Reduce
from escalade.engine.nodes.side_outputs import SideOutput
from escalade.engine.nodes.stem import FewChannels, Stem
from escalade.engine.nodes.upsample2d import FilterSums, Upsample2d, Upsample2dBackward
from escalade.engine.nodes.views import Concatenate, Permute, Reshape, Slice
from escalade.engine.nodes.volumes import FrameImages, FrameStack, VolumeShuffle
from escalade.ops.base.dtypes import STORAGE as QUANTIZED_STORAGE

OPERATORS: tuple[Operator, ...] = (
    Conv2d(),
    ConvTranspose2d(),
    Conv2dInputGradient(),
    Conv2dWeightGradient(),
    Conv3d(),
    Conv3dInputGradient(),
    Conv3dWeightGradient(),
    FrameImages(),
    FrameStack(),
    VolumeShuffle(),
    Stem(),
    FewChannels(),
    BatchNorm(),
    BatchNormTraining(),
    BatchNormBackward(),
    LayerNorm(),
    LayerNormBackward(),
    GroupNorm(),
    GroupNormBackward(),
    Softmax(),
    LogSoftmax(),
    SoftmaxBackward(),
    Attention(),
    AttentionBias(),
    AttentionForward(),
    AttentionBackward(),
    Linear(),
    Mlp(),
    MlpBackward(),
    SqueezeExcite(),
    MaxPool2d(),
    MaxPool2dBackward(),
    AvgPool2d(),
    AvgPool2dBackward(),
    AdaptiveAvgPool2d(),
    Upsample2d(),
    Upsample2dBackward(),
    FilterSums(),
    Relu(),
    Gelu(),
    Add(),
    Pointwise(),
    Reduce(),
    ArgReduce(),
    CrossEntropy(),
    PointwiseLoss(),
    Reshape(),
    Permute(),
    Concatenate(),
    Slice(),
    Pad2d(),
    PixelShuffle(),
    Shuffle(),
    Normalize(),
    Convert(),
    Quantize(),
    FakeQuantize(),
    SliceScatter(),
    Move(lambda name: BY_NAME[name]),
    SideOutput(lambda name: BY_NAME[name]),
    Aten(),
)
BY_NAME: dict[str, Operator] = {operator.name: operator for operator in OPERATORS}


def operator_of(node: Node) -> Operator:
    return BY_NAME[node.op]


def reads_raw_image(node: Node, entry: Input) -> bool:
    """Return True if a node's kernels read this input image in any layout."""
    channels = entry.shape[1]
    return isinstance(channels, int) and channels <= operator_of(node).raw_image_channels


def layout_of(node: Node) -> str:
    """Return the layout in which a node's result is stored: `nhwc`, `nchw`, or `flat` for other values than images."""
    if len(node.shape) != 4:
        return "flat"
    # Side outputs, also indices, which are integers, have the layout of their producer.
    is_image = node.is_floating or SideOutput.matches(node)
    return node.attributes.get("layout", "nhwc") if is_image else "flat"


def stored_type(node: Node, storage: torch.dtype, is_returned: bool) -> torch.dtype:
    """Return the dtype in which a result is stored, in a plan that stores values in `storage`."""
    if Convert.matches(node) and is_returned:
        return getattr(torch, node.dtype)
    if Mlp.matches(node) and node.attributes["output"] == "error":
        return torch.float32
    if store := node.attributes.get("store"):
        return QUANTIZED_STORAGE[store]
    return storage if node.is_floating else getattr(torch, node.dtype)


def stored_forms(graph: Graph, dtype: str) -> dict[str, Form]:
    """Return how every node's result is stored, in a plan of this dtype and a graph with fixed sizes.

    A result that only the caller reads may be stored in the model's own dtype; kernels read the plan's.
    """
    returned = {*graph.outputs} - {name for node in graph for name in node.inputs.values()}
    return {
        node.name: Form(
            node.shape,  # type: ignore[arg-type]
            stored_type(
                node,
                getattr(torch, node.dtype) if graph.typed or node.dtype == "float64" else STORAGE[dtype],
                node.name in returned,
            ),
            layout_of(node),
        )
        for node in graph
    }
