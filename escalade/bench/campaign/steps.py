"""The unit of the plan that the docs show step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from escalade import models
from escalade.bench.campaign.units import Say, Session, Unit
from escalade.bench.ladder import free
from escalade.bench.networks.steps import step_records, timed_plan
from escalade.engine import compile
from escalade.measure.records import Record

NETWORK, BATCH, DTYPE = "resnet18", 1, "fp16"
"""The plan that the docs show."""
COMMAND = f"escalade explain {NETWORK} --batch {BATCH} --dtype {DTYPE} --time"
_SECONDS, _VALUE = 12.0, 20.0


def units() -> Iterator[Unit]:
    """The one unit."""
    yield Unit(
        f"steps/{NETWORK}/b{BATCH}/{DTYPE}",
        f"each step of the plan of {NETWORK} by itself",
        COMMAND,
        _SECONDS,
        _VALUE,
        _measure,
        chooses=True,
    )


def _measure(session: Session, say: Say) -> Iterator[list[Record]]:
    say(f"{NETWORK}: making its plan")
    model, _ = models.model(NETWORK)
    x = models.example(NETWORK, BATCH).to(session.device)
    engine = compile(model, x, dtype=DTYPE, device=session.device)
    assert session.ceilings is not None, "plans are timed on a GPU"
    yield step_records(replace(timed_plan(engine, (x,), session.ceilings), title=NETWORK))
    del engine
    free(session.device)
