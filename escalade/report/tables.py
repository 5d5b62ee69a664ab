"""The tables of README.md and docs, generated from the records in results/: no figure is typed by hand."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence

from escalade import files
from escalade.errors import EscaladeError
from escalade.measure.records import Record, load_folder
from escalade.report import (
    ablation_pages,
    call_pages,
    coverage_pages,
    gaps,
    gpu_tests,
    ladder_pages,
    layer_pages,
    network_pages,
    operation_pages,
    pair_pages,
    peer_pages,
    scale_pages,
    step_pages,
    training_pages,
)
from escalade.report.network_plots import network_plot
from escalade.report.plans import page as plans
from escalade.report.plot import ladder_plot

NETWORKS = "networks"
"""The generated part of the README, by the markers around it."""
PREFERRED_GPU = "h200"
Block = Callable[[Sequence[Record]], str]
_IN_PART: Mapping[str, Mapping[str, Block]] = {
    "measuring.md": {part.PART: part.block for part in (gpu_tests, peer_pages, call_pages, gaps)},
    scale_pages.PAGE: {scale_pages.PART: scale_pages.block},
    training_pages.PAGE: {part.PART: part.block for part in (training_pages, ablation_pages, pair_pages)},
}
"""Pages that are generated in part: what stands between their markers."""


def require_records(results: pathlib.Path) -> dict[str, list[Record]]:
    """Return the records by GPU folder; a folder without records is refused."""
    records = load_folder(results)
    if not records:
        raise EscaladeError(f"there are no records under {results}; --results names the folder that has them")
    return records


def on_cards(records: Mapping[str, Sequence[Record]]) -> dict[str, list[Record]]:
    """What was measured on cards, the preferred one first; tests, and what the twin has counted, are not."""
    found = {
        gpu: [r for r in records[gpu] if r.workload != gpu_tests.WORKLOAD and not r.is_on_twin]
        for gpu in sorted(records, key=lambda name: (name != PREFERRED_GPU, name))
    }
    return {gpu: own for gpu, own in found.items() if own}


def write(results: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """Brings the generated files up to date; those that were written."""
    records = load_folder(results)
    written = []
    for path, text in _wanted(records, root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text.encode())
        written.append(path)
    climb = ladder_pages.climb(_chosen(records))
    if climb:
        written.append(ladder_plot(climb, ladder_pages.CLIMB_PROBLEM, root / ladder_pages.PLOT))
    for name in network_pages.networks(_chosen(records)):
        if not network_pages.has_plot(network_pages.of_network(_chosen(records), name), name):
            continue
        shown = network_pages.plotted(_chosen(records), name)
        written.append(network_plot(shown, name, root / "docs" / network_pages.plot(name)))
    return written


def stale(results: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """The generated files that are not what the records say."""
    wanted = _wanted(load_folder(results), root)
    return [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]


def _wanted(records: dict[str, list[Record]], root: pathlib.Path) -> dict[pathlib.Path, str]:
    readme = root / "README.md"
    if not readme.is_file():
        raise EscaladeError(f"there is no {readme}; --root names the folder that has it")
    text = replaced(readme.read_text(), NETWORKS, network_pages.readme_block(_chosen(records)))
    measured = on_cards(records)
    in_part = {root / "docs" / name: blocks for name, blocks in _IN_PART.items()}
    return {
        **{
            path: _in_part(path, blocks, _chosen(records))
            for path, blocks in in_part.items()
            if path.is_file()
        },
        readme: text,
        root / "docs" / "ladder.md": ladder_pages.ladder_page(measured, PREFERRED_GPU),
        **{
            root / "docs" / path: page
            for path, page in operation_pages.pages(measured, PREFERRED_GPU).items()
        },
        root / "docs" / "networks.md": network_pages.networks_page(measured, PREFERRED_GPU),
        root / "docs" / "layers.md": layer_pages.layers_page(measured, PREFERRED_GPU),
        root / "docs" / coverage_pages.PAGE: coverage_pages.coverage_page(measured, PREFERRED_GPU),
        root / "docs" / plans.PAGE: plans.plans_page(_chosen(measured)),
        root / "docs" / step_pages.PAGE: step_pages.steps_page(measured, PREFERRED_GPU),
    }


def _in_part(path: pathlib.Path, blocks: Mapping[str, Block], records: Sequence[Record]) -> str:
    """A page that is written by hand but for these blocks."""
    text = path.read_text()
    for part, block in blocks.items():
        text = replaced(text, part, block(records), path.name)
    return text


def markers(part: str) -> tuple[str, str]:
    return f"<!-- {part}:begin -->", f"<!-- {part}:end -->"


def replaced(text: str, part: str, block: str, page: str = "README.md") -> str:
    """The text with what stands between the part's markers exchanged."""
    begin, end = markers(part)
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise EscaladeError(f"{page} needs the lines {begin} and {end} around the generated table")
    return f"{before}{begin}\n{block}{end}{after}"


def _chosen(records: dict[str, list[Record]]) -> list[Record]:
    """The GPU that the README speaks of."""
    if PREFERRED_GPU in records:
        return records[PREFERRED_GPU]
    return records[min(records)] if records else []
