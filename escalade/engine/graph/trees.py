"""How tensors are given and returned: in tuples, lists, dicts and dataclasses, with plain values among them.

In a process PyTorch's `TreeSpec` says it: for whatever containers PyTorch knows, for dataclasses and plain values by
two kinds of node of ours. Its leaves are the tensors. A file can only hold what can be made again without importing
anything that it names.
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

MOST_DEPTH = 64
_LEAF = object()
_VALUE = "value"
_SIZE = "size"
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict}


_IN_FILES = (type(None), bool, int, float, str)
_PLAIN = (*_IN_FILES, complex, bytes, Enum, torch.dtype, torch.device)
"""Values that nobody can change, and that hold no tensors."""

_SYMBOLIC: dict[type, Any] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class TreeError(UnsupportedError):
    """A structure that a file cannot hold, or does not; or a value that is no part of one."""


@dataclasses.dataclass(frozen=True)
class Literal:
    """A plain value in a structure, where a tensor might stand. It has no leaves, and becomes the value itself."""

    value: Any


class Record:
    """An object of a dataclass whose fields may hold tensors. It becomes such an object, made without `__init__`."""

    def __init__(self, kind: type, names: tuple[str, ...], values: list[Any]) -> None:
        self.kind, self.names, self.values = kind, names, values


def _record(values: Iterable[Any], context: tuple[type, tuple[str, ...]]) -> Any:
    kind, names = context
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # frozen ones too
    return made


pytree.register_pytree_node(
    Literal, lambda literal: ([], (type(literal.value), literal.value)), lambda _, context: context[1]
)
pytree.register_pytree_node(Record, lambda record: (record.values, (record.kind, record.names)), _record)


def flatten(tree: Any) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
    """The tensors of arguments or results, and the structure that they and all other values are in."""
    return pytree.tree_flatten(_described(tree))


def opened(tree: Any) -> Any:
    """The tree with dataclasses as dicts of their fields, for whoever knows PyTorch's containers alone."""

    def leaf(value: Any) -> Any:
        return {name: opened(part) for name, part in _fields(value).items()} if _is_record(value) else value

    return pytree.tree_map(leaf, tree, is_leaf=_is_size)


def _described(tree: Any) -> Any:
    return pytree.tree_map(_leaf, tree, is_leaf=_is_size)


def _is_size(tree: Any) -> bool:
    """PyTorch would look into one, and make a tuple of it."""
    return isinstance(tree, torch.Size)


def _is_record(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)


def _fields(record: Any) -> dict[str, Any]:
    """The fields of an object, those that it has, and what else was put into it, as `__post_init__` may do."""
    names = [field.name for field in dataclasses.fields(record) if hasattr(record, field.name)]
    return {name: getattr(record, name) for name in dict.fromkeys((*names, *getattr(record, "__dict__", ())))}


def _leaf(leaf: Any) -> Any:
    """What PyTorch takes for a leaf, as a tensor or a node of ours."""
    if isinstance(leaf, torch.Tensor | Literal):
        return leaf
    if isinstance(leaf, _PLAIN):
        return Literal(leaf)
    if type(leaf) in _SYMBOLIC:
        return Literal(_SYMBOLIC[type(leaf)](leaf))  # which fixes the batch, if it is the size of one
    if _is_size(leaf):
        return Literal(torch.Size(map(int, leaf)))
    if _is_record(leaf):
        fields = _fields(leaf)
        return Record(type(leaf), tuple(fields), [_described(value) for value in fields.values()])
    raise TreeError(
        f"a {type(leaf).__name__} among arguments or results: they are tensors and plain values (numbers, texts, None) "
        "in tuples, lists, dicts and dataclasses, or in what PyTorch was taught to look into, by "
        "torch.utils._pytree.register_pytree_node"
    )


def to_plain(structure: pytree.TreeSpec) -> Any:
    """A tensor is null, a plain value stands behind a word; a container is its kind with what is in it, of dicts with
    the keys.
    """
    return _plain(pytree.tree_unflatten([_LEAF] * structure.num_leaves, structure))


def from_plain(data: Any) -> pytree.TreeSpec:
    return pytree.tree_structure(_made(data, MOST_DEPTH))


def _plain(tree: Any) -> Any:
    if tree is _LEAF:
        return None
    if type(tree) in _IN_FILES:
        return {_VALUE: tree}
    if _is_size(tree):
        return {_SIZE: list(tree)}
    for word, kind in _SEQUENCES.items():
        if type(tree) is kind:
            return {word: [_plain(part) for part in tree]}
    for word, kind in _MAPPINGS.items():
        if type(tree) is kind and all(type(key) in (str, int) for key in tree):
            return {word: [[key, _plain(part)] for key, part in tree.items()]}
    keys = f" with the keys {', '.join(map(repr, tree))}" if isinstance(tree, dict) else ""
    raise TreeError(
        f"the model takes or returns a {type(tree).__name__}{keys}; a file holds tuples, lists and dicts of tensors "
        "and plain values, dicts by names or whole numbers"
    )


def _made(data: Any, depth: int) -> Any:
    if data is None:
        return _LEAF
    if depth == 0:
        raise TreeError(f"a structure of more than {MOST_DEPTH} containers in each other")
    if type(data) is dict and len(data) == 1:
        ((word, parts),) = data.items()
        if word == _VALUE and type(parts) in _IN_FILES:
            return Literal(parts)
        if (
            word == _SIZE
            and type(parts) is list
            and all(type(size) is int and 0 <= size < 2**63 for size in parts)
        ):
            return Literal(torch.Size(parts))
        if word in _SEQUENCES and type(parts) is list:
            return _SEQUENCES[word](_made(part, depth - 1) for part in parts)
        if word in _MAPPINGS and type(parts) is list and all(_is_entry(part) for part in parts):
            made = _MAPPINGS[word]((key, _made(part, depth - 1)) for key, part in parts)
            if len(made) == len(parts):
                return made
    raise TreeError("a structure of tensors that is none of tuple, list and dict")


def _is_entry(part: Any) -> bool:
    return type(part) is list and len(part) == 2 and type(part[0]) in (str, int)
