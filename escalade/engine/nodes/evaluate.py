"""What a node computes, by PyTorch: for constants, for plans without a GPU, and to compare with."""

from __future__ import annotations

import torch

from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import in_a_sentence, on_device
from escalade.engine.nodes.base import Tensors


def compute(node: Node, inputs: Tensors, home: torch.device) -> torch.Tensor:
    """Compute the node's result on the device `home`, in the type of its inputs and the shape that the graph has."""
    with in_a_sentence(node.op):
        result = operator_of(node).compute(on_device(node, home), inputs)
    if result.device.type != home.type:  # a kernel would be handed a pointer of another device
        raise OperatorError(
            f"{node.source or node.name} is computed on {result.device}; the plan is on {home}"
        )
    if tuple(result.shape) != node.shape:
        raise OperatorError(
            f"{node.source or node.name} gives {list(result.shape)}; the plan has room for {list(node.shape)}"
        )
    return result
