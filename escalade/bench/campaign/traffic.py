"""Units of measured traffic: the climb of a convolution, with the bytes that Nsight Compute counted."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial

from escalade.bench.campaign.ladders import FEATURED
from escalade.bench.campaign.units import Say, Session, Unit
from escalade.bench.ladder import free
from escalade.measure.records import Record
from escalade.profile.climb import Climb, measure

OPERATION, PROBLEM = "conv2d", FEATURED[0]
RUNGS = {
    "fp32": (
        "direct", "input_tile", "weight_tile", "padded_tile", "vector_loads", "register_blocking", "nhwc", "unrolled",
        "tuned", "winograd_f4_fused",
    ),
    "fp16": ("fused_epilogue", "tma_wgmma", "overlapped_store", "window"),
}  # fmt: skip
"""The rungs from the naive one up: on CUDA cores to fewer multiplications, and on tensor cores."""
_SECONDS, _VALUE = 45.0, 10.0


def units() -> Iterator[Unit]:
    """A unit for each dtype."""
    for dtype, rungs in RUNGS.items():
        climb = Climb(OPERATION, PROBLEM, dtype, list(rungs))
        asked = ("-p", PROBLEM, "-t", dtype, "-r", ",".join(rungs))
        yield Unit(
            f"traffic/{OPERATION}/{PROBLEM}/{dtype}",
            f"bytes that rungs of {OPERATION} move, counted",
            shlex.join(("escalade", "profile", OPERATION, *asked)),
            _SECONDS,
            _VALUE,
            partial(_measure, climb),
            rungs,
        )


def _measure(climb: Climb, session: Session, say: Say) -> Iterator[list[Record]]:
    say(f"{climb.operation} {climb.problem} {climb.dtype}: counting by Nsight Compute")
    assert session.ceilings is not None, "counters are a GPU's"
    _, records = measure(climb, session.device, session.ceilings)
    yield records
    free(session.device)
