"""The peers, and whether each was measured or why not, for docs/measuring.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from escalade.bench.peers.catalogue import PEERS, Peer
from escalade.measure.records import Record
from escalade.report.markdown import table

PART = "peers"
"""The part of the page, by the markers around it."""


def block(records: Sequence[Record]) -> str:
    """A row for each peer."""
    header = ("peer", "in records", "at its best", "takes part in", "needs", "measured")
    return table(header, [_row(peer, records) for peer in PEERS], left=len(header))


def _row(peer: Peer, records: Sequence[Record]) -> tuple[str, ...]:
    needs = ", ".join(f"`{package.name}`" for package in peer.needs) or "PyTorch"
    systems = ", ".join(f"`{system}`" for system in peer.systems)
    return peer.title, systems, peer.what, peer.takes_part, needs, _measured(peer, records)


def _measured(peer: Peer, records: Sequence[Record]) -> str:
    """How many times it was, and the reason that most of its other records have."""
    own = [record for record in records if record.system in peer.systems]
    timed = sum(record.median_us is not None for record in own)
    refusals = Counter(record.failure.splitlines()[0] for record in own if record.failure)
    said = [_times(timed)] if timed else []
    if refusals:
        ((why, count),) = refusals.most_common(1)
        said.append(f"refused {_times(sum(refusals.values()))}, {count:,} of them: {why}")
    return "; ".join(said) or "not yet"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"
