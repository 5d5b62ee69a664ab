"""Units of calls: what each costs the CPU, beside PyTorch's."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial

from escalade_bench.calls.catalogue import CALLS, Call
from escalade_bench.calls.measurement import COPIES, SYSTEMS, measure
from escalade_bench.campaign.units import SECONDS_EACH, Say, Session, Unit
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import UNTIMED

_SECONDS = 3.0


def units() -> Iterator[Unit]:
    """A unit for each call and dtype, in all its layouts."""
    for call in CALLS.values():
        for dtype, layouts in call.layouts.items():
            asked = (call.name, "-t", dtype, "--seconds", str(SECONDS_EACH))
            yield Unit(
                f"calls/{call.name}/{dtype}",
                f"the host's time for {call.name} beside PyTorch's",
                shlex.join(("escalade", "calls", *asked)),
                _SECONDS,
                partial(_measure, call, dtype),
                None,
                (*SYSTEMS, str(COPIES), *layouts),
            )


def _measure(call: Call, dtype: str, session: Session, say: Say) -> Iterator[list[Record]]:
    if session.seconds == UNTIMED:
        return
    say(f"{call.name} {dtype}: verifying and timing")
    yield from measure(call, dtype, session.device, session.seconds, session.seed)
