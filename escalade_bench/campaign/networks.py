"""Units of whole networks: every batch and dtype beside the peers, and the other parts of each workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from escalade import models
from escalade.engine import compile
from escalade.engine.engine import Engine
from escalade_bench.campaign.units import TIMED, Say, Session, Unit, command
from escalade_bench.ladder import free
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks import plans
from escalade_bench.networks.plans import step_records, timed_plan
from escalade_bench.networks.workload import Setting, Workload
from escalade_bench.networks.workloads import TRAINED, WORKLOADS, workload
from escalade_bench.peers.registry import COMPILE, COMPILE_DEFAULT, SLOW
from escalade_bench.peers.torch_network import compiler_threads

BATCHES, LADDER, TRAINING = "batches", "op-times", "training-step"
"""Parts of a workload: all batches, the ladder's own units, and whole steps of training."""
STEPS = ("resnet18", 1, "fp16")
"""The plan that the docs show step by step: network, batch, dtype."""
_BY_CLOCK = ("phases", "stream", "cpu")
"""Parts that time the host as well."""
_ACCURACY_BATCH = 64
_SECONDS, _STEP_SECONDS, _AUTOTUNE_SECONDS = 8.0, 12.0, {"resnet50": 230.0}
_OTHER_AUTOTUNE_SECONDS = 110.0
_AUTOTUNE_THREADS = 4
_TRAINED_SECONDS = 40.0
"""Seconds of a training step of a network of torchvision."""
_LONGER_SECONDS = {"training-ablation": 100.0, "cpu": 25.0, "phases": 20.0}


def units() -> Iterator[Unit]:
    """Yield every part of every network in every dtype, and training steps of torchvision's networks."""
    for one in WORKLOADS.values():
        for dtype in (*one.dtypes, *one.further_dtypes):
            for batch in one.batches:
                yield _unit(one.name, one, BATCHES, dtype, batch)
        for dtype in one.dtypes:
            for name, part in one.parts.items():
                if name not in (BATCHES, LADDER) and dtype in (part.dtypes or one.dtypes):
                    for alone in part.batches or (None,):
                        yield _unit(one.name, one, name, dtype, alone)
            if COMPILE in one.peers:
                for batch in one.slow_batches or one.batches:
                    yield _autotuned(one, dtype, batch)
    for name in TRAINED:
        for dtype in ("fp16", "tf32"):
            yield _unit(name, None, TRAINING, dtype, 64)
    yield _steps()


def _command(name: str, part: str, dtype: str, batch: int | None, peers: Sequence[str]) -> str:
    size = ("-b", batch) if batch else ()
    how = ("--peers", ",".join(peers) or "none", *TIMED)
    return command("bench", name, "--parts", part, "-t", dtype, *size, *how)


def _unit(name: str, known: Workload | None, part: str, dtype: str, batch: int | None) -> Unit:
    """Return a part for one batch, or for all of its batches if they are measured together."""
    known_peers = known.peers if known else ("torch-eager", "torch-graph", COMPILE_DEFAULT)
    peers = tuple(peer for peer in known_peers if peer == COMPILE_DEFAULT or peer not in SLOW)
    if known and dtype in known.further_dtypes:
        peers = ()  # no peer has networks in them

    def made(session: Session, record: Record) -> Made:
        def found() -> Made:
            setting = setting_of(session, name)
            how = setting.workload.parts[part].made or plans.of_batches
            batches = (batch,) if batch else (_ACCURACY_BATCH,) if part == "accuracy" else setting.batches
            return how(setting, batches, dtype)

        return session.once(("made", name, part, dtype, batch), found)

    return Unit(
        f"network/{name}/{part}/{f'b{batch}/' if batch else ''}{dtype}",
        f"{part} of {name} beside PyTorch",
        _command(name, part, dtype, batch, peers),
        _SECONDS + _LONGER_SECONDS.get(part, 0.0) if known else _TRAINED_SECONDS,
        partial(_measure, name, part, dtype, batch, peers),
        made,
        peers,
        alone=part in _BY_CLOCK,
    )


def setting_of(session: Session, name: str) -> Setting:
    """Return a network, captured, with all its peers; a unit replaces batches, dtypes and peers by its own."""
    return session.once(("setting", name), lambda: Setting.of(workload(name), session))


def _measure(
    name: str, part: str, dtype: str, batch: int | None, peers: Sequence[str], session: Session, say: Say
) -> Iterator[list[Record]]:
    setting = setting_of(session, name)
    beside = {peer: setting.peers[peer] for peer in peers if peer not in session.reused}
    batches = (batch,) if batch else setting.batches
    asked = replace(setting, batches=batches, dtypes=(dtype,), peers=beside, slow_batches=())
    yield from setting.workload.parts[part].measure(asked, say)


def _autotuned(known: Workload, dtype: str, batch: int) -> Unit:
    """Return a unit of torch.compile's search, which benchmarks on the card for minutes: its figure is a peer's, and
    stays current until PyTorch is another."""
    seconds = _AUTOTUNE_SECONDS.get(known.name, _OTHER_AUTOTUNE_SECONDS)

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        with compiler_threads(_AUTOTUNE_THREADS):
            for found in _measure(known.name, BATCHES, dtype, batch, (COMPILE,), session, say):
                yield [record for record in found if record.is_peer]

    return Unit(
        f"autotune/{known.name}/b{batch}/{dtype}",
        f"torch.compile max-autotune of {known.name}",
        _command(known.name, BATCHES, dtype, batch, (COMPILE,)),
        seconds,
        measure,
        None,
        (COMPILE,),
    )


def _steps() -> Unit:
    name, batch, dtype = STEPS

    def compiled(session: Session) -> tuple[Engine, torch.Tensor]:
        model, _ = models.model(name)
        x = models.example(name, batch).to(session.device)
        return compile(model, x, dtype=dtype, device=session.device), x

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        say(f"{name}: making its plan")
        engine, x = compiled(session)
        assert session.ceilings is not None
        yield step_records(replace(timed_plan(engine, (x,), session.ceilings), title=name))
        free(session.device)

    def made(session: Session, record: Record) -> Made:
        def plan() -> Made:
            engine, x = compiled(session)
            return Made.of_plan(engine.plan(x))

        return session.once(("made", "steps"), plan)

    return Unit(
        f"steps/{name}/b{batch}/{dtype}",
        f"each step of the plan of {name} by itself",
        command("explain", name, "--batch", batch, "--dtype", dtype, "--time"),
        _STEP_SECONDS,
        measure,
        made,
    )
