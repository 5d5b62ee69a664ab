"""Rows of tables that have a CPU beside a GPU: by batch, and by kind of layer."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.bench.networks.cpu import CPU, DTYPES
from escalade.bench.networks.layer_kinds import KINDS, OTHERS, TOTAL
from escalade.measure.records import Record
from escalade.report import cells

BATCHES = (
    "dtype", "batch", "CPU, ms", "GPU, ms", "speedup", "GPU, host to host, ms", "speedup, host to host", "images/s",
    "MiB on the GPU",
)  # fmt: skip
LAYERS = ("dtype", "layer", "CPU, ms", "GPU, ms", "speedup")
TEXTS = 2
Row = tuple[str, ...]


def batch_rows(records: Sequence[Record]) -> list[Row]:
    """A row for each dtype and batch: the CPU's call, a replay on the GPU, and a call from host memory to it."""
    cpu = {(r.dtype, r.batch): r for r in records if r.system == CPU}
    ours = sorted((r for r in records if not r.is_peer), key=lambda r: (DTYPES.index(r.dtype), r.batch))
    return [_batch(r, cpu.get((r.dtype, r.batch))) for r in ours]


def _batch(ours: Record, cpu: Record | None) -> Row:
    there = cpu.wall_us if cpu else None
    return (
        ours.dtype, f"{ours.batch:,}", _ms(there), _ms(ours.median_us) or cells.reason(ours),
        _over(there, ours.median_us), _ms(ours.wall_us), _over(there, ours.wall_us), cells.whole(ours.images_per_s),
        "" if ours.peak_bytes is None else f"{ours.peak_bytes / 2**20:,.1f}",
    )  # fmt: skip


def layer_rows(records: Sequence[Record]) -> list[Row]:
    """A row for each dtype and kind of layer; the last is the network as a whole."""
    cpu = {(r.dtype, r.rung): r.wall_us for r in records if r.system == CPU}
    gpu = {(r.dtype, r.rung): r.median_us for r in records if not r.is_peer}
    order = (*KINDS, OTHERS, TOTAL)
    keys = sorted(gpu.keys() | cpu.keys(), key=lambda key: (DTYPES.index(key[0]), order.index(key[1])))
    return [
        (dtype, kind, _ms(cpu.get((dtype, kind))), _ms(gpu.get((dtype, kind))),
         _over(cpu.get((dtype, kind)), gpu.get((dtype, kind))))
        for dtype, kind in keys
    ]  # fmt: skip


def _ms(microseconds: float | None) -> str:
    """Four digits or so."""
    if microseconds is None:
        return ""
    milliseconds = microseconds / 1000
    return f"{milliseconds:.4f}" if milliseconds < 1 else cells.figure(milliseconds)


def _over(slow: float | None, fast: float | None) -> str:
    if not slow or not fast:
        return ""
    return f"{slow / fast:,.0f}×" if slow >= 100 * fast else f"{slow / fast:.1f}×"
