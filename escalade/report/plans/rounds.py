"""Rounds of optimisation of a small network: every rung of its ladder over the batches that a plan names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from escalade import ops
from escalade.measure.records import Record
from escalade.ops.mlp.problem import MlpProblem
from escalade.ops.mlp.problems import AUTOENCODER
from escalade.report import cells
from escalade.report.commits import newest
from escalade.report.markdown import origin, table
from escalade.report.plans.section import Section

OPERATION = "mlp"
BATCHES = (32, 64, 128, 256, 512)
DTYPES = ("fp32", "fp16")
_PEER = "torch-flat"
PROBLEMS = {MlpProblem(batch, AUTOENCODER).name: batch for batch in BATCHES}
_ABOUT = """The plan, for an autoencoder of 320 values a row, is rounds of one kernel: everything fused, reductions by
shuffles, loops unrolled and loads vectorised, shared memory laid out with care. Such a plan can end in a tie with
PyTorch: a block that has one row reads all weights for it, however it reads them. The rungs behind `vectorised` are
about that: weights that stay in shared memory, rows that share them, products on tensor cores. Times
are µs on the device, the gain is over the rung in front at the largest batch."""


def _block(records: Sequence[Record]) -> str:
    own = newest([r for r in records if r.workload == OPERATION and r.problem in PROBLEMS])
    tables = "".join(_table([r for r in own if r.dtype == dtype], dtype) for dtype in DTYPES)
    return origin(own) + tables if tables else ""


def _table(records: Sequence[Record], dtype: str) -> str:
    timed = {(r.rung or r.system, PROBLEMS[r.problem]): r for r in records if r.median_us is not None}
    names = [name for name in (_PEER, *(rung.name for rung in ops.operation(OPERATION).ladder))]
    batches = [batch for batch in BATCHES if any((name, batch) in timed for name in names)]
    rows = []
    for name in names:
        if any((name, batch) in timed for batch in batches):
            last = timed.get((name, batches[-1]))
            times = [cells.figure(timed[name, b].time) if (name, b) in timed else "" for b in batches]
            predicted, gain = (last.predicted_gain, last.gain) if last else (None, None)
            shown = "PyTorch's operators" if name == _PEER else f"`{name}`"
            rows.append((shown, *times, cells.times(predicted), cells.times(gain)))
    if rows and batches:
        rows.append(("**PyTorch over the fastest**", *(_speedup(timed, b) for b in batches), "", ""))
    header = ("round", *(f"batch {batch}" for batch in batches), "predicted", "gain")
    return f"\n**{dtype}**\n\n{table(header, rows)}" if rows else ""


def _speedup(timed: Mapping[tuple[str, int], Record], batch: int) -> str:
    """How many times as fast as PyTorch's operators the fastest rung is."""
    peer = timed.get((_PEER, batch))
    own = [record.time for (name, size), record in timed.items() if size == batch and name != _PEER]
    return f"**{cells.times(peer.time / min(own))}**" if peer and own else ""


SECTION = Section(
    "A small network: rounds of one kernel",
    _ABOUT,
    "escalade measure " + " ".join(f"ladder/{OPERATION}/{name}" for name in PROBLEMS),
    _block,
)
