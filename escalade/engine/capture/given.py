"""Example inputs that a model is captured with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.graph.forms import is_dense, kind_of
from escalade.errors import UnsupportedError

_PLAIN = (bool, int, float, complex, str, bytes, NoneType)
"""What cannot have a tensor inside."""


def require_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedError(f"compile takes a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedError(f"the model's {name} is on meta, without contents; load its weights first")


@dataclass(frozen=True)
class Given:
    """Example inputs."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: Mapping[str, Any] | None) -> Given:
        """What somebody gave, if a model can be captured with them."""
        if keywords is not None and not isinstance(keywords, Mapping):
            raise UnsupportedError(
                f"example_keywords is of type {type(keywords).__name__}; it takes a dict of arguments by name"
            )
        given = cls(tuple(arguments), dict(keywords or {}))
        given._check()
        return given

    @property
    def batch(self) -> int:
        """The number of items, at least two: export would take one for a constant. Zero: the tensors have none in
        common."""
        sizes = {tensor.shape[0] for tensor in self.tensors if tensor.dim() > 1}
        return max(*sizes, 2) if len(sizes) == 1 and 0 not in sizes else 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.arguments, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def map(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other leaves, in containers that are nobody else's."""
        return pytree.tree_map(change, (self.arguments, self.keywords))

    def _check(self) -> None:
        if not self.tensors:
            leaves = pytree.tree_leaves((self.arguments, self.keywords))
            kinds = sorted({type(leaf).__name__ for leaf in leaves if not isinstance(leaf, _PLAIN)})
            inside = (
                f"; of {', '.join(kinds)} none are seen, as they are of lists, tuples and dicts"
                if kinds
                else ""
            )
            raise UnsupportedError(
                f"compile needs example inputs: tensors like those the model will be called with{inside}"
            )
        for tensor in self.tensors:
            if tensor.dtype.is_complex or tensor.is_quantized or not is_dense(tensor):
                raise UnsupportedError(
                    f"an input is {kind_of(tensor)}: compile takes dense tensors of real numbers"
                )
            if tensor.is_meta:
                raise UnsupportedError(
                    "an example input is on meta, without contents: compile takes tensors like those that the model "
                    "will be called with"
                )
            if not tensor.numel():
                raise UnsupportedError(
                    f"an example input of shape {tuple(tensor.shape)} has no elements: compile takes tensors like "
                    "those that the model will be called with, of at least one item"
                )
