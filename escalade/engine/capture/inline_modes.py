"""Inline blocks that run under a mode, such as `with torch.autocast(..., enabled=False)`.

The mode is dropped: a plan has its own precision and no gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

_MODE_OPERATORS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")


def inline_mode_blocks(module: torch.fx.GraphModule) -> torch.fx.Graph:
    """Return the module's graph with all mode blocks, including nested ones, inlined."""
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, Any] = {}
    graph.output(_copy(module, copied, graph))
    return graph


def _copy(module: torch.fx.GraphModule, copied: dict[torch.fx.Node, Any], into: torch.fx.Graph) -> Any:
    """Copy all nodes that are not in `copied` yet, and return the module's result."""
    for node in module.graph.nodes:
        if node in copied:
            continue
        if node.op == "output":
            return _map(node.args[0], copied)
        if _is_block(node):
            inner = next(argument for argument in node.args if _is_module(argument))
            arguments = node.args[node.args.index(inner) + 1 :]
            block = getattr(module, inner.target)
            placeholders = [inner_node for inner_node in block.graph.nodes if inner_node.op == "placeholder"]
            bound = dict(zip(placeholders, (_map(argument, copied) for argument in arguments), strict=True))
            copied[node] = _copy(block, bound, into)
        elif node.target is operator.getitem and isinstance(copied.get(node.args[0]), tuple | list):
            copied[node] = copied[node.args[0]][node.args[1]]
        elif not (_is_module(node) and all(map(_is_block, node.users))):
            copied[node] = into.node_copy(node, lambda old: copied[old])
    return None


def _map(argument: Any, copied: Mapping[torch.fx.Node, Any]) -> Any:
    return torch.fx.map_arg(argument, lambda node: copied[node])


def _is_block(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _MODE_OPERATORS


def _is_module(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and argument.op == "get_attr"
