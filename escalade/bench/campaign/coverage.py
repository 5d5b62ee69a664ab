"""Units of coverage: every network of torchvision, where that is installed."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from functools import partial

from escalade.bench.campaign.units import SECONDS_EACH, Say, Session, Unit
from escalade.bench.coverage.catalogue import TORCHVISION, Entry, entries
from escalade.bench.coverage.run import Coverage
from escalade.bench.peers.comparison import COVERAGE
from escalade.bench.peers.registry import COMPILE_DEFAULT, NETWORKS
from escalade.measure.records import Record

PEERS = ("torch-graph", COMPILE_DEFAULT)
BATCHES, DTYPES = (1, 32), ("fp16",)
_SECONDS, _VALUE = 45.0, 8.0


def units() -> Iterator[Unit]:
    """A unit for each network: making and capturing it takes longer than to time it in two batches."""
    if missing():
        return
    for entry in entries(TORCHVISION):
        asked = (f"{TORCHVISION}:{entry.name}", "-t", ",".join(DTYPES), "-b", ",".join(map(str, BATCHES)))
        how = ("--peers", ",".join(PEERS), "--seconds", str(SECONDS_EACH))
        yield Unit(
            f"coverage/{TORCHVISION}/{entry.name}",
            f"{TORCHVISION}'s {entry.name} beside PyTorch",
            shlex.join(("escalade", "coverage", *asked, *how)),
            _SECONDS,
            _VALUE,
            partial(_measure, entry),
            (*PEERS, *BATCHES, *DTYPES),
            chooses=True,
            by_clock=True,
        )


def _measure(entry: Entry, session: Session, say: Say) -> Iterator[list[Record]]:
    peers = {name: NETWORKS[name] for name in PEERS}
    coverage = Coverage(
        COVERAGE + TORCHVISION, session.device, BATCHES, DTYPES, peers, session.seconds, session.seed,
        ceilings=session.ceilings,
    )  # fmt: skip
    yield from coverage.measure(entry, say)


def missing() -> str:
    """Why there are no such units here; empty if there are."""
    if importlib.util.find_spec(TORCHVISION) is None:
        return f"{TORCHVISION} is not installed: its networks are not among the units"
    return ""
