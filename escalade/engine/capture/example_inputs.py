"""Example inputs that a model is captured with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.graph.forms import is_dense, kind_of
from escalade.engine.graph.trees import flatten, opened
from escalade.errors import UnsupportedError


def require_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedError(f"compile takes a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedError(f"the model's {name} is on meta, without contents; load its weights first")


@dataclass(frozen=True)
class Names:
    """What a model calls what it is given."""

    tensors: tuple[str, ...]
    """Each tensor by the argument that it is, and what is in one by its place there too."""
    parameters: tuple[str, ...]
    """The arguments that are given in order; those that the model takes in order alone have no name."""


@dataclass(frozen=True)
class Given:
    """Example inputs: their tensors, and the arguments that these stand in."""

    tensors: Sequence[torch.Tensor]
    structure: pytree.TreeSpec
    takes_lists: bool = True
    """Whether a tensor of one dimension has an item for each of the batch, if it is as long: a label, a time."""

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: Mapping[str, Any] | None) -> Given:
        """What somebody gave, if a model can be captured with them."""
        if keywords is not None and not isinstance(keywords, Mapping):
            raise UnsupportedError(
                f"example_keywords is of type {type(keywords).__name__}; it takes a dict of arguments by name"
            )
        given = cls(*flatten((tuple(arguments), dict(keywords or {}))))
        given._check()
        return given

    @property
    def batch(self) -> int:
        """The number of items, at least two: export would take one for a constant. Zero: the tensors have none in
        common."""
        return max(self._items, 2) if self._items else 0

    @property
    def _items(self) -> int:
        sizes = {tensor.shape[0] for tensor in self.tensors if is_by_items(tensor)}
        return sizes.pop() if len(sizes) == 1 else 0

    def grows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has an item for each of the batch."""
        is_list = tensor.dim() == 1 and 0 < tensor.shape[0] == self._items
        return is_by_items(tensor) or (self.takes_lists and is_list)

    @property
    def readings(self) -> list[Given]:
        """These inputs, and if a tensor of one dimension is only as long as the batch by chance, that."""
        lists = any(tensor.dim() == 1 and self.grows(tensor) for tensor in self.tensors)
        return [self, replace(self, takes_lists=False)] if lists else [self]

    def call(self, tensors: Sequence[Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in order and by name, with these tensors or its own, in containers that are nobody else's."""
        return pytree.tree_unflatten(self.tensors if tensors is None else tensors, self.structure)

    def names(self, model: torch.nn.Module) -> Names:
        """What a model calls these."""
        parameters = _parameters(model)
        placed = zip(self.call()[0], parameters, strict=False)
        return Names(
            self._of_tensors(parameters),
            tuple(
                parameter.name if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else ""
                for _, parameter in placed
            ),
        )

    def _of_tensors(self, parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
        paths, _ = pytree.tree_flatten_with_path(opened(self.call()))
        names = []
        for path, leaf in paths:
            if not isinstance(leaf, torch.Tensor):
                continue
            _, first, *rest = [
                str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path
            ]
            if isinstance(path[0], pytree.SequenceKey) and path[0].idx == 0 and parameters:
                place = min(int(first), len(parameters) - 1)
                parameter = parameters[place]
                several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
                rest = [*([str(int(first) - place)] if several else []), *rest]
                first = parameter.name
            names.append(_identifier("_".join((first, *rest))))
        return tuple(names)

    def _check(self) -> None:
        if not self.tensors:
            raise UnsupportedError(
                "compile needs example inputs: tensors like those the model will be called with"
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
        if not any(tensor.numel() for tensor in self.tensors):
            raise UnsupportedError(
                f"the example inputs of shape {', '.join(str(tuple(tensor.shape)) for tensor in self.tensors)} have no "
                "elements: compile takes tensors like those that the model will be called with, of at least one item"
            )


def is_by_items(tensor: torch.Tensor) -> bool:
    """Whether an example's first size is that of a batch; without a row it is no batch, but something absent."""
    return tensor.dim() > 1 and tensor.shape[0] > 0


def _identifier(name: str) -> str:
    """The name, or one like it that can stand in a graph; a dict's keys may be anything."""
    plain = name if name.isidentifier() else re.sub("[^A-Za-z0-9_]", "_", name)
    return plain if plain.isidentifier() else f"_{plain}"


def _parameters(model: torch.nn.Module) -> list[inspect.Parameter]:
    """What the model's forward takes, as far as Python can tell."""
    try:
        return [*inspect.signature(model.forward).parameters.values()]
    except (TypeError, ValueError):
        return []
