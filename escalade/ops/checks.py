"""What the fields of a problem must be, in sentences."""

from __future__ import annotations

from collections.abc import Mapping

from escalade.errors import UnsupportedError


def require(operation: str, what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedError(f"{what} {value!r}: {operation} takes {', '.join(known)}")


def require_at_least(minimum: int, values: Mapping[str, int]) -> None:
    for what, value in values.items():
        if value < minimum:
            raise UnsupportedError(f"{what} of {value}: it must be at least {minimum}")
