"""Type errors: which argument does not match an operator's schema, and what the schema takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from escalade.errors import UnsupportedError

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Tensor types without behavior of their own in a call."""
_LARGEST = 2**63


class ArgumentTypes:
    """Argument types of an operator's schema."""

    def __init__(self, packet: Any) -> None:
        self._name = packet.__name__
        arguments = packet.default._schema.arguments
        self._kinds = [(argument.name, str(argument.type)) for argument in arguments]

    def require(self, arguments: Sequence[Any], error: Exception) -> None:
        """Raise `UnsupportedError` from `error` if an argument has the wrong type; return if all match."""
        for (name, kind), given in zip(self._kinds, arguments, strict=False):
            plain = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
            if plain not in _WANTED or (given is None and plain != kind):
                continue
            is_right, spelled = _WANTED[plain]
            if not is_right(given):
                raise UnsupportedError(
                    f"{self._name}: {name} must be {spelled}, not {describe(given)}"
                ) from error


def describe(given: Any) -> str:
    """Describe an argument of a wrong type."""
    if isinstance(given, torch.Tensor) and given.layout is not torch.strided:
        return f"a tensor of layout {given.layout}; call to_dense() first"
    if isinstance(given, int) and not _is_number(given):
        return "an integer of more than 64 bits"
    if isinstance(given, list | tuple):
        return (
            f"{type(given).__name__} of {' and '.join(sorted({describe(one) for one in given})) or 'nothing'}"
        )
    return type(given).__name__


def as_list(given: Any) -> Any:
    """Return an iterable as a list, and anything else unchanged for the operator to reject."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str) else given


def _is_number(given: Any) -> bool:
    return isinstance(given, torch.SymInt) or (isinstance(given, int) and -_LARGEST <= given < _LARGEST)


def _is_tensor(given: Any) -> bool:
    if isinstance(given, torch.Tensor):
        return given.layout is torch.strided
    return hasattr(type(given), "__torch_function__")


def _all(is_right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, list | tuple) and all(map(is_right, given))


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, kind)


_WANTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "Tensor": (_is_tensor, "a strided tensor"),
    "List[Tensor]": (_all(_is_tensor), "a list of strided tensors"),
    "List[int]": (_all(_is_number), "a list of integers"),
    "List[SymInt]": (_all(_is_number), "a list of integers"),
    "int": (_is_number, "an integer"),
    "SymInt": (_is_number, "an integer"),
    "float": (_is(int | float | torch.SymFloat), "a number"),
    "bool": (_is(bool), "a bool"),
    "str": (_is(str), "a str"),
}
"""Check and description of each schema type."""
