"""A rung, one way to do an operation, and its config: the compile-time choices of that way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self

from typing_extensions import TypeVar

from escalade.device.architecture import ALL_ARCHITECTURES
from escalade.device.recipe import Recipe
from escalade.ops.base.card import TWIN, Card
from escalade.ops.base.problem import P


@dataclass(frozen=True)
class Config:
    """Compile-time choices of a rung; subclasses add their fields, numbers and words."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_dict().items())


C = TypeVar("C", bound=Config, default=Any)


@dataclass(frozen=True)
class ThreadsConfig(Config):
    threads: int = 256
    """Threads a block."""


@dataclass(frozen=True)
class Rung(ABC, Generic[P, C]):
    """One way to do an operation: the one below it on the ladder, and one idea."""

    name: str
    summary: str
    """What this rung changes, in one sentence."""
    below: str | tuple[str, ...] | None
    """The rung that this one adds its idea to; several if it depends on the layout, None at the foot of a branch."""
    predicted_gain: float | None
    """How many times faster than the rung below it should be, written down before it was measured."""
    card: Card = field(default=TWIN, kw_only=True, repr=False)
    """The card that configs, estimates and grids are made for: see `on`."""
    intended_spill: ClassVar[str | None] = None
    """Why a rung's kernels may spill registers; without a reason a spill is a failed test."""

    last_resort: ClassVar[bool] = False
    """Whether it is there so that everything can be done, however long it takes: a plan on a GPU leaves to PyTorch what
    only such a rung takes, if PyTorch should be faster."""

    @property
    def scales_together(self) -> bool:
        """Whether numbers are scaled by the largest of several items of a batch, whose last bits, or more of them where
        another's numbers are far larger, then depend on what else is in the batch."""
        return False

    def on(self, card: Card) -> Self:
        """This rung on a card: all its methods answer for that one."""
        return self if card == self.card else replace(self, card=card)

    @abstractmethod
    def supports(self, problem: P) -> str | None:
        """None if this rung can do the problem; otherwise a sentence that says why not."""

    @abstractmethod
    def configs(self, problem: P) -> tuple[C, ...]:
        """Valid configs for a supported problem; the first is the default."""

    @abstractmethod
    def recipe(self, problem: P, config: C) -> Recipe:
        """The launches. A pure function; buffers are named as in `Operation.inputs`."""

    def estimate(self, problem: P, config: C) -> float | None:
        """The microseconds, about, that it takes on the rung's card; None from a rung that has no model of itself.

        Rungs are chosen by it where nothing was measured: only comparisons matter.
        """
        return None

    def least(self, problem: P) -> float:
        """Microseconds that no config can beat: what rules a rung out before its configs are made."""
        return 0.0

    @property
    def stands_on(self) -> tuple[str, ...]:
        """The rung `below`, whatever its form."""
        if self.below is None:
            return ()
        return (self.below,) if isinstance(self.below, str) else self.below

    @property
    def architectures(self) -> tuple[str, ...]:
        """The GPU architectures that this rung's kernels compile for."""
        return ALL_ARCHITECTURES

    def refusal(self, problem: P) -> str | None:
        """What is beyond the rung on its card, like `supports`; the twin runs the kernels of every architecture."""
        sentence, here = self.supports(problem), self.card.architecture
        if sentence is None and here is not None and here not in self.architectures:
            return f"its kernels are for {', '.join(self.architectures)}; this GPU is {here}"
        return sentence

    def tolerance(self, problem: P, peer_error: float) -> float:
        """The largest error that counts as correct: twice PyTorch's own, in the same dtype and on the same inputs.

        PyTorch may sum in blocks or in pairs; a plain fp32 sum of the problem's length is allowed too.
        """
        return 2 * max(peer_error, problem.rounding)
