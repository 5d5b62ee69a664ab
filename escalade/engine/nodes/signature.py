"""Signatures of captured nodes: inputs and attributes, against which everything in a file is checked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

Sizes = tuple[int, ...]
Attributes = Mapping[str, Any]
_NUMBERED = re.compile(r"x(0|[1-9]\d{0,5})")
RESULT = "y"
"""Role of a node's result among its shapes."""


class SizeError(ValueError):
    """Shapes that do not match."""


@dataclass(frozen=True)
class Attribute:
    """Valid values of an attribute, in words and as a predicate."""

    words: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Role:
    """An input: smallest and largest rank, whether it is a constant, and whether it is optional."""

    dimensions: tuple[int, int]
    constant: bool = False
    optional: bool = False
    along: int | None = None
    """Dimension of the result that a vector has one number for each element of."""


@dataclass(frozen=True)
class Signature:
    """Inputs by role, and attributes by name."""

    inputs: Mapping[str, Role]
    attributes: Mapping[str, Attribute]
    floating: bool = True
    """True if the operator is for floating-point numbers only."""
    masks: bool = False
    """True if inputs may be bool and uint8 too, and the result bool."""
    indices: bool = False
    """True if the result is int64, whatever the dtype of the inputs."""
    repeated: Role | None = None
    """Role of x0, x1 and so on, for an operator with any number of inputs."""

    def role(self, name: str) -> Role | None:
        return self.repeated if self.repeated and _NUMBERED.fullmatch(name) else self.inputs.get(name)


def is_whole(value: Any, least: int = 0, most: int = 2**31 - 1) -> bool:
    """Return True for an int within bounds; a bool is none."""
    return type(value) is int and least <= value <= most


def is_real(value: Any) -> bool:
    """Return True for a finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def is_tuple(value: Any, length: int, holds: Callable[[Any], bool]) -> bool:
    """Return True for a tuple of this length whose items all satisfy a predicate."""
    return type(value) is tuple and len(value) == length and all(map(holds, value))


def pair(least: int) -> Attribute:
    """Return an attribute of two integers, for height and width."""
    return Attribute(
        f"two whole numbers of at least {least}",
        lambda value: is_tuple(value, 2, lambda part: is_whole(part, least)),
    )


def one_of(*choices: str) -> Attribute:
    return Attribute(f"one of {', '.join(choices)}", lambda value: type(value) is str and value in choices)


FLAG = Attribute("true or false", lambda value: type(value) is bool)
INDEX = Attribute("a whole number of at least 0", is_whole)
COUNT = Attribute("a whole number of at least 1", lambda value: is_whole(value, 1))
EPSILON = Attribute("a number of at least 0", lambda value: is_real(value) and value >= 0)

ANY = Role((0, 16))
ROWS = Role((1, 16))
IMAGE = Role((4, 4))
FILTERS = Role((4, 4), constant=True)
VECTOR = Role((1, 1), constant=True, along=1)
OPTIONAL_VECTOR = replace(VECTOR, optional=True)
OPTIONAL_ROW = replace(OPTIONAL_VECTOR, along=-1)


def require_positive(sizes: list[int]) -> list[int]:
    """Return the height and width of a window operator's result, unless the window does not fit the image."""
    if min(sizes) < 1:
        raise SizeError("the window is larger than the image")
    return sizes
