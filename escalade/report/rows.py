"""Networks over rows of numbers, whose batches reach from a few to a million: tables of times and of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.markdown import table

SYSTEMS = {
    "torch-eager": "PyTorch eager",
    "torch-graph": "PyTorch, CUDA graph",
    "torch-compile": "torch.compile max-autotune",
}
_SHORT = {"torch-eager": "eager", "torch-graph": "graph", "torch-compile": "compile"}
_DTYPES = ("fp16", "bf16", "tf32", "fp32")


def of_rows(records: Sequence[Record]) -> bool:
    return any(record.layout == "flat" for record in records)


def device_times(records: Sequence[Record]) -> str:
    """One replay of each system, and how many times faster Escalade is than each."""
    return _compared(
        records, lambda r: r.median_us, _device_figures, "rows/s", "GB/s", "% of a copy", "error"
    )


def call_times(records: Sequence[Record]) -> str:
    """What a user's call takes by the clock."""
    return _compared(records, lambda r: r.wall_us, lambda r: ())


def _device_figures(record: Record) -> tuple[str, ...]:
    return (
        cells.whole(record.images_per_s),
        cells.whole(record.gbps),
        cells.percent(record.copy_pct),
        cells.error(record.error),
    )


def _compared(
    records: Sequence[Record],
    time: Callable[[Record], float | None],
    figures: Callable[[Record], tuple[str, ...]],
    *headings: str,
) -> str:
    own = [r for r in records if time(r) is not None]
    systems = [name for name in SYSTEMS if any(r.system == name for r in own)]
    found = {(r.dtype, r.batch, r.system): r for r in own}
    keys = sorted(
        dict.fromkeys((r.dtype, r.batch) for r in own if r.system == "escalade"),
        key=lambda key: (_DTYPES.index(key[0]), key[1]),
    )
    rows = []
    for dtype, batch in keys:
        ours = found[dtype, batch, "escalade"]
        peers = [found.get((dtype, batch, name)) for name in systems]
        times = [None if peer is None else time(peer) for peer in peers]
        mine = time(ours) or 0.0
        rows.append(
            (dtype, f"{batch:,}", f"**{cells.figure(mine)}**", *(cells.figure(t) for t in times),
             *(cells.times(None if t is None else t / mine) for t in times), *figures(ours))
        )  # fmt: skip
    over = [f"vs {_SHORT[name]}" for name in systems]
    header = ("dtype", "batch", "Escalade", *(SYSTEMS[name] for name in systems), *over, *headings)
    return table(header, rows, left=2)
