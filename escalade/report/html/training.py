"""Steps of training as pictures: beside each peer, and what each technique brings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from escalade.measure.records import Record
from escalade.report import ablation_pages, pair_pages, training_pages
from escalade.report.html.bars import Series, ratio_figure
from escalade.report.html.networks import beside_peers
from escalade.report.html.section import CardRecords, Picture
from escalade.report.html.svg import BLUE, GOLD, RED, inline
from escalade.report.html.verdict import rows


def text(records: Sequence[Record]) -> str:
    """The tables of the docs."""
    parts = {
        "Beside PyTorch": training_pages,
        "What each technique brings": ablation_pages,
        "Pairs of variants": pair_pages,
    }
    return "\n".join(f"### {title}\n\n{part.block(records)}" for title, part in parts.items())


def pictures(records: CardRecords) -> Iterator[Picture]:
    """What each card's records have of it."""
    for gpu, own in records.items():
        yield from beside_peers(f"training-{gpu}", [row for row in rows(own) if row.is_training], own[0].gpu)
        for number, some in enumerate(ablation_pages.measured(own, ablation_pages.SUFFIX)):
            found = ablation_pages.gains(some)
            if found:
                first = some[0]
                network = first.workload.removesuffix(ablation_pages.SUFFIX)
                title = f"What each technique brings: {network}, batch {first.batch}, {first.dtype}, on {first.gpu}"
                series = (
                    Series("alone, over none", [gain.alone for gain in found], GOLD, RED),
                    Series("among all, over all without it", [gain.among_all for gain in found], BLUE, RED),
                )
                names = [gain.technique for gain in found]
                drawn = partial(ratio_figure, names, series, "times as fast with it")
                yield Picture(title, inline(drawn, f"ablation-{gpu}-{number}", title))
