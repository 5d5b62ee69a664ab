"""A step of an optimiser as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import ClassVar

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.naming import Codec, Named, NamePattern, joined
from escalade.ops.expressions import Expression
from escalade.ops.optimizer_step.rules import GRADIENT, PARAMETER, STEP, scalar_names

LAYOUTS = ("flat",)
COPIES = ("", "fp16", "bf16")
"""The types that parameters may be written in once more; empty: they are not."""
MOST_STATE = 6


def _read_sizes(text: str) -> tuple[int, ...]:
    sizes: list[int] = []
    for part in text.split("+"):
        count, _, size = part.rpartition("x")
        sizes += [int(size)] * int(count or 1)
    return tuple(sizes)


def _spell_sizes(sizes: tuple[int, ...]) -> str:
    runs = ((size, len(list(same))) for size, same in groupby(sizes))
    return "+".join(f"{count}x{size}" if count > 1 else str(size) for size, count in runs)


@dataclass(frozen=True)
class OptimizerStepProblem(Named):
    """p, state = expression(p, g, state, scalars, step) for each element of tensors of these sizes.

    p and the state are fp32, the gradients of `dtype`. With a `copy` p is written in that type too. A `checked` step
    counts as skipped, and writes nothing else, if any gradient is not finite.
    """

    NAME: ClassVar = NamePattern(
        "optimizer_step",
        r"{sizes}\[{expression:text}\][({state})][_copy{copy:fp16|bf16}]{checked?_checked}",
        sizes=Codec(r"(?:\d+x)?\d+(?:\+(?:\d+x)?\d+)*", _read_sizes, _spell_sizes),
        state=joined(",", r"\w+", str),
    )

    sizes: tuple[int, ...]
    expression: str
    state: tuple[str, ...] = ()
    copy: str = ""
    checked: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Parameters belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        program = Expression.parse(self.expression)
        object.__setattr__(self, "expression", program.text)
        require("optimizer_step", "dtype", self.dtype, DTYPES)
        require("optimizer_step", "layout", self.layout, LAYOUTS)
        require("optimizer_step", "a copy in", self.copy, COPIES)
        if self.batch != 1:
            raise UnsupportedError(
                f"a batch of {self.batch}: optimizer_step takes parameters, whatever their images"
            )
        if not self.sizes or not all(0 < size < 2**31 for size in self.sizes):
            raise UnsupportedError(
                f"tensors of {', '.join(map(str, self.sizes)) or 'no'} elements: optimizer_step takes one or more, "
                "each of 1 to 2^31 - 1"
            )
        if len(self.state) > MOST_STATE or {PARAMETER, GRADIENT, STEP} & set(self.state):
            raise UnsupportedError(
                f"state named {', '.join(self.state)}: there are up to {MOST_STATE}, and {PARAMETER}, {GRADIENT} and "
                f"{STEP} are the parameter, the gradient and the number of the step"
            )
        if len(program.results) != 1 + len(self.state):
            raise UnsupportedError(
                f"{program.text} has {len(program.results)} results: they are the new parameter and the new state, "
                f"{', '.join(self.state) or 'of which there is none'}"
            )

    @property
    def program(self) -> Expression:
        return Expression.parse(self.expression)

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the scalars, as they lie in their tensor."""
        return scalar_names(self.expression, self.state)

    @property
    def elements(self) -> int:
        return sum(self.sizes)

    @property
    def flops(self) -> int:
        return self.elements * len(self.program.calls)

    @property
    def bytes(self) -> int:
        kept = 2 * (1 + len(self.state)) * ELEMENT_BYTES["fp32"]
        copy = ELEMENT_BYTES[self.copy] if self.copy else 0
        return self.elements * (kept + ELEMENT_BYTES[self.dtype] + copy)

    @property
    def rounding(self) -> float:
        """Each function rounds once."""
        return 2.0**-24 * max(1, len(self.program.calls))

    # --- buffers

    def read(self, tensor: int) -> tuple[str, ...]:
        """The buffers that are read of a tensor: the parameter, the gradient and the state."""
        return _read(tensor, self.state)

    def written(self, tensor: int) -> tuple[str, ...]:
        """The buffers that are written of a tensor: the parameter, the state, and the copy if there is one."""
        return _written(tensor, self.state, bool(self.copy))


@cache
def _read(tensor: int, state: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}-{tensor}" for name in (PARAMETER, GRADIENT, *state))


@cache
def _written(tensor: int, state: tuple[str, ...], copied: bool) -> tuple[str, ...]:
    first = "y" if tensor == 0 else f"y-{tensor}"
    return (first, *(f"new_{name}-{tensor}" for name in state), *((f"copy-{tensor}",) if copied else ()))
