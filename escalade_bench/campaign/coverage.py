"""Units of coverage: every network of torchvision, where that is installed, networks of other families, and single
layers."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Iterator
from functools import partial

from escalade_bench.campaign.units import SECONDS_EACH, Say, Session, Unit
from escalade_bench.coverage.catalogue import TORCHVISION, Entry, entries
from escalade_bench.coverage.run import Coverage
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import COVERAGE
from escalade_bench.peers.registry import COMPILE_DEFAULT, NETWORKS

PEERS = ("torch-graph", COMPILE_DEFAULT)
LAYERS = "escalade_bench.zoo.layers"
VARIED = "escalade_bench.zoo.varied"
MODULES: dict[str, dict[str, tuple[int, ...]]] = {
    TORCHVISION: {"fp16": (1, 32), "tf32": (1, 32)},
    VARIED: {"fp16": (1, 8)},
    LAYERS: {"fp16": (1, 16, 256), "fp32": (1, 16, 256)},
}
"""The modules of the docs, by dtype, with their batches."""
_SECONDS = {TORCHVISION: 35.0, VARIED: 20.0, LAYERS: 6.0}


def units() -> Iterator[Unit]:
    """A unit for each network and dtype: making and capturing it takes longer than to time it in all batches."""
    for module, wanted in MODULES.items():
        if module == TORCHVISION and missing():
            continue
        for entry in entries(module):
            for dtype, batches in wanted.items():
                yield _unit(module, entry, dtype, batches)


def _unit(module: str, entry: Entry, dtype: str, batches: tuple[int, ...]) -> Unit:
    asked = (f"{module}:{entry.name}", "-t", dtype, "-b", ",".join(map(str, batches)))
    how = ("--peers", ",".join(PEERS), "--seconds", str(SECONDS_EACH))
    return Unit(
        f"coverage/{module}/{entry.name}/{dtype}",
        f"{entry.name} of {module} beside PyTorch",
        shlex.join(("escalade", "coverage", *asked, *how)),
        _SECONDS[module],
        partial(_measure, module, entry, dtype, batches),
        partial(_made, module, entry, dtype),
        (*PEERS, *map(str, batches)),
    )


def _coverage(module: str, dtype: str, batches: tuple[int, ...], session: Session) -> Coverage:
    peers = {name: NETWORKS[name] for name in PEERS if name not in session.reused}
    return Coverage(
        COVERAGE + module, session.device, batches, (dtype,), peers, session.seconds, session.seed,
        ceilings=session.ceilings, timed=session.device.type == "cuda",
    )  # fmt: skip


def _measure(
    module: str, entry: Entry, dtype: str, batches: tuple[int, ...], session: Session, say: Say
) -> Iterator[list[Record]]:
    yield from _coverage(module, dtype, batches, session).measure(entry, say)


def _made(module: str, entry: Entry, dtype: str, session: Session, record: Record) -> Made:
    coverage = _coverage(module, dtype, (record.batch,), session)
    engine = session.once(
        ("engine", module, entry.name, dtype), lambda: coverage.setting(entry, dtype).engine(dtype)
    )
    return Made.of_plan(engine.plan(coverage.input(entry, record.batch, dtype)))


def missing() -> str:
    """Why there are no such units here; empty if there are."""
    if importlib.util.find_spec(TORCHVISION) is None:
        return f"{TORCHVISION} is not installed: its networks are not among the units"
    return ""
