"""Type checks for the arguments of PyTorch's operators, by the types of the operator's own schema.

PyTorch converts what it is passed and trusts the result: an integer where a dtype belongs becomes an index into a table
without a bounds check. A file is data from anywhere, so nothing reaches PyTorch that its schema does not declare.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from escalade.engine.graph.graph import Batch, Reference, dtype_name

ELEMENT_TYPES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64",
    "complex128",
)  # fmt: skip
"""Element types of a graph's values."""
MAX_PARTS = 2**18  # items per list argument, and parts that an operator may split a tensor into
MAX_CHARACTERS = 1000  # per string argument
LARGEST_INT = 2**63 - 1


def schema_mismatch(operator: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> str | None:
    """Describe the first argument that the operator's schema does not allow; None if all fit."""
    kinds = {argument.name: str(argument.real_type) for argument in operator._schema.arguments}
    for name, value in arguments.items():
        kind = kinds.get(name)
        if kind is None:
            return f"{operator.name()} has no argument {name}"
        if not _fits(value, kind):
            return f"argument {name} of {operator.name()} is {_shown(value)}; its type is {kind}"
    return None


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[len("Optional[") : -1])
    if kind.startswith("List["):
        inner = kind[len("List[") : -1]
        return type(value) is tuple and len(value) <= MAX_PARTS and all(_fits(item, inner) for item in value)
    test = _TESTS.get(kind)
    return test is not None and test(value)


def _is_int(value: Any) -> bool:
    if type(value) is Batch:
        return type(value.times) is int and 1 <= value.times < 2**31
    return type(value) is int and -LARGEST_INT <= value <= LARGEST_INT


def _is_number(value: Any) -> bool:
    return type(value) in (bool, float) or _is_int(value)


_TESTS: Mapping[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: type(value) is Reference or _is_number(value),  # PyTorch wraps numbers
    "int": _is_int,
    "float": lambda value: type(value) is float or _is_int(value),
    "number": _is_number,
    "bool": lambda value: type(value) is bool,
    "str": lambda value: type(value) is str and len(value) <= MAX_CHARACTERS and value.isprintable(),
    "ScalarType": lambda value: isinstance(value, torch.dtype) and dtype_name(value) in ELEMENT_TYPES,
    "Layout": lambda value: value is torch.strided,
    "MemoryFormat": lambda value: isinstance(value, torch.memory_format),
    "Device": lambda value: isinstance(value, torch.device) and value.type in ("cpu", "cuda"),
    "Generator": lambda value: False,  # a file cannot hold one
}
"""Test for the values of each schema type; other types are rejected."""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
