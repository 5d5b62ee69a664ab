"""Records of many networks as rows: each network in one dtype and batch, ours beside its peers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from escalade.bench.coverage.fallbacks import spelled
from escalade.bench.peers.comparison import COVERAGE, Against, Clock, against_best, by_clock, on_device
from escalade.measure.records import Record
from escalade.report import cells

_COMPILED = ("torch-compile", "torch-compile-default")
_GRAPH = "torch-graph"


@dataclass(frozen=True)
class Row:
    """A network in one dtype and batch."""

    records: tuple[Record, ...]

    @property
    def ours(self) -> Record:
        return next(record for record in self.records if not record.is_peer)

    @property
    def network(self) -> str:
        name, _, _ = self.ours.problem.removesuffix(f"_b{self.ours.batch}").rpartition("_")
        return name

    @property
    def is_right(self) -> bool:
        return not self.ours.failure and self.ours.error is not None

    @property
    def fallbacks(self) -> str | None:
        """The steps that PyTorch does, by operator; None if there is no plan."""
        counts = self.ours.config.get("pytorch")
        return None if counts is None else spelled(counts)

    @property
    def fallback_count(self) -> str:
        """How many they are, and which."""
        if self.fallbacks is None:
            return ""
        return f"{sum(self.ours.config['pytorch'].values())} ({self.fallbacks})" if self.fallbacks else "0"

    @property
    def verdict(self) -> str:
        """Whether it is right, or why not; of a plan that nobody has run, that it is there."""
        if self.ours.failure:
            return f"failed: {self.ours.failure.splitlines()[0]}"
        if self.ours.error is None:
            return "planned"
        return f"{cells.error(self.ours.error)} of {cells.error(self.ours.tolerance)}"

    def graph(self) -> Record | None:
        """PyTorch as one CUDA graph."""
        return next((record for record in self.records if record.system == _GRAPH), None)

    def compiled(self, clock: Clock) -> Record | None:
        """The faster of torch.compile's modes; one that failed if none did not."""
        modes = [record for record in self.records if record.system in _COMPILED]
        return min(modes, key=lambda record: clock(record) or float("inf"), default=None)

    def over_best(self, clock: Clock) -> Against:
        return against_best(self.records, clock)


@dataclass(frozen=True)
class Part:
    """All networks of a module in one dtype and batch."""

    workload: str
    dtype: str
    batch: int
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        return f"{self.workload.removeprefix(COVERAGE)}, {self.dtype}, batch {self.batch}"

    def ratios(self, clock: Clock) -> dict[str, float]:
        """How many times as fast as the best peer those are that are right, by network; without those whose peers were
        not all measured."""
        return {
            row.network: ratio for row in self.rows if row.is_right and (ratio := row.over_best(clock).ratio)
        }

    def summary(self) -> str:
        """How many are compiled, right, free of PyTorch and faster, in a sentence."""
        plans = [row for row in self.rows if row.fallbacks is not None]
        right = [row for row in self.rows if row.is_right]
        said = [f"{len(plans)} of {len(self.rows)} networks have a plan"]
        if any(row.ours.error is not None for row in self.rows):
            said.append(f"{len(right)} are right")
        said.append(f"{sum(not row.fallbacks for row in plans)} leave nothing to PyTorch")
        for clock, what in ((on_device, "on the device"), (by_clock, "by the clock")):
            ratios = self.ratios(clock)
            if ratios:
                slowest = min(ratios, key=lambda name: ratios[name])
                said.append(
                    f"{what} {sum(ratio >= 1 for ratio in ratios.values())} of {len(ratios)} are no slower than "
                    f"the best peer, {statistics.geometric_mean(ratios.values()):.2f}× as fast in the geometric "
                    f"mean, {ratios[slowest]:.2f}× at worst ({slowest})"
                )
        lacking = sum(bool(row.over_best(on_device).why) for row in right)
        if lacking:
            said.append(f"{lacking} lack a peer and have no ratio")
        return "; ".join(said) + "."


def parts(records: Sequence[Record]) -> list[Part]:
    """The networks in the order in which they were measured, by module, dtype and batch."""
    found: dict[tuple[str, str, int], dict[str, list[Record]]] = {}
    for record in records:
        if record.workload.startswith(COVERAGE):
            key = record.workload, record.dtype, record.batch
            found.setdefault(key, {}).setdefault(record.problem, []).append(record)
    return [
        Part(*key, tuple(Row(tuple(own)) for own in problems.values() if any(not r.is_peer for r in own)))
        for key, problems in found.items()
    ]
