"""Blocks of a model in a mode of their own, such as `with torch.autocast(..., enabled=False)`: read as if the mode were
not there, since a plan has a precision of its own and no gradients."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

_IN_A_MODE = ("wrap_with_autocast", "wrap_with_set_grad_enabled")


def unwrapped(module: torch.fx.GraphModule) -> torch.fx.Graph:
    """The module's graph with the operations of such blocks, and of blocks in them, in their place."""
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, Any] = {}
    graph.output(_copy(module, copied, graph))
    return graph


def _copy(module: torch.fx.GraphModule, copied: dict[torch.fx.Node, Any], into: torch.fx.Graph) -> Any:
    """Copies all nodes of which there is no copy yet, and gives what the module returns."""
    for node in module.graph.nodes:
        if node in copied:
            continue
        if node.op == "output":
            return _of(node.args[0], copied)
        if _is_block(node):
            inner = next(part for part in node.args if _is_module(part))
            given = node.args[node.args.index(inner) + 1 :]
            block = getattr(module, inner.target)
            places = [one for one in block.graph.nodes if one.op == "placeholder"]
            taken = dict(zip(places, (_of(part, copied) for part in given), strict=True))
            copied[node] = _copy(block, taken, into)
        elif node.target is operator.getitem and isinstance(copied.get(node.args[0]), tuple | list):
            copied[node] = copied[node.args[0]][node.args[1]]
        elif not (_is_module(node) and all(map(_is_block, node.users))):
            copied[node] = into.node_copy(node, lambda one: copied[one])
    return None


def _of(argument: Any, copied: Mapping[torch.fx.Node, Any]) -> Any:
    return torch.fx.map_arg(argument, lambda node: copied[node])


def _is_block(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _IN_A_MODE


def _is_module(part: Any) -> bool:
    return isinstance(part, torch.fx.Node) and part.op == "get_attr"
