"""How tensors are given and returned (tuples, lists and dicts of them), as plain data.

In a process PyTorch's `TreeSpec` says it, for whatever containers PyTorch knows. A file can only hold those that can be
made again without importing anything that it names.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.utils import _pytree as pytree

from escalade.errors import UnsupportedError

MOST_DEPTH = 64
_LEAF = object()
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, Any] = {"dict": dict, "ordered": OrderedDict}


class TreeError(UnsupportedError):
    """A structure that a file cannot hold, or does not."""


def to_plain(structure: pytree.TreeSpec) -> Any:
    """A tensor is null; a container is its kind with what is in it, of dicts with the keys."""
    return _plain(pytree.tree_unflatten([_LEAF] * structure.num_leaves, structure))


def from_plain(data: Any) -> pytree.TreeSpec:
    return pytree.tree_structure(_made(data, MOST_DEPTH))


def _plain(tree: Any) -> Any:
    if tree is _LEAF:
        return None
    for word, kind in _SEQUENCES.items():
        if type(tree) is kind:
            return {word: [_plain(part) for part in tree]}
    for word, kind in _MAPPINGS.items():
        if type(tree) is kind and all(type(key) in (str, int) for key in tree):
            return {word: [[key, _plain(part)] for key, part in tree.items()]}
    keys = f" with the keys {', '.join(map(repr, tree))}" if isinstance(tree, dict) else ""
    raise TreeError(
        f"the model takes or returns a {type(tree).__name__}{keys}; a file holds tuples, lists and dicts of tensors, "
        "dicts by names or whole numbers"
    )


def _made(data: Any, depth: int) -> Any:
    if data is None:
        return _LEAF
    if depth == 0:
        raise TreeError(f"a structure of more than {MOST_DEPTH} containers in each other")
    if type(data) is dict and len(data) == 1:
        ((word, parts),) = data.items()
        if word in _SEQUENCES and type(parts) is list:
            return _SEQUENCES[word](_made(part, depth - 1) for part in parts)
        if word in _MAPPINGS and type(parts) is list and all(_is_entry(part) for part in parts):
            made = _MAPPINGS[word]((key, _made(part, depth - 1)) for key, part in parts)
            if len(made) == len(parts):
                return made
    raise TreeError("a structure of tensors that is none of tuple, list and dict")


def _is_entry(part: Any) -> bool:
    return type(part) is list and len(part) == 2 and type(part[0]) in (str, int)
