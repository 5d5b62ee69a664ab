"""The tables of README.md and docs, generated from the records in results/: no figure is typed by hand."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence

from escalade.errors import EscaladeError
from escalade.measure.records import Record, load_folder
from escalade.ops import OPERATIONS
from escalade.report import cells, gpu_tests, layer_pages, network_pages, step_pages
from escalade.report.markdown import origin, table
from escalade.report.network_plot import network_plot
from escalade.report.plot import ladder_plot

NETWORKS = "networks"
"""The generated part of the README, by the markers around it."""
CLIMB_PROBLEM = "64to64_56_k3s1_b256"
PREFERRED_GPU = "h200"
PLOT = pathlib.Path("docs/images/ladder.svg")
_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")
_HOME_DTYPES = ("fp32", "fp16", "tf32", "bf16", "fp8")
"""Dtypes in which the climb shows a rung: fp32 if it can, then what tensor cores are made for."""


def require_records(results: pathlib.Path) -> None:
    """There are some: tables of nothing, in place of those that are there, are not what anybody asked for."""
    if not load_folder(results):
        raise EscaladeError(f"there are no records under {results}; --results names the folder that has them")


def write(results: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """Brings the generated files up to date; those that were written."""
    records = load_folder(results)
    written = []
    for path, text in _wanted(records, root).items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    climb = _climb(_workload(_chosen(records), "conv2d"))
    if climb:
        written.append(ladder_plot(climb, CLIMB_PROBLEM, root / PLOT))
    for name in network_pages.networks(_chosen(records)):
        if not network_pages.has_plot(_chosen(records), name):
            continue
        written.append(network_plot(_chosen(records), name, root / "docs" / network_pages.plot(name)))
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
    measured = {
        gpu: timed
        for gpu, own in records.items()
        if (timed := [record for record in own if record.workload != gpu_tests.WORKLOAD])
    }
    measuring = root / "docs" / "measuring.md"
    wanted = {measuring: _measuring_page(measuring, records)} if measuring.is_file() else {}
    return {
        **wanted,
        readme: text,
        root / "docs" / "ladder.md": ladder_page(measured),
        root / "docs" / "networks.md": network_pages.networks_page(measured, PREFERRED_GPU),
        root / "docs" / "layers.md": layer_pages.layers_page(measured, PREFERRED_GPU),
        root / "docs" / step_pages.PAGE: step_pages.steps_page(measured, PREFERRED_GPU),
    }


def _measuring_page(path: pathlib.Path, records: dict[str, list[Record]]) -> str:
    """Written by hand but for the last run of the tests on a GPU."""
    return replaced(path.read_text(), gpu_tests.PART, gpu_tests.block(_chosen(records)), path.name)


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


def _workload(records: Iterable[Record], workload: str) -> list[Record]:
    return [record for record in records if record.workload == workload]


def _problems(records: Iterable[Record]) -> list[str]:
    return list(dict.fromkeys(record.problem for record in records))


def _is_timed(record: Record) -> bool:
    return record.median_us is not None


def _fastest(records: Iterable[Record]) -> Record | None:
    return min(filter(_is_timed, records), key=lambda record: record.time, default=None)


# docs/ladder.md: the climb --------------------------------------------------------------------------------------


def _climb_section(records: Sequence[Record]) -> str:
    """Every rung once, on one problem, with the picture of it; empty until it was measured."""
    climb = _climb(_workload(records, "conv2d"))
    if not climb:
        return ""
    return (
        f"\n### The climb: conv2d `{CLIMB_PROBLEM}`\n\n"
        "Each rung in fp32 or the dtype it is made for, in its faster layout:\n\n"
        f"{_climb_table(climb)}\n![The climb]({PLOT.relative_to('docs').as_posix()})\n"
    )


def _climb(convolutions: Sequence[Record]) -> list[Record]:
    """The peers and rungs of the climb's problem: each rung once, in its home dtype."""
    own = [r for r in convolutions if r.problem == CLIMB_PROBLEM and _is_timed(r)]
    rungs = [rung for rung in _ladder_order() if any(r.rung == rung for r in own)]
    climb = []
    for rung in rungs:
        dtype = next(d for d in _HOME_DTYPES if any(r.rung == rung and r.dtype == d for r in own))
        best = _fastest(r for r in own if r.rung == rung and r.dtype == dtype)
        if best:
            climb.append(best)
    peers = [
        peer
        for dtype in dict.fromkeys(record.dtype for record in climb)
        if (peer := _fastest(r for r in own if r.system != "escalade" and r.dtype == dtype))
    ]
    return peers + climb


def _ladder_order(operation: str = "conv2d") -> list[str]:
    return [rung.name for rung in OPERATIONS[operation].ladder]


def _summary(record: Record) -> str:
    if record.system != "escalade":
        return "PyTorch with cuDNN, its faster layout"
    return next((r.summary for r in OPERATIONS["conv2d"].ladder if r.name == record.rung), "")


def _climb_table(climb: Sequence[Record]) -> str:
    header = (
        "rung",
        "what it changes",
        "dtype",
        "layout",
        "µs",
        "GFLOP/s",
        "% of ceiling",
        "gain",
        "predicted",
    )
    rows = [
        (
            cells.who(r), _summary(r), r.dtype, r.layout, cells.microseconds(r), cells.gflops(r),
            cells.percent(r.peak_pct), cells.times(r.gain), cells.times(r.predicted_gain),
        )
        for r in climb
    ]  # fmt: skip
    return table(header, rows, left=4)


