"""The kinds of nodes that a captured graph is made of, PyTorch's own operators apart.

Of each: the inputs it takes, the attributes it has, and which sizes follow from which. Passes make other kinds, which
no file holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Sizes = tuple[int, ...]
Attributes = Mapping[str, Any]
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
class Kind:
    """The sizes of inputs and of the result (`y`) are as `sizes` says, given those of all inputs; a role that it does
    not name is free.
    """

    inputs: Mapping[str, Role]
    attributes: Mapping[str, Attribute]
    sizes: Callable[[Mapping[str, Sizes], Attributes], Mapping[str, Sizes]]
    floating: bool = True
    """Whether it is for floating-point numbers only."""


def is_whole(value: Any, least: int = 0, most: int = 2**31 - 1) -> bool:
    """True is no number."""
    return type(value) is int and least <= value <= most


def is_real(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _pair(least: int) -> Attribute:
    def holds(value: Any) -> bool:
        return type(value) is tuple and len(value) == 2 and all(is_whole(part, least) for part in value)

    return Attribute(f"two whole numbers of at least {least}", holds)


_FLAG = Attribute("true or false", lambda value: type(value) is bool)
_COUNT = Attribute("a whole number of at least 1", lambda value: is_whole(value, 1))
_EPSILON = Attribute("a number of at least 0", lambda value: is_real(value) and value >= 0)
_LIMIT = Attribute(
    "a positive number or nothing", lambda value: value is None or (is_real(value) and value > 0)
)
_APPROXIMATE = Attribute("none or tanh", lambda value: value in ("none", "tanh"))

_ANY = Role((0, 16))
_ROWS = Role((1, 16))
_IMAGE = Role((4, 4))
_VECTOR = Role((1, 1), constant=True)


def _same(sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
    return dict.fromkeys((*sizes, RESULT), sizes["x"])


def _conv2d(sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
    batch, _, *image = sizes["x"]
    filters, channels, *window = sizes["weight"]
    groups = attributes["groups"]
    if filters % groups:
        raise SizeError(f"{filters} filters are no multiple of {groups} groups")
    by_axis = zip(image, window, *(attributes[key] for key in ("stride", "padding", "dilation")), strict=True)
    result = [
        (size + 2 * padding - dilation * (reach - 1) - 1) // stride + 1
        for size, reach, stride, padding, dilation in by_axis
    ]
    return {
        "x": (batch, channels * groups, *image),
        "bias": (filters,),
        RESULT: (batch, filters, *_positive(result)),
    }


def _max_pool2d(sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
    batch, channels, *image = sizes["x"]
    result = []
    for size, window, stride, padding in zip(
        image, *(attributes[key] for key in ("kernel", "stride", "padding")), strict=True
    ):
        if 2 * padding > window:
            raise SizeError(f"a padding of {padding} is more than half of a window of {window}")
        room = size + 2 * padding - window
        steps = -(-room // stride) if attributes["ceil_mode"] else room // stride
        begins_outside = attributes["ceil_mode"] and steps * stride >= size + padding
        result.append(steps + (0 if begins_outside else 1))
    return {RESULT: (batch, channels, *_positive(result))}


def _positive(sizes: list[int]) -> list[int]:
    if min(sizes) < 1:
        raise SizeError("the window is larger than the image")
    return sizes


def _by_channel(sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
    x = sizes["x"]
    return {**dict.fromkeys(sizes, x[1:2]), "x": x, RESULT: x}


def _by_feature(sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
    x = sizes["x"]
    return {**dict.fromkeys(sizes, x[-1:]), "x": x, RESULT: x}


def _linear(sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
    outputs, features = sizes["weight"]
    rows = sizes["x"][:-1]
    return {"x": (*rows, features), "bias": (outputs,), RESULT: (*rows, outputs)}


def _reshape(sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
    if math.prod(sizes["x"]) != math.prod(sizes[RESULT]):
        raise SizeError(f"{list(sizes['x'])} and {list(sizes[RESULT])} have different numbers of elements")
    return {}


def _adaptive_avg_pool2d(sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
    return {RESULT: (*sizes["x"][:2], *attributes["output"])}


KINDS: dict[str, Kind] = {
    "conv2d": Kind(
        {
            "x": _IMAGE,
            "weight": Role((4, 4), constant=True),
            "bias": Role((1, 1), constant=True, optional=True),
        },
        {"stride": _pair(1), "padding": _pair(0), "dilation": _pair(1), "groups": _COUNT, "relu": _FLAG},
        _conv2d,
    ),
    "batch_norm": Kind(
        {"x": Role((2, 5)), **dict.fromkeys(("weight", "bias", "mean", "variance"), _VECTOR)},
        {"epsilon": _EPSILON, "relu": _FLAG},
        _by_channel,
    ),
    "relu": Kind({"x": _ANY}, {"limit": _LIMIT}, _same, floating=False),
    "add": Kind({"x": _ANY, "residual": _ANY}, {"relu": _FLAG}, _same, floating=False),
    "max_pool2d": Kind(
        {"x": _IMAGE},
        {"kernel": _pair(1), "stride": _pair(1), "padding": _pair(0), "ceil_mode": _FLAG},
        _max_pool2d,
    ),
    "adaptive_avg_pool2d": Kind({"x": _IMAGE}, {"output": _pair(1)}, _adaptive_avg_pool2d),
    "linear": Kind(
        {
            "x": _ROWS,
            "weight": Role((2, 2), constant=True),
            "bias": Role((1, 1), constant=True, optional=True),
        },
        {"relu": _FLAG},
        _linear,
    ),
    "layer_norm": Kind({"x": _ROWS, "weight": _VECTOR, "bias": _VECTOR}, {"epsilon": _EPSILON}, _by_feature),
    "gelu": Kind({"x": _ANY}, {"approximate": _APPROXIMATE}, _same),
    "softmax": Kind({"x": _ROWS}, {}, _same),
    "reshape": Kind({"x": _ANY}, {}, _reshape, floating=False),
    "normalise": Kind({"x": _IMAGE, "scale": _VECTOR, "shift": _VECTOR}, {}, _by_channel),
}
