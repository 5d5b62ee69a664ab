"""Structures of arguments and results: tensors and plain values in tuples, lists, dicts and dataclasses.

In a process they are PyTorch `TreeSpec`s whose leaves are the tensors, with two node types of ours for dataclasses and
plain values. A file only supports structures that can be rebuilt without importing anything that it names.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.errors import UnsupportedError

MAX_DEPTH = 64
_TENSOR = object()
_VALUE = "value"
_SIZE = "size"
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict}
_JSON_TYPES = (type(None), bool, int, float, str)
_VALUE_TYPES = (*_JSON_TYPES, complex, bytes, Enum, torch.dtype, torch.device)
"""Immutable types that hold no tensors."""
_SYMBOLIC_TYPES: dict[type, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class TreeError(UnsupportedError):
    """A structure that a file cannot represent, an invalid one in a file, or an unsupported value in a structure."""


@dataclasses.dataclass(frozen=True)
class ValueNode:
    """A plain value in a structure: a pytree node without leaves that unflattens to the value."""

    value: Any


class DataclassNode:
    """A dataclass instance whose fields may hold tensors; it unflattens to one created without `__init__`."""

    def __init__(self, kind: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.kind, self.names, self.values = kind, names, values


def _build_dataclass(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    instance: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)  # also for frozen dataclasses
    return instance


pytree.register_pytree_node(
    ValueNode, lambda literal: ([], (type(literal.value), literal.value)), lambda _, context: context[1]
)
pytree.register_pytree_node(
    DataclassNode, lambda record: (record.values, (record.kind, record.names)), _build_dataclass
)


def flatten(tree: Any) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
    """Split arguments or results into their tensors and their structure with all other values."""
    return pytree.tree_flatten(_with_nodes(tree))


def open_dataclasses(tree: Any) -> Any:
    """Replace dataclasses by dicts of their fields, for code that only supports PyTorch's containers."""

    def leaf(value: Any) -> Any:
        if not _is_dataclass(value):
            return value
        return {name: open_dataclasses(part) for name, part in _fields(value).items()}

    return pytree.tree_map(leaf, tree, is_leaf=_is_size)


def _with_nodes(tree: Any) -> Any:
    return pytree.tree_map(_leaf, tree, is_leaf=_is_size)


def _is_size(tree: Any) -> bool:
    """Return True for a `torch.Size`, which PyTorch would flatten as a tuple."""
    return isinstance(tree, torch.Size)


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _fields(record: Any) -> dict[str, Any]:
    """Return the fields that are set, and further attributes, such as those that `__post_init__` adds."""
    names = [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]
    return {name: getattr(record, name) for name in dict.fromkeys((*names, *getattr(record, "__dict__", ())))}


def _leaf(leaf: Any) -> Any:
    """Convert what PyTorch considers a leaf into a tensor or one of our nodes."""
    if isinstance(leaf, torch.Tensor | ValueNode):
        return leaf
    if isinstance(leaf, _VALUE_TYPES):
        return ValueNode(leaf)
    if type(leaf) in _SYMBOLIC_TYPES:
        return ValueNode(_SYMBOLIC_TYPES[type(leaf)](leaf))  # specializes a symbolic batch size
    if _is_size(leaf):
        return ValueNode(torch.Size(map(int, leaf)))
    if _is_dataclass(leaf):
        fields = _fields(leaf)
        return DataclassNode(type(leaf), tuple(fields), [_with_nodes(value) for value in fields.values()])
    raise TreeError(
        f"a {type(leaf).__name__} among arguments or results: supported are tensors and plain values (numbers, "
        "strings, None) in tuples, lists, dicts and dataclasses, and in containers that are registered with "
        "torch.utils._pytree.register_pytree_node"
    )


def structure_to_json(structure: pytree.TreeSpec) -> Any:
    """Return a structure as JSON data: null for a tensor, and {tag: content} for a plain value or a container."""
    return _to_json(pytree.tree_unflatten([_TENSOR] * structure.num_leaves, structure))


def structure_from_json(data: Any) -> pytree.TreeSpec:
    return pytree.tree_structure(_from_json(data, MAX_DEPTH))


def _to_json(tree: Any) -> Any:
    if tree is _TENSOR:
        return None
    if type(tree) in _JSON_TYPES:
        return {_VALUE: tree}
    if _is_size(tree):
        return {_SIZE: list(tree)}
    for tag, kind in _SEQUENCES.items():
        if type(tree) is kind:
            return {tag: [_to_json(part) for part in tree]}
    for tag, kind in _MAPPINGS.items():
        if type(tree) is kind and all(type(key) in (str, int) for key in tree):
            return {tag: [[key, _to_json(part)] for key, part in tree.items()]}
    keys = f" with the keys {', '.join(map(repr, tree))}" if isinstance(tree, dict) else ""
    raise TreeError(
        f"the model takes or returns a {type(tree).__name__}{keys}; a file supports tuples, lists and dicts of tensors "
        "and plain values, with strings or integers as keys"
    )


def _from_json(data: Any, depth: int) -> Any:
    if data is None:
        return _TENSOR
    if depth == 0:
        raise TreeError(f"a structure of more than {MAX_DEPTH} nested containers")
    if type(data) is dict and len(data) == 1:
        ((tag, content),) = data.items()
        if tag == _VALUE and type(content) in _JSON_TYPES:
            return ValueNode(content)
        if (
            tag == _SIZE
            and type(content) is list
            and all(type(size) is int and 0 <= size < 2**63 for size in content)
        ):
            return ValueNode(torch.Size(content))
        if tag in _SEQUENCES and type(content) is list:
            return _SEQUENCES[tag](_from_json(part, depth - 1) for part in content)
        if tag in _MAPPINGS and type(content) is list and all(_is_entry(part) for part in content):
            instance = _MAPPINGS[tag]((key, _from_json(part, depth - 1)) for key, part in content)
            if len(instance) == len(content):
                return instance
    raise TreeError("a structure that is none of tuple, list and dict")


def _is_entry(part: Any) -> bool:
    return type(part) is list and len(part) == 2 and type(part[0]) in (str, int)
