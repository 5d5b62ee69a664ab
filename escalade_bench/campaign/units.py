"""A unit of measurement: systems that are compared with each other, so measured together in one process."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch

from escalade.ops.base.card import H200, Card
from escalade_bench.measure import ceilings as card
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.trial import Say, Settings

Found = TypeVar("Found")
SECONDS_EACH = 0.05
"""Seconds that each rung and peer is timed."""
TIMED = ("--seconds", str(SECONDS_EACH))
"""The options of timing, which are at the end of a unit's command."""


def command(*words: object) -> str:
    """Return the command that repeats a unit."""
    return shlex.join(map(str, ("escalade", *words)))


@dataclass
class Session:
    """The state that the units of one run share: the card, its ceilings, and what was captured or planned once.

    Without a GPU a session measures nothing; it plans what an H200 would run, for `Unit.made`.
    """

    device: torch.device
    seconds: float = SECONDS_EACH
    """Seconds that each rung and peer is timed."""
    seed: int = 0
    given_ceilings: Ceilings | None = None
    """Ceilings that another process measured."""
    reused: frozenset[str] = frozenset()
    """Peers that the current unit does not measure, because their figures are current."""
    _kept: dict[tuple[Hashable, ...], object] = field(default_factory=dict)

    @property
    def card(self) -> Card:
        """The card that plans are made for: an H200 without a GPU."""
        return Card.of(self.device) if self.device.type == "cuda" else H200

    @cached_property
    def ceilings(self) -> Ceilings | None:
        """Measured for the first unit that asks."""
        if self.device.type != "cuda":
            return None
        return self.given_ceilings or card.measure(self.device)

    def settings(self, say: Say, *dtypes: str, **options: Any) -> Settings:
        """Return the settings of a climb on this device."""
        how: dict[str, Any] = {"seed": self.seed, "seconds_each": self.seconds, **options}
        return Settings(dtypes, device=self.device, ceilings=self.ceilings, say=say, **how)

    def once(self, key: tuple[Hashable, ...], make: Callable[[], Found]) -> Found:
        """Return what `make` gave for this key the first time."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[return-value]

    def clear(self) -> None:
        """Free what one unit cached; networks that several units share stay."""
        self._kept = {key: value for key, value in self._kept.items() if key[:1] == ("setting",)}


@dataclass(frozen=True)
class Unit:
    """One comparison, or a few that share their preparation; measured completely or not at all."""

    name: str
    """A path from the general to the particular: `ladder/conv2d/64to64_56_k3s1_b256/fp16`."""
    what: str
    command: str
    """The command that repeats it."""
    seconds: float
    """Expected duration, until it has been measured once."""
    measure: Callable[[Session, Say], Iterator[list[Record]]]
    made: Callable[[Session, Record], Made | None] | None = None
    """Returns what would run today for one of the unit's records; None if its rung or problem no longer exists. Without
    this function the figures depend on no kernel: host times, or peers alone."""
    declared: tuple[str, ...] = ()
    """Rungs, peers and sizes that the unit measures. A unit whose list has changed since its last run is stale."""
    alone: bool = False
    """True if no other process may run meanwhile: the unit times the host, or searches kernels for minutes."""

    @property
    def kind(self) -> str:
        """The first part of the name: `ladder`, `network`."""
        return self.name.partition("/")[0]
