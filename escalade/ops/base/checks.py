"""What the name and the fields of a problem must be, in sentences."""

from __future__ import annotations

import re
from collections.abc import Mapping

from escalade.errors import UnsupportedError


def match_name(pattern: re.Pattern[str], name: str, form: str) -> re.Match[str]:
    """`form` says what such a name stands for and how it is put together."""
    found = pattern.fullmatch(name)
    if not found:
        raise UnsupportedError(f"{name!r} names no {form}")
    return found


def require(operation: str, what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedError(f"{what} {value!r}: {operation} takes {', '.join(known)}")


def require_at_least(minimum: int, values: Mapping[str, int]) -> None:
    for what, value in values.items():
        if value < minimum:
            raise UnsupportedError(f"{what} of {value}: it must be at least {minimum}")
