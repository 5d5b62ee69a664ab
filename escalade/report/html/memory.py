"""Memory as pictures: beside the peers', by what it is for, and by the phases of a step of training or of the climb."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from escalade.bench.peers.catalogue import TITLES
from escalade.bench.peers.comparison import TRAINING_STEP
from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.html.bars import Layer, stacked_figure
from escalade.report.html.networks import PEERS, peer_bars
from escalade.report.html.section import CardRecords, Picture
from escalade.report.html.svg import BLUE, GOLD, GREY, PURPLE, RED, inline
from escalade.report.html.verdict import Row, rows
from escalade.report.markdown import table

_KINDS = {"weights": BLUE, "packed": PURPLE, "arena": RED, "caller": GREY}
_SAID = {
    "weights": "weights",
    "packed": "packed weights and counters",
    "arena": "arena",
    "caller": "the caller's tensors",
}
_PHASES = {"forward": BLUE, "backward": RED, "optimiser": GOLD}
_COMMAND = "escalade bench resnet18 --results results"


def text(records: Sequence[Record]) -> str:
    """A row for each workload, dtype and batch: what each system needs at most."""
    found = [row for row in rows(records) if _bytes(row, "escalade")]
    if not found:
        return f"Nobody's memory is recorded yet: `{_COMMAND}`.\n"
    systems = [name for name in PEERS if any(_bytes(row, name) for row in found)]
    header = (
        "workload",
        "dtype",
        "batch",
        "Escalade, MiB",
        *(f"{TITLES[s]}, MiB" for s in systems),
        "share of the least",
    )
    return table(header, [_cells(row, systems) for row in found], left=3)


def _cells(row: Row, systems: Sequence[str]) -> tuple[str, ...]:
    ours, peers = _bytes(row, "escalade"), [_bytes(row, name) for name in systems]
    least = min(filter(None, peers), default=None)
    share = ours / least if ours and least else None
    return (
        row.workload, row.one.dtype, f"{row.one.batch:,}", *(cells.figure(_mebi(size)) for size in (ours, *peers)),
        cells.share(share),
    )  # fmt: skip


def _bytes(row: Row, system: str) -> int | None:
    record = row.one.of(system)
    return record.peak_bytes if record else None


def _mebi(size: int | None) -> float | None:
    return None if size is None else size / 2**20


def pictures(records: CardRecords) -> Iterator[Picture]:
    """What each card's records have of it."""
    for gpu, own in records.items():
        card = own[0].gpu
        yield from _beside_peers(gpu, card, own)
        yield from _by_kind(gpu, card, own)
        yield from _by_phase(gpu, card, own)
        yield from _of_the_climb(gpu, card, own)


def _beside_peers(gpu: str, card: str, records: Sequence[Record]) -> Iterator[Picture]:
    found = list(rows(records))
    for workload in dict.fromkeys(row.workload for row in found):
        own = [row for row in found if row.workload == workload]
        drawn = peer_bars(own, _ratio, "times the memory that Escalade needs")
        if drawn is not None:
            title = f"What the peers of {workload} need, on {card}"
            caption = "At most, in one call: weights, inputs and results included."
            yield Picture(title, inline(drawn, f"memory-peers-{gpu}-{workload}", title), caption)


def _ours(records: Sequence[Record]) -> list[Record]:
    return [ours for row in rows(records) if (ours := row.one.of("escalade"))]


def _planned(records: Sequence[Record]) -> list[Record]:
    """Networks of whose plans it is known what memory is for; a training step's lies outside for the most part."""
    return [r for r in _ours(records) if "memory" in r.config and not r.workload.endswith(TRAINING_STEP)]


def _ratio(row: Row, system: str) -> float | None:
    ours, theirs = _bytes(row, "escalade"), _bytes(row, system)
    return theirs / ours if ours and theirs else None


def _by_kind(gpu: str, card: str, records: Sequence[Record]) -> Iterator[Picture]:
    found = _planned(records)
    if not found:
        return
    names = [f"{r.workload}, {r.dtype}, batch {r.batch:,}" for r in found]
    layers = [
        Layer(_SAID[kind], [_mebi(r.config["memory"][kind]) for r in found], colour)
        for kind, colour in _KINDS.items()
    ]
    title = f"What it is for, on {card}"
    drawn = inline(partial(stacked_figure, names, layers, "MiB"), f"memory-kinds-{gpu}", title)
    yield Picture(title, drawn, "Known before anything runs: a plan has a place for every value.")


def _by_phase(gpu: str, card: str, records: Sequence[Record]) -> Iterator[Picture]:
    found = [r for r in _ours(records) if "phases" in r.config]
    if not found:
        return
    names = [
        f"{r.workload.removesuffix(TRAINING_STEP)}, {r.dtype}, batch {r.batch:,}: {phase}"
        for r in found
        for phase in _PHASES
    ]
    sizes = [(phase, _mebi(r.config["phases"][phase])) for r in found for phase in _PHASES]
    layers = [
        Layer(kind, [size if phase == kind else None for phase, size in sizes], colour)
        for kind, colour in _PHASES.items()
    ]
    title = f"A step of training, by phase, on {card}"
    drawn = inline(
        partial(stacked_figure, names, layers, "MiB of the arena, at most"), f"memory-phases-{gpu}", title
    )
    yield Picture(
        title,
        drawn,
        "What has to be kept at once up to the loss, behind it, and while the optimiser runs. Parameters, their copies "
        "in 16 bits and the optimiser's state lie outside the arena.",
    )


def _of_the_climb(gpu: str, card: str, records: Sequence[Record]) -> Iterator[Picture]:
    """One image, from the naive kernels to the engine."""
    found = [r for r in records if r.workload.endswith("_phases") and r.peak_bytes]
    if not found:
        return
    names = [f"{r.workload.removesuffix('_phases')}, {r.dtype}: {r.rung}" for r in found]
    layers = [Layer("at most", [_mebi(r.peak_bytes) for r in found], RED)]
    title = f"One image, phase by phase, on {card}"
    drawn = inline(partial(stacked_figure, names, layers, "MiB"), f"memory-climb-{gpu}", title)
    yield Picture(title, drawn, "From the naive kernels, each with a place of its own, to the engine.")


def missing(records: Sequence[Record]) -> str:
    """What the records lack, in a sentence with the command for it."""
    absent = []
    if not _planned(records):
        absent.append(f"what a plan's memory is for (`{_COMMAND}`)")
    if not any("phases" in r.config for r in _ours(records)):
        absent.append(
            "a training step's by phase (`escalade bench autoencoder --parts training-step --results results`)"
        )
    if not any(r.workload.endswith("_phases") for r in records):
        absent.append(
            "one image's, phase by phase (`escalade bench resnet18 --parts phases --results results`)"
        )
    return f"Not recorded yet: {'; '.join(absent)}.\n" if absent else ""