# docs/ladder.md: everything -------------------------------------------------------------------------------------


def ladder_page(records: dict[str, list[Record]]) -> str:
    parts = [
        "# The ladders, measured\n\n"
        "Generated by `escalade tables` from the records in `results/`; do not edit. "
        "How it was measured: [measuring.md](measuring.md).\n"
    ]
    if not records:
        parts.append("\nThere are no records yet. On a machine with a GPU: "
                     "`escalade ladder conv2d --tune --results results`, then `escalade tables`.\n")  # fmt: skip
    for gpu in sorted(records, key=lambda name: (name != PREFERRED_GPU, name)):
        parts.append(_gpu_section(records[gpu]))
    return "".join(parts)


def _gpu_section(records: Sequence[Record]) -> str:
    parts = [f"\n## {records[0].gpu}\n\n", origin(records)]
    ceilings = _workload(records, "ceilings")
    if ceilings:
        rows = [
            (r.problem, r.dtype, "" if r.tflops is None else f"{r.tflops:.1f}", cells.whole(r.gbps))
            for r in ceilings
        ]
        parts += ["\n### Ceilings\n\n", table(("what", "dtype", "TFLOP/s", "GB/s"), rows, left=2)]
    parts.append(_climb_section(records))
    sections: tuple[tuple[str, str, Callable[[Sequence[Record]], str]], ...] = (
        ("", "", _problem_table),
        ("_ablation", "One idea switched off: ", _ablation_table),
    )
    for operation in OPERATIONS:
        for suffix, title, make in sections:
            own = _workload(records, operation + suffix)
            for problem in _problems(own):
                parts.append(f"\n### {title}{operation} `{problem}`\n\n")
                parts.append(make([record for record in own if record.problem == problem]))
        sweep = _workload(records, f"{operation}_crossover")
        if sweep:
            parts.append(f"\n### Which algorithm wins as the filter grows: {operation}\n\n")
            parts.append(_crossover_table(sweep))
    return "".join(parts)


def _problem_table(records: Sequence[Record]) -> str:
    header = (
        "dtype", "layout", "rung", "config", "µs", "p20–p80", "GFLOP/s", "% of ceiling", "GB/s", "× floor", "gain",
        "predicted", "over", "vs peer", "error", "registers", "occupancy",
    )  # fmt: skip
    order = {name: position for position, name in enumerate(_ladder_order(records[0].workload))}
    ordered = sorted(
        records,
        key=lambda r: (
            _DTYPES.index(r.dtype),
            r.system == "escalade",
            r.layout,
            order.get(r.rung, -1),
            r.system,
        ),
    )
    return table(header, [_problem_row(record) for record in ordered], left=4)


def _problem_row(r: Record) -> Sequence[str]:
    who = cells.who(r)
    if r.failure:
        return (r.dtype, r.layout, who, f"failed: {r.failure.splitlines()[0]}", *[""] * 13)
    spread = "" if r.p20_us is None or r.p80_us is None else f"{r.p20_us:.4g}–{r.p80_us:.4g}"
    spilled = f" ({r.spill_bytes} B spilled)" if r.spill_bytes else ""
    return (
        r.dtype, r.layout, who, cells.config(r), cells.microseconds(r), spread, cells.gflops(r),
        cells.percent(r.peak_pct), cells.whole(r.gbps), cells.over_floor(r), cells.times(r.gain),
        cells.times(r.predicted_gain), r.gain_over, cells.times(r.peer_gain), cells.error(r.error),
        cells.integer(r.registers) + spilled, cells.share(r.occupancy),
    )  # fmt: skip


def _ablation_table(records: Sequence[Record]) -> str:
    header = ("dtype", "layout", "rung", "µs", "GFLOP/s", "the idea's gain", "error")
    rows = [
        (r.dtype, r.layout, r.rung, cells.microseconds(r) or f"failed: {r.failure.splitlines()[0]}", cells.gflops(r),
         cells.times(r.gain), cells.error(r.error))
        for r in records
    ]  # fmt: skip
    return table(header, rows, left=3)


def _crossover_table(records: Sequence[Record]) -> str:
    """A row for each problem of the sweep: PyTorch's and every rung's best layout in µs, and who is the fastest."""
    operation = records[0].workload.removesuffix("_crossover")
    order = {name: position for position, name in enumerate(_ladder_order(operation))}
    rungs = sorted({r.rung for r in records if r.rung}, key=lambda rung: order.get(rung, -1))
    rows = []
    for problem, dtype in dict.fromkeys((r.problem, r.dtype) for r in records):
        own = [r for r in records if (r.problem, r.dtype) == (problem, dtype) and _is_timed(r)]
        peer = _fastest(r for r in own if r.system != "escalade")
        best = [_fastest(r for r in own if r.rung == rung) for rung in rungs]
        winner = _fastest(own)
        rows.append(
            (f"`{problem}`", dtype, *(cells.microseconds(r) if r else "" for r in (peer, *best)),
             f"{cells.who(winner)} {winner.layout}" if winner else "")
        )  # fmt: skip
    return table(("problem", "dtype", "PyTorch", *rungs, "the fastest"), rows, left=2)
