"""Lowering: a node as a problem of one of Escalade's operations, and the facts about a plan that it depends on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

import torch

from escalade.engine.graph.forms import Form, unquantized
from escalade.engine.graph.graph import Node
from escalade.errors import UnsupportedError
from escalade.ops.base import dtypes
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem

_Problem = TypeVar("_Problem")
STORED, NHWC, FP32, OWN = "stored", "nhwc", "fp32", "own"
"""Forms of a constant: the plan's dtype, the same in NHWC, fp32, or the constant's own dtype. A quantized dtype stands
for that dtype in NHWC."""
_OPTIONAL_ROLES = ("weight", "bias", "residual")


@dataclass(frozen=True)
class Placement:
    """Position of a value inside a larger buffer, in elements."""

    offset: int
    """From the start of the buffer, which is 16-byte aligned."""
    pitch: int
    """From row to row; 0: dense."""


@dataclass(frozen=True)
class ElementMove:
    """Copy of elements: meta tensors of one shape with the strides and offsets of source and target."""

    source: torch.Tensor
    target: torch.Tensor
    reversed: tuple[int, ...] = ()
    """Dimensions of the source that are read backwards."""


@dataclass(frozen=True)
class Lowered:
    """A node as a problem of one of Escalade's operations."""

    operation: Operation
    problem: Problem
    constants: Mapping[str, str] = field(default_factory=dict)
    """Form of each constant input by role; `STORED` for the others."""
    in_place: str | None = None
    """Role of an input whose memory the result may reuse."""
    pitches: Mapping[str, str] = field(default_factory=dict)
    """Problem fields for the pixel pitch in elements, by role; `x_pitch`, `y_pitch` and so on for the others."""
    at_pitches: Callable[[Mapping[str, int]], Problem | None] | None = field(default=None, compare=False)
    """Creates the problem for pixel pitches by role, if it has no such fields."""
    at_placements: Callable[[Mapping[str, Placement]], Problem | None] | None = field(
        default=None, compare=False
    )
    """Creates the problem for values at any placement, by role; a rung is then chosen again."""

    def with_pitches(self, pitches: Mapping[str, int]) -> Problem | None:
        """Return the problem with these pixel pitches by role; None if it cannot express them."""
        if self.at_placements is not None:
            return self.at_placements({role: Placement(0, pitch) for role, pitch in pitches.items()})
        if self.at_pitches is not None:
            return self.at_pitches(pitches)
        found = {self.pitches.get(role, f"{role}_pitch"): pitch for role, pitch in pitches.items()}
        if found.keys() - _field_names(type(self.problem)):
            return None
        return replace(self.problem, **found)  # type: ignore[type-var]


@dataclass(frozen=True)
class SideBuffer:
    """A buffer that the kernels of another node write besides their result."""

    node: str
    buffer: str


@cache
def _field_names(kind: type[Any]) -> frozenset[str]:
    return frozenset(each.name for each in fields(kind))


def problem_from(kind: type[_Problem], node: Node, **given: Any) -> _Problem:
    """Return a problem with the given fields; the others are the node's attributes of the same names.

    Fields named after an optional input (`bias`, `residual`, …) are True if the node has it. The layout is never
    derived: a node's attribute of that name is about its result.
    """
    names = _field_names(kind) - given.keys() - {"layout"}  # type: ignore[arg-type]
    derived = {role: role in node.inputs for role in _OPTIONAL_ROLES if role in names}
    derived |= {name: value for name, value in node.attributes.items() if name in names}
    return kind(**derived, **given)


def image_problem(kind: type[_Problem], node: Node, form: Form, dtype: str, **given: Any) -> _Problem:
    """Return a problem on images of this form, or on values of another rank; see `problem_from`.

    Of these, all dimensions after the channels are pixels.
    """
    batch, channels, *pixels = form.shape
    height, width = pixels if len(pixels) == 2 else (1, math.prod(pixels))
    sizes = {"batch": batch, "channels": channels, "height": height, "width": width}
    layout = "nhwc" if form.layout == "nhwc" else "nchw"
    return problem_from(kind, node, **{**sizes, "dtype": dtype, "layout": layout, **given})


class Forms:
    """A plan as lowering sees it: its dtype, the form of each value, the shape of each constant."""

    def __init__(
        self,
        dtype: str,
        values: Mapping[str, Form],
        constants: Mapping[str, torch.Tensor],
        typed: bool = False,
    ) -> None:
        """In a `typed` graph, `dtype` is the one in which fp32 is multiplied."""
        self.dtype = unquantized(dtype)
        """Dtype of everything that is not marked as quantized."""
        self.typed = typed
        self._values = dict(values)
        self._constants = constants

    def of(self, node: Node) -> Forms | None:
        """Return the forms with the dtype of one node of a typed graph; None if no kernel has that dtype."""
        if not self.typed:
            return self
        kind = getattr(torch, node.dtype)
        if kind not in dtypes.NAMES:
            return None
        made = copy(self)
        made.dtype = self.dtype if kind is torch.float32 else dtypes.NAMES[kind]
        return made

    def value(self, name: str) -> Form:
        """Return how a value is stored in memory.

        Raises UnsupportedError for a constant: kernels read images and rows from values. A layer whose weights are
        trained may read a constant that was folded for the batch size; PyTorch computes that layer.
        """
        if name in self._constants:
            raise UnsupportedError(f"reads the constant {name}, and its kernels read values of the plan")
        return self._values[name]

    def add(self, name: str, form: Form) -> None:
        """Add a value that a pass or the plan considers creating."""
        self._values[name] = form

    def is_constant(self, name: str) -> bool:
        return name in self._constants

    def sizes(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight, which may be a constant or a value."""
        return self.constant(name) if self.is_constant(name) else self.value(name).shape

    def constant(self, name: str) -> tuple[int, ...]:
        """Return the shape of a constant."""
        return tuple(self._constants[name].shape)

    def constant_type(self, name: str) -> torch.dtype:
        """Return the dtype of a constant; a floating one is converted to the dtype of its form."""
        return self._constants[name].dtype

    @property
    def stored(self) -> str:
        """Name of the dtype in which values are stored."""
        return "fp32" if self.dtype == "tf32" else self.dtype
