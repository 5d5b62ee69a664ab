"""Checks of a problem's name and fields."""

from __future__ import annotations

import re
from collections.abc import Mapping

from escalade.errors import UnsupportedError


def match_name(pattern: re.Pattern[str], name: str, form: str) -> re.Match[str]:
    """Match a problem's name; `form` describes valid names in the error."""
    found = pattern.fullmatch(name)
    if not found:
        raise UnsupportedError(f"{name!r} does not name a {form}")
    return found


def require(operation: str, what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedError(f"{what} {value!r}: {operation} supports {', '.join(known)}")


def require_at_least(minimum: int, values: Mapping[str, int]) -> None:
    for what, value in values.items():
        if value < minimum:
            raise UnsupportedError(f"{what} is {value}: it must be at least {minimum}")
