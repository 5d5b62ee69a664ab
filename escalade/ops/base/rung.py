"""Rung: one way to compute an operation. Config: its compile-time choices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, Self

from typing_extensions import TypeVar

from escalade.device.architecture import ALL_ARCHITECTURES
from escalade.device.recipe import Recipe
from escalade.ops.base.card import TWIN, Card
from escalade.ops.base.problem import P


@dataclass(frozen=True)
class Config:
    """Compile-time choices of a rung. Subclasses add fields: numbers and strings."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values, like `dataclasses.replace`, which is ten times slower.

        Planning a network enumerates tens of thousands of configs.
        """
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__, **values)
        return made

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.as_dict().items())


C = TypeVar("C", bound=Config, default=Any)


@dataclass(frozen=True)
class ThreadsConfig(Config):
    threads: int = 256


@dataclass(frozen=True)
class Rung(ABC, Generic[P, C]):
    """One way to compute an operation: the rung below it plus one idea."""

    name: str
    summary: str
    """The idea of this rung, in one sentence."""
    below: str | tuple[str, ...] | None
    """The rung this one improves on; several if that depends on the layout, None at the foot of a branch."""
    predicted_gain: float | None
    """Expected speedup over the rung below, written down before measuring."""
    card: Card = field(default=TWIN, kw_only=True, repr=False)
    """The card that configs, estimates and grids are for; see `on`."""
    intended_spill: ClassVar[str | None] = None
    """Why the kernels may spill registers; a test fails on any other spill."""

    last_resort: ClassVar[bool] = False
    """True for a rung that exists for coverage, not speed. A plan on a GPU leaves a problem that only such a rung
    supports to PyTorch if PyTorch should be faster."""

    @property
    def scales_across_batch(self) -> bool:
        """True if a scale is the maximum over several batch items, so that results depend on the rest of the batch."""
        return False

    def on(self, card: Card) -> Self:
        """Return this rung for a card."""
        return self if card == self.card else replace(self, card=card)

    def supports(self, problem: P) -> str | None:
        """Return None if this rung can compute the problem, otherwise a sentence that says why not."""
        return None

    @abstractmethod
    def configs(self, problem: P) -> tuple[C, ...]:
        """Return the valid configs of a supported problem, the default first."""

    @abstractmethod
    def recipe(self, problem: P, config: C) -> Recipe:
        """Return the launches, without side effects. Buffers are named as in `Operation.inputs`."""

    def estimate(self, problem: P, config: C) -> float | None:
        """Estimate the microseconds on the rung's card; None without a model.

        Only the ranking matters: it decides between rungs where nothing was measured.
        """
        return None

    def least(self, problem: P) -> float:
        """Return a lower bound in microseconds over all configs, to skip a rung before its configs are built."""
        return 0.0

    @property
    def rungs_below(self) -> tuple[str, ...]:
        """`below` as a tuple."""
        if self.below is None:
            return ()
        return (self.below,) if isinstance(self.below, str) else self.below

    @property
    def architectures(self) -> tuple[str, ...]:
        """GPU architectures that this rung's kernels compile for."""
        return ALL_ARCHITECTURES

    def refusal(self, problem: P) -> str | None:
        """Return why the rung cannot run on its card, like `supports`; the twin runs every architecture."""
        sentence, here = self.supports(problem), self.card.architecture
        if sentence is None and here is not None and here not in self.architectures:
            return f"its kernels are for {', '.join(self.architectures)}; this GPU is {here}"
        return sentence

    def tolerance(self, problem: P, peer_error: float) -> float:
        """Return the largest error that counts as correct: twice PyTorch's, in the same dtype on the same inputs.

        PyTorch may sum blockwise or pairwise, so the error of a sequential fp32 sum is allowed too.
        """
        return 2 * max(peer_error, problem.rounding)


def first_that(fits: Callable[[C], bool], every: Sequence[C], otherwise: C | None = None) -> tuple[C, ...]:
    """Return all configs, the first that fits in front; if none does, `otherwise`, or the last of them."""
    default = next(filter(fits, every), otherwise or every[-1])
    return (default, *(config for config in every if config != default))


class ThreadsRung(Rung[P, ThreadsConfig]):
    """A rung whose only choice is the number of threads per CTA."""

    threads: ClassVar[tuple[int, ...]] = (256,)

    def configs(self, problem: P) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in self.threads)
