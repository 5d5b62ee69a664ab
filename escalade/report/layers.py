"""Single layers beside their fastest peers, as a table on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.bench.layers.summaries import Row
from escalade.fitted import Table
from escalade.report import cells


def shown(row: Row) -> dict[str, str]:
    """What a table says of a layer, by heading."""
    ours, peer = row.ours, row.peer
    return {
        "layer": row.layer.problem.name + (" (stem)" if row.layer.operation == "stem" else ""),
        "×": str(row.layer.count),
        "rung": ours.rung if ours else "",
        "µs": cells.figure(ours.median_us if ours else None),
        "TFLOP/s": cells.whole(ours.tflops if ours else None),
        "% of floor": cells.percent(100 * ours.floor_us / ours.time if ours and ours.floor_us else None),
        "peer": peer.system if peer else "",
        "peer's µs": cells.figure(peer.median_us if peer else None),
        "ratio": cells.times(row.ratio) or row.why,
    }


TEXTS = ("layer", "rung", "peer")
"""The headings above text; above the others are figures."""


def table(title: str, found: Sequence[Row]) -> Table:
    made = Table(title=title, title_justify="left")
    for position, row in enumerate(map(shown, found)):
        if not position:
            for heading in row:
                made.add_column(heading, justify="left" if heading in TEXTS else "right", no_wrap=True)
        made.add_row(*row.values())
    return made
