"""Write the generated pages and plots: no figure in README.md and docs is typed by hand."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from escalade import files
from escalade.errors import EscaladeError
from escalade.version import URL
from escalade_bench.measure.records import Record, load_folder
from escalade_bench.report import cells, plots
from escalade_bench.report.compare import PREFERRED_GPU, of
from escalade_bench.report.document import Item, Plot, markdown, not_measured, origin
from escalade_bench.report.pages import (
    coverage,
    goals,
    ladders,
    layers,
    networks,
    readme,
    records,
    training,
)
from escalade_bench.report.table import Table
from escalade_bench.report.terminal import COUNTS

__all__ = ["PREFERRED_GPU", "markers", "require_records", "stale", "write"]
NETWORKS = "networks"
"""The generated part of README.md, by the markers around it."""
README_IMAGES = f"{URL}/raw/main/docs/images"
"""An absolute URL: package indexes show README.md without its images."""
Pages = dict[str, list[Item]]
"""Pages by path from the repository's root."""
IMAGES = 10**9
_HOUR_US = 3600e6


def require_records(results: pathlib.Path) -> dict[str, list[Record]]:
    """Return the records by GPU folder; raises if there are none."""
    found = load_folder(results)
    if not found:
        raise EscaladeError(f"there are no records under {results}; --results names the folder that has them")
    return found


def on_cards(found: Mapping[str, Sequence[Record]]) -> dict[str, list[Record]]:
    """Return the records of cards, the preferred one first, without tests and the twin's counts."""
    own = {
        gpu: [r for r in found[gpu] if r.workload not in records.NOT_TIMED and not r.is_on_twin]
        for gpu in sorted(found, key=lambda name: (name != PREFERRED_GPU, name))
    }
    return {gpu: some for gpu, some in own.items() if some}


def pages(found: Mapping[str, Sequence[Record]]) -> Pages:
    """Return the fully generated pages."""
    cards, chosen = on_cards(found), _chosen(found)
    made = {
        "ladder.md": ladders.overview(cards),
        **ladders.operation_pages(cards),
        "networks.md": networks.page(cards),
        "layers.md": layers.page(cards),
        "coverage.md": coverage.page(cards),
        "records.md": records.page(chosen),
        training.PAGE: training.step_page(cards),
    }
    return {f"docs/{name}": items for name, items in made.items()}


def blocks(found: Mapping[str, Sequence[Record]]) -> dict[str, Pages]:
    """Return the generated parts of handwritten pages, by path and marker."""
    own, every = _chosen(on_cards(found)), [record for some in found.values() for record in some]
    return {
        "README.md": {NETWORKS: readme.block(own)},
        "docs/goals.md": goals.blocks(own),
        "docs/many-machines.md": {"billion": _billion(own)},
        "docs/twin.md": {"indigo": records.indigo(every), "twin-ncu": _beside_twin(every)},
        "docs/training-steps.md": {
            "training-step": training.steps(own),
            "training-ablation": training.techniques(own),
            "training-pairs": training.pairs(own),
        },
    }


def _billion(found: Sequence[Record]) -> list[Item]:
    """Return GPU hours for a billion images, per measured batch and dtype of ResNet-18."""
    own = [r for r in of(found, "resnet18") if not r.is_peer and r.median_us]
    if not own:
        return ["Nothing is measured yet: `escalade bench resnet18`."]

    def hours(r: Record, time: float | None) -> str:
        return "" if time is None else f"{IMAGES / r.batch * time / _HOUR_US:,.2f}"

    rows = [
        (r.dtype, f"{r.batch:,}", cells.microseconds(r), hours(r, r.median_us), cells.figure(r.wall_us),
         hours(r, r.wall_us), [r])
        for r in own
    ]  # fmt: skip
    where = f"ResNet-18, {IMAGES:,} images, on an {own[0].gpu}. {origin(own)}"
    heads = "dtype|>batch|>µs on the device|>GPU hours|>µs per call|>GPU hours by calls"
    return [where, Table.of(heads, rows)]


def _beside_twin(found: Sequence[Record]) -> list[Item]:
    """Compare Nsight Compute's counts of a rung with the twin's."""
    twin = {r.key: r for r in found if r.is_on_twin and r.counts}
    made: list[Item] = []
    for r in found:
        if r.timing == "ncu" and r.counts and r.key in twin:
            other = twin[r.key]
            rows = [
                (name, f"{n:,}", f"{other.counts.get(name, 0):,}", (r, other)) for name, n in r.counts.items()
            ]
            title = (
                f"{r.workload.removesuffix(COUNTS)} {r.rung} on {r.problem}, {r.dtype}, by ncu on an {r.gpu}"
            )
            made.append(Table.of("count|ncu|twin", rows, title))
    return made or [not_measured("escalade profile conv2d --problem NAME --rung NAME --beside-twin")]


def write(results: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """Update the generated files; return those that were written."""
    found = load_folder(results)
    written = []
    for path, contents in _wanted(found, root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, contents.encode())
        written.append(path)
    every = [item for page in pages(found).values() for item in page]
    every += [item for parts in blocks(found).values() for part in parts.values() for item in part]
    drawn = {item.name: item for item in every if isinstance(item, Plot)}
    images = root / "docs" / "images"
    return written + [plots.save(item.draw, images / f"{name}.svg") for name, item in drawn.items()]


def stale(results: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """Return the generated files that differ from the records."""
    wanted = _wanted(load_folder(results), root)
    return [path for path, made in wanted.items() if not path.is_file() or path.read_text() != made]


def _wanted(found: Mapping[str, Sequence[Record]], root: pathlib.Path) -> dict[pathlib.Path, str]:
    if not (root / "README.md").is_file():
        raise EscaladeError(f"there is no {root / 'README.md'}; --root names the folder that has it")
    made = {root / name: markdown(items) for name, items in pages(found).items()}
    for name, parts in blocks(found).items():
        path = root / name
        if path.is_file():
            made[path] = path.read_text()
            for part, items in parts.items():
                block = markdown(items, README_IMAGES if name == "README.md" else "images")
                made[path] = replaced(made[path], part, block, path.name)
    return made


def markers(part: str) -> tuple[str, str]:
    return f"<!-- {part}:begin -->", f"<!-- {part}:end -->"


def replaced(page: str, part: str, block: str, name: str = "README.md") -> str:
    """Return the page with the text between the part's markers replaced."""
    begin, end = markers(part)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise EscaladeError(f"{name} needs the lines {begin} and {end} around the generated table")
    return f"{before}{begin}\n{block}{end}{after}"


def _chosen(found: Mapping[str, Sequence[Record]]) -> Sequence[Record]:
    """Return the records of README's GPU."""
    return found.get(PREFERRED_GPU) or (found[min(found)] if found else [])
