"""A unit of work: what is compared with each other and so measured together, with all that a campaign knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from escalade.bench.networks.workload import Setting
from escalade.bench.networks.workloads import workload
from escalade.device.program import Program
from escalade.engine.capture.export import capture
from escalade.measure import ceilings as card
from escalade.measure.ceilings import Ceilings
from escalade.measure.records import Record

Say = Callable[[str], None]
PROTOCOL = 1
"""The way of measuring; another number makes every figure that was measured before it stale."""
SECONDS_EACH = 0.05
"""How long each rung and peer is measured."""


@dataclass
class Session:
    """What the units of one run share: the card, its ceilings, and networks that were captured once."""

    device: torch.device
    seconds: float = SECONDS_EACH
    seed: int = 0
    _settings: dict[str, Setting] = field(default_factory=dict)

    @cached_property
    def ceilings(self) -> Ceilings | None:
        """What the card can do, measured when the first unit asks."""
        return card.measure(self.device) if self.device.type == "cuda" else None

    def setting(self, name: str) -> Setting:
        """A network made and captured, with all its peers; its batches and dtypes are the unit's to choose."""
        if name not in self._settings:
            chosen = workload(name)
            model = chosen.model(chosen.size, self.seed)
            graph = capture(model, (chosen.inputs(2, chosen.size, self.seed),))
            self._settings[name] = Setting(
                chosen, model, graph, self.device, chosen.size, chosen.batches, chosen.dtypes, chosen.peers,
                chosen.slow_batches, self.seconds, self.seed, self.ceilings,
            )  # fmt: skip
        return self._settings[name]


@dataclass(frozen=True)
class Unit:
    """A comparison, or the few that are made at once, measured to its end or not at all."""

    name: str
    """A path from the general to the particular: `ladder/conv2d/64to64_56_k3s1_b256/fp16`."""
    what: str
    """What it measures, in a few words."""
    command: str
    """The command that repeats it."""
    seconds: float
    """How long it should take, until it has been measured once."""
    value: float
    """What its figures are worth beside other units'; what a second buys decides which comes first."""
    measure: Callable[[Session, Say], Iterator[list[Record]]]
    declared: tuple[object, ...] = ()
    """What decides its figures besides the kernels: the rungs that there are, the peers, the sizes."""
    chooses: bool = False
    """Whether its kernels are chosen by the table of the card."""
    by_clock: bool = False
    """Whether the wall clock is among its figures: then nothing else may run beside it."""
    programs: Callable[[torch.device], Sequence[Program]] = lambda device: ()
    """What it compiles, where that is known without making it."""

    @property
    def kind(self) -> str:
        """What its name begins with: `ladder`, `network`."""
        return self.name.partition("/")[0]
