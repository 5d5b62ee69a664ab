"""Parsing with precise error messages: JSON into dataclasses, and sizes such as 1.5GiB."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i)?)?b?", re.IGNORECASE)


def parse(text: str | bytes) -> Any:
    """Parse JSON; raises ValueError for anything else."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def parse_unique(text: str) -> Any:
    """Parse JSON, and raise ValueError for repeated keys: Python would keep the last, other readers the first."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"keys are repeated among {', '.join(repr(key) for key, _ in pairs)}")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def parse_size(text: str) -> int:
    """Parse a size such as `500MB`, `1.5GiB` or `4096` into bytes; raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is not a size; write 500MB, 1.5GiB or 4096 (bytes)")
    number, unit, binary = found.groups()
    power = "kmgt".index(unit.lower()) + 1 if unit else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def parse_dataclass(kind: type[T], values: object) -> T:
    """Convert a JSON object to a dataclass; raises ValueError with the name of the wrong field.

    Unknown fields are ignored: a later version may have added them.
    """
    if not isinstance(values, dict):
        raise ValueError(f"holds {_kind(values)}; an object is expected")
    expected = _expected(kind)  # type: ignore[arg-type]  # classes are hashable
    missing = [name for name, (_, required) in expected.items() if required and name not in values]
    if missing:
        raise ValueError(f"lacks {', '.join(missing)}")
    for name, (wanted, _) in expected.items():
        if name in values and not _fits(values[name], wanted):
            raise ValueError(
                f"has {_shown(values[name])} as its {name}, which is not of type {_spell(wanted)}"
            )
    return kind(**{name: values[name] for name in expected if name in values})


@cache
def _expected(kind: type[Any]) -> dict[str, tuple[Any, bool]]:
    """Return the type of each field and whether it is required."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }


def _fits(value: object, wanted: Any) -> bool:
    if wanted is Any:
        return _is_json(value)
    if isinstance(wanted, types.UnionType):
        return any(_fits(value, option) for option in typing.get_args(wanted))
    if typing.get_origin(wanted) in (dict, Mapping):
        inner = typing.get_args(wanted)[1]
        return isinstance(value, dict) and all(_fits(each, inner) for each in value.values())
    if typing.get_origin(wanted) is list:
        inner = typing.get_args(wanted)[0]
        return isinstance(value, list) and all(_fits(each, inner) for each in value)
    if isinstance(value, bool):
        return wanted is bool
    if wanted is float:
        return isinstance(value, int | float) and _is_finite(value)
    return isinstance(value, wanted)


def _is_json(value: object) -> bool:
    """Return True if the value can be written as standard JSON, which has no NaN or Infinity."""
    if isinstance(value, dict):
        return all(map(_is_json, value.values()))
    if isinstance(value, list):
        return all(map(_is_json, value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int larger than any float
        return False


def _kind(value: object) -> str:
    names = {type(None): "null", bool: "a Boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _spell(wanted: Any) -> str:
    return getattr(wanted, "__name__", str(wanted)) if not typing.get_args(wanted) else str(wanted)
