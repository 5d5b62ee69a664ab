"""What a node of a captured graph looks like: the inputs that its operator takes, and the attributes that it has.

Files hold such nodes, and everything that a file says is checked against this before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Sizes = tuple[int, ...]
Attributes = Mapping[str, Any]
_NUMBERED = re.compile(r"x(0|[1-9]\d{0,5})")
RESULT = "y"
"""The role of a node's result among its sizes."""


class SizeError(ValueError):
    """Sizes that do not go together."""


@dataclass(frozen=True)
class Attribute:
    """What an attribute may be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Role:
    """An input: how many dimensions it may have, whether it is a constant, and whether it may be missing."""

    dimensions: tuple[int, int]
    constant: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Signature:
    """The inputs by role, and the attributes by name."""

    inputs: Mapping[str, Role]
    attributes: Mapping[str, Attribute]
    floating: bool = True
    """Whether the operator is for floating-point numbers only."""
    masks: bool = False
    """Whether inputs may be truth values and bytes as well, and the result a truth value."""
    repeated: Role | None = None
    """What x0, x1 and so on are, of an operator that takes any number of them."""

    def role(self, name: str) -> Role | None:
        """The input of that name; None: there is none."""
        return self.repeated if self.repeated and _NUMBERED.fullmatch(name) else self.inputs.get(name)


def is_whole(value: Any, least: int = 0, most: int = 2**31 - 1) -> bool:
    """Whether a value is a whole number within bounds; True is no number."""
    return type(value) is int and least <= value <= most


def is_real(value: Any) -> bool:
    """Whether a value is a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def pair(least: int) -> Attribute:
    """An attribute of two numbers, one for height and one for width."""

    def holds(value: Any) -> bool:
        return type(value) is tuple and len(value) == 2 and all(is_whole(part, least) for part in value)

    return Attribute(f"two whole numbers of at least {least}", holds)


FLAG = Attribute("true or false", lambda value: type(value) is bool)
INDEX = Attribute("a whole number of at least 0", is_whole)
COUNT = Attribute("a whole number of at least 1", lambda value: is_whole(value, 1))
EPSILON = Attribute("a number of at least 0", lambda value: is_real(value) and value >= 0)

ANY = Role((0, 16))
ROWS = Role((1, 16))
IMAGE = Role((4, 4))
VECTOR = Role((1, 1), constant=True)
OPTIONAL_VECTOR = Role((1, 1), constant=True, optional=True)


def positive(sizes: list[int]) -> list[int]:
    """The sizes of an image behind a window that fits into the one in front."""
    if min(sizes) < 1:
        raise SizeError("the window is larger than the image")
    return sizes
