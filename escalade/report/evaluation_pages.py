"""Right answers of networks with real weights on labelled images, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from escalade.bench.networks.evaluation import FEW, SUFFIX
from escalade.fitted import Table
from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.markdown import table
from escalade.showing import shown

_NAMES = {"torch": "PyTorch", "escalade": "Escalade"}
_HEADER = (
    "system", "dtype", "images", "top-1", f"top-{FEW}", "agreement", "difference", "error", "allowed"
)  # fmt: skip
LEGEND = (
    "*Agreement* is with the top-1 of PyTorch's fp32, *difference* the largest of a logit from PyTorch's, *error* that "
    "of all logits, relative to them.\n"
)
_TEXTS = 2


def _row(record: Record) -> tuple[str, ...]:
    said, ours = record.config, not record.is_peer
    return (
        _NAMES[record.system], record.dtype, f"{record.batch:,}", f"{100 * (record.accuracy or 0.0):.2f}%",
        f"{100 * said['top5']:.2f}%", f"{100 * said['agreement']:.2f}%" if ours else "",
        f"{said['difference']:.2g}" if ours else "", cells.error(record.error), cells.error(record.tolerance),
    )  # fmt: skip


def markdown_table(records: Sequence[Record]) -> str:
    return table(_HEADER, map(_row, records), left=_TEXTS)


def terminal_table(records: Sequence[Record], data: str, device: str) -> Table:
    network = records[0].workload.removesuffix(SUFFIX)
    title = f"{network} with {shown(records[0].config['weights'])} on {shown(data)}, on {device}"
    made = Table(title=escape(title), title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(_HEADER):
        made.add_column(name, justify="left" if number < _TEXTS else "right")
    for record in records:
        made.add_row(*map(escape, _row(record)))
    return made
