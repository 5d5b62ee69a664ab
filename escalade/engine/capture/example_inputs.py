"""Example inputs that a model is captured with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.graph.forms import describe_tensor, is_dense
from escalade.engine.graph.trees import flatten, open_dataclasses
from escalade.errors import UnsupportedError


def require_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedError(f"compile takes a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise UnsupportedError(f"the model's {name} is on the meta device; load its weights first")


@dataclass(frozen=True)
class InputNames:
    """Names that a model's signature gives to its inputs."""

    tensors: tuple[str, ...]
    """Name of each tensor: its argument, followed by its path if the argument is a container."""
    parameters: tuple[str, ...]
    """Names of the positional arguments; empty for positional-only ones."""


@dataclass(frozen=True)
class ExampleInputs:
    """Example inputs: their tensors, and the structure of the arguments that hold these."""

    tensors: Sequence[torch.Tensor]
    structure: pytree.TreeSpec
    vectors_are_batched: bool = True
    """True to treat a 1-D tensor as long as the batch as batched: one label or timestep per item."""

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: Mapping[str, Any] | None) -> ExampleInputs:
        """Flatten and check a caller's example inputs."""
        if keywords is not None and not isinstance(keywords, Mapping):
            raise UnsupportedError(f"example_keywords is {type(keywords).__name__}; pass a dict of arguments")
        inputs = cls(*flatten((tuple(arguments), dict(keywords or {}))))
        inputs._check()
        return inputs

    @property
    def batch(self) -> int:
        """Batch size, at least 2, since export specializes a size of 1; 0 if the tensors have no common batch size."""
        return max(self._batch_size, 2) if self._batch_size else 0

    @property
    def _batch_size(self) -> int:
        sizes = {tensor.shape[0] for tensor in self.tensors if has_batch_dimension(tensor)}
        return sizes.pop() if len(sizes) == 1 else 0

    def is_batched(self, tensor: torch.Tensor) -> bool:
        is_vector = tensor.dim() == 1 and 0 < tensor.shape[0] == self._batch_size
        return has_batch_dimension(tensor) or (self.vectors_are_batched and is_vector)

    @property
    def interpretations(self) -> list[ExampleInputs]:
        """These inputs, then the same with 1-D tensors unbatched, in case their length equals the batch by chance."""
        has_batched_vector = any(tensor.dim() == 1 and self.is_batched(tensor) for tensor in self.tensors)
        return [self, replace(self, vectors_are_batched=False)] if has_batched_vector else [self]

    def call(self, tensors: Sequence[Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments in new containers, with `tensors` or the example's own."""
        return pytree.tree_unflatten(self.tensors if tensors is None else tensors, self.structure)

    def names(self, model: torch.nn.Module) -> InputNames:
        """Name these inputs after the parameters of the model's `forward`."""
        parameters = _parameters(model)
        positional = zip(self.call()[0], parameters, strict=False)
        return InputNames(
            self._tensor_names(parameters),
            tuple(
                parameter.name if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else ""
                for _, parameter in positional
            ),
        )

    def _tensor_names(self, parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
        paths, _ = pytree.tree_flatten_with_path(open_dataclasses(self.call()))
        names = []
        for path, leaf in paths:
            if not isinstance(leaf, torch.Tensor):
                continue
            _, first, *rest = [
                str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path
            ]
            if isinstance(path[0], pytree.SequenceKey) and path[0].idx == 0 and parameters:
                index = min(int(first), len(parameters) - 1)
                parameter = parameters[index]
                is_variadic = parameter.kind is inspect.Parameter.VAR_POSITIONAL
                rest = [*([str(int(first) - index)] if is_variadic else []), *rest]
                first = parameter.name
            names.append(_as_identifier("_".join((first, *rest))))
        return tuple(names)

    def _check(self) -> None:
        if not self.tensors:
            raise UnsupportedError("compile needs example inputs: pass tensors like those of later calls")
        for tensor in self.tensors:
            if tensor.dtype.is_complex or tensor.is_quantized or not is_dense(tensor):
                raise UnsupportedError(
                    f"an example input is {describe_tensor(tensor)}; pass dense tensors of real numbers"
                )
            if tensor.is_meta:
                raise UnsupportedError(
                    "an example input is on the meta device, without contents: pass tensors like those that the model "
                    "will be called with"
                )
        if not any(tensor.numel() for tensor in self.tensors):
            raise UnsupportedError(
                f"the example inputs of shape {', '.join(str(tuple(tensor.shape)) for tensor in self.tensors)} have no "
                "elements: pass tensors like those that the model will be called with, of batch size 1 or more"
            )


def has_batch_dimension(tensor: torch.Tensor) -> bool:
    """Return True if dimension 0 of an example is its batch. A size of 0 there means an absent input, not a batch."""
    return tensor.dim() > 1 and tensor.shape[0] > 0


def _as_identifier(name: str) -> str:
    """Turn a name into a valid identifier: keys of a dict may be any string."""
    plain = name if name.isidentifier() else re.sub("[^A-Za-z0-9_]", "_", name)
    return plain if plain.isidentifier() else f"_{plain}"


def _parameters(model: torch.nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of the model's `forward`; none if it has no Python signature."""
    try:
        return [*inspect.signature(model.forward).parameters.values()]
    except (TypeError, ValueError):
        return []
