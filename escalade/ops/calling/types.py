"""What an operator's schema takes, in Python's types and in words: for calls with something else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from escalade.errors import UnsupportedError

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types of tensors that do nothing of their own in a call."""
_LARGEST = 2**63


class Types:
    """The types that an operator's arguments are of."""

    def __init__(self, packet: Any) -> None:
        self._name = packet.__name__
        arguments = packet.default._schema.arguments
        self._kinds = [(argument.name, str(argument.type)) for argument in arguments]

    def require(self, arguments: Sequence[Any], error: Exception) -> None:
        """Says which argument is not of the type that the operator takes, if one is not: else the error was another."""
        for (name, kind), given in zip(self._kinds, arguments, strict=False):
            plain = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional[") else kind
            if plain not in _WANTED or (given is None and plain != kind):
                continue
            is_right, spelled = _WANTED[plain]
            if not is_right(given):
                raise UnsupportedError(
                    f"{self._name} takes {spelled} as its {name}, not {described(given)}"
                ) from error


def described(given: Any) -> str:
    """What is wrong with an argument, in few words."""
    if isinstance(given, torch.Tensor) and given.layout is not torch.strided:
        return f"one in {given.layout}; to_dense() gives such a one"
    if isinstance(given, int) and not _is_number(given):
        return "a number of more than 64 bits"
    if isinstance(given, list | tuple):
        return f"{type(given).__name__} of {' and '.join(sorted({described(one) for one in given})) or 'nothing'}"
    return type(given).__name__


def listed(given: Any) -> Any:
    """A list of what is given one by one; anything else as it is, for the operator to say that it takes none such."""
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
    "Tensor": (_is_tensor, "a tensor"),
    "List[Tensor]": (_all(_is_tensor), "tensors"),
    "List[int]": (_all(_is_number), "whole numbers"),
    "List[SymInt]": (_all(_is_number), "whole numbers"),
    "int": (_is_number, "a whole number"),
    "SymInt": (_is_number, "a whole number"),
    "float": (_is(int | float | torch.SymFloat), "a number"),
    "bool": (_is(bool), "True or False"),
    "str": (_is(str), "a text"),
}
"""What the kinds of a schema are in Python, and in words."""
