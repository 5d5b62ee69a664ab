"""What lowering a node gives, an operation of Escalade's and its problem, and what it may ask about the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, replace

import torch

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Node
from escalade.errors import UnsupportedError
from escalade.ops.base import dtypes
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem

STORED, NHWC, FP32, FP8, OWN = "stored", "nhwc", "fp32", "fp8", "own"
"""Forms of a constant: the plan's type, the same in NHWC order, fp32, or e4m3 in NHWC order."""


@dataclass(frozen=True)
class Lying:
    """Where a value lies that is inside another."""

    first: int
    """Elements from the beginning of that one, which is at a multiple of 16 bytes."""
    pitch: int
    """Elements from row to row; 0: it is dense."""


@dataclass(frozen=True)
class Moved:
    """Elements of a value that go to some place in a result, both as tensors without contents, of the same sizes, that
    lie in memory as those do."""

    source: torch.Tensor
    target: torch.Tensor
    reversed: tuple[int, ...] = ()
    """The dimensions of the source that are gone through from their end on."""


@dataclass(frozen=True)
class Lowered:
    """A node as a problem of one of Escalade's operations."""

    operation: Operation
    problem: Problem
    constants: Mapping[str, str] = field(default_factory=dict)
    """The form of each constant input, by role; `STORED` unless said."""
    in_place: str | None = None
    """The role of an input whose memory the result may take."""
    pitches: Mapping[str, str] = field(default_factory=dict)
    """The problem's field for elements from pixel to pixel, by role; `x_pitch`, `y_pitch` and so on unless said."""
    at_pitches: Callable[[Mapping[str, int]], Problem | None] | None = field(default=None, compare=False)
    """What makes the problem with pixels apart, by role, where it has no such fields."""
    at_places: Callable[[Mapping[str, Lying]], Problem | None] | None = field(default=None, compare=False)
    """What makes the problem for values inside others, by role, of an operation that takes them wherever they lie: then
    a rung is chosen again for that."""

    def apart(self, pitches: Mapping[str, int]) -> Problem | None:
        """The problem with the pixels of these roles so many elements apart; None: it cannot say so."""
        if self.at_places is not None:
            return self.at_places({role: Lying(0, pitch) for role, pitch in pitches.items()})
        if self.at_pitches is not None:
            return self.at_pitches(pitches)
        found = {self.pitches.get(role, f"{role}_pitch"): pitch for role, pitch in pitches.items()}
        if found.keys() - {each.name for each in fields(self.problem)}:  # type: ignore[arg-type]
            return None
        return replace(self.problem, **found)  # type: ignore[type-var]


@dataclass(frozen=True)
class Concatenated:
    """A result that is nothing but its inputs side by side."""

    dimension: int
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Taken:
    """A result that is nothing but a range of x."""

    dimension: int
    first: int


@dataclass(frozen=True)
class Beside:
    """A result that the kernels of another node write into one of their buffers, beside their own."""

    node: str
    buffer: str


class Forms:
    """What lowering asks about a plan: its dtype, the form of each value, the sizes of each constant."""

    def __init__(
        self,
        dtype: str,
        values: Mapping[str, Form],
        constants: Mapping[str, torch.Tensor],
        typed: bool = False,
    ) -> None:
        """`typed` where the graph is: then the dtype is the one in which fp32 is multiplied."""
        self.dtype = "fp16" if dtype == "fp8" else dtype
        """The dtype of whatever is not marked as FP8."""
        self.typed = typed
        self._values = dict(values)
        self._constants = constants

    def of(self, node: Node) -> Forms | None:
        """What one node asks: with its own dtype where the graph is typed; None if there are no kernels for that."""
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
        """Tells of a value that the plan has made."""
        self._values[name] = form

    def is_constant(self, name: str) -> bool:
        """Whether a name is that of a constant."""
        return name in self._constants

    def sizes(self, name: str) -> tuple[int, ...]:
        """The sizes of a weight, which may be a constant or a value."""
        return self.constant(name) if self.is_constant(name) else self.value(name).shape

    def constant(self, name: str) -> tuple[int, ...]:
        """The sizes of a constant."""
        return tuple(self._constants[name].shape)

    def constant_type(self, name: str) -> torch.dtype:
        """The element type of a constant; a floating one stands for whichever its form has."""
        return self._constants[name].dtype

    @property
    def stored(self) -> str:
        """The dtype's name where nothing is multiplied."""
        return "fp32" if self.dtype == "tf32" else self.dtype
