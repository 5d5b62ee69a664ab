"""The registry of ONNX operators, and the node that each is called with.

A value is a tensor, or a number or list of numbers on the host: shapes and constants of few elements. Shape arithmetic
therefore runs in Python while a network is captured, and leaves no trace in the captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from escalade.errors import UnsupportedError

Compute = Callable[["OnnxNode", Sequence[Any]], Any]
_Compute = TypeVar("_Compute", bound=Compute)
OPERATORS: dict[str, Compute] = {}
"""Functions that compute a node, by ONNX operator of the default domain."""


def operator(*names: str) -> Callable[[_Compute], _Compute]:
    """Register a function for these ONNX operators."""

    def register(function: _Compute) -> _Compute:
        OPERATORS.update(dict.fromkeys(names, function))
        return function

    return register


@dataclass(frozen=True)
class OnnxNode:
    """One node of an ONNX graph."""

    op: str
    name: str
    attributes: Mapping[str, Any]
    """Attributes as Python values; tensors as PyTorch's."""
    constants: Mapping[int, Any]
    """Host copies of the inputs that are constants of few elements, by position."""
    types: Mapping[int, torch.dtype]
    """Dtypes of the inputs that are constants, by position."""
    outputs: int
    """Number of results up to the last one that is used."""
    batch: int | None = None
    """The fixed batch size of all inputs in the file; None if the batch is dynamic."""

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute."""
        return self.attributes.get(name, default)

    def host(self, inputs: Sequence[Any], position: int, default: Any = None) -> Any:
        """Return an input as a number or list of numbers; `default` if it is absent."""
        value = given(inputs, position)
        if value is None:
            return default
        if position in self.constants:
            return self.constants[position]
        if isinstance(value, torch.Tensor):
            raise self.refusal(f"input {position} is computed from the data; it must be constant or a shape")
        return value

    def require(self, holds: bool, reason: str) -> None:
        if not holds:
            raise self.refusal(reason)

    def require_defaults(self, **defaults: Any) -> None:
        """Refuse attributes with any other value."""
        for name, default in defaults.items():
            value = self.get(name, default)
            self.require(value == default, f"{name}={value!r} is not supported, only {default!r}")

    def refusal(self, reason: str) -> UnsupportedError:
        return UnsupportedError(f"ONNX node {self.name!r} ({self.op}): {reason}")


def given(inputs: Sequence[Any], position: int) -> Any:
    """Return an input; None if it is absent."""
    return inputs[position] if position < len(inputs) else None


def as_tensor(value: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a host value as a tensor on the device of `like`; floats get its dtype."""
    if isinstance(value, torch.Tensor):
        return value
    made = torch.tensor(value, device=like.device)
    return made.to(like.dtype) if made.is_floating_point() and like.is_floating_point() else made


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return values, of which at least one is a tensor, as tensors."""
    like = next(value for value in values if isinstance(value, torch.Tensor))
    return [as_tensor(value, like) for value in values]
