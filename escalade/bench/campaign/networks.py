"""Units of whole networks: every batch and dtype beside the peers, accuracy, phases, streams, scores and training."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from escalade.bench.campaign.units import SECONDS_EACH, Say, Session, Unit
from escalade.bench.networks.workload import Workload
from escalade.bench.networks.workloads import WORKLOADS
from escalade.bench.peers.catalogue import SLOW
from escalade.bench.peers.registry import COMPILE, COMPILE_DEFAULT, EXPORTED
from escalade.measure.records import Record

BATCHES, LADDER = "batches", "op-times"
"""The part of all batches, and the one that consists of a ladder's units."""
COMPARED = {"score": COMPILE, "training": COMPILE, "training-step": COMPILE_DEFAULT}
"""Parts that peers take part in, with the compiler that a ratio needs."""
_NETWORKS = {"resnet18": 3.0, "resnet50": 2.0}
_DTYPES = {"fp16": 1.0, "fp32": 0.6, "tf32": 0.5, "bf16": 0.5}
_COMPILED, _QUICK, _STEP, _PART = 120.0, 5.0, 60.0, 8.0
"""What a batch is worth that is compared with all peers, one that is not, a part that peers take part in, and any
other. Batches with all peers come first: one without takes older ones' place in the README, and has no ratio."""
_QUICK_SECONDS, _PART_SECONDS = 10.0, 18.0
_COMPILE_SECONDS = {"resnet50": 210.0, "resnet34": 150.0, "resnet18": 100.0}
_OTHER_COMPILE_SECONDS = 40.0
_PART_COMPILE_SECONDS = {COMPILE: 40.0, COMPILE_DEFAULT: 25.0}
_LONGER_SECONDS = {"training-ablation": 100.0, "cpu": 25.0}
"""What parts take besides that plan a network many times over, or wait for a CPU."""


def units() -> Iterator[Unit]:
    """Every part of every network, in every dtype."""
    for workload in WORKLOADS.values():
        for dtype in workload.dtypes:
            for batch in workload.batches:
                yield _batch(workload, dtype, batch)
            for name, part in workload.parts.items():
                if name not in (BATCHES, LADDER) and dtype in (part.dtypes or workload.dtypes):
                    for alone in part.batches or (None,):
                        yield _part(workload, name, dtype, alone)


def _peers(workload: Workload, *slow: str) -> tuple[str, ...]:
    """The quick peers, and those of the slow ones."""
    return tuple(name for name in workload.peers if name in slow or name not in SLOW)


def _worth(workload: Workload, dtype: str) -> float:
    return _NETWORKS.get(workload.name, 1.0) * _DTYPES[dtype]


def _command(workload: Workload, part: str, dtype: str, peers: Sequence[str], *more: str) -> str:
    how = ("--peers", ",".join(peers), "--seconds", str(SECONDS_EACH))
    return shlex.join(("escalade", "bench", workload.name, "--parts", part, "-t", dtype, *more, *how))


def _batch(workload: Workload, dtype: str, batch: int) -> Unit:
    slow = COMPILE in workload.peers and batch in (workload.slow_batches or workload.batches)
    peers = _peers(workload, COMPILE, *EXPORTED) if slow else _peers(workload)
    compiling = _COMPILE_SECONDS.get(workload.name, _OTHER_COMPILE_SECONDS) if slow else 0.0
    return Unit(
        f"network/{workload.name}/{BATCHES}/b{batch}/{dtype}",
        f"{workload.name} beside {'all its peers' if slow else 'its quick peers'}",
        _command(workload, BATCHES, dtype, peers, "-b", str(batch)),
        _QUICK_SECONDS + compiling,
        _worth(workload, dtype) * (_COMPILED if slow else _QUICK),
        partial(_measure, workload, BATCHES, dtype, (batch,), peers),
        peers,
        chooses=True,
        by_clock=True,
    )


def _part(workload: Workload, part: str, dtype: str, batch: int | None) -> Unit:
    """A part in one batch, or in all that it has where they belong together."""
    compiler = COMPARED.get(part, "")
    peers = _peers(workload, compiler)
    compiling = _PART_COMPILE_SECONDS.get(compiler, 0.0)
    return Unit(
        f"network/{workload.name}/{part}/{f'b{batch}/' if batch else ''}{dtype}",
        f"{part} of {workload.name}",
        _command(workload, part, dtype, peers, *(("-b", str(batch)) if batch else ())),
        _PART_SECONDS + compiling + _LONGER_SECONDS.get(part, 0.0),
        _worth(workload, dtype) * (_STEP if compiler else _PART),
        partial(_measure, workload, part, dtype, (batch,) if batch else workload.batches, peers),
        peers,
        chooses=True,
        by_clock=True,
    )


def _measure(
    workload: Workload,
    part: str,
    dtype: str,
    batches: tuple[int, ...],
    peers: Sequence[str],
    session: Session,
    say: Say,
) -> Iterator[list[Record]]:
    setting = session.setting(workload.name)
    beside = {name: setting.peers[name] for name in peers}
    asked = replace(setting, batches=batches, dtypes=(dtype,), peers=beside, slow_batches=())
    yield from workload.parts[part].measure(asked, say)
