"""What a node computes, by PyTorch: for constants, for plans without a GPU, and to compare with."""

from __future__ import annotations

import torch

from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import in_a_sentence
from escalade.engine.nodes.base import Tensors


def compute(node: Node, inputs: Tensors) -> torch.Tensor:
    """The node's result in the type of its inputs, with the sizes that the graph has for it."""
    with in_a_sentence(node.op):
        result = operator_of(node).compute(node, inputs)
    if tuple(result.shape) != node.shape:
        raise OperatorError(
            f"{node.source or node.name} gives {list(result.shape)}; the plan has room for {list(node.shape)}"
        )
    return result
