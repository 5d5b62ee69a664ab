"""docs/records.md: tests and long runs on a GPU, the cost of calls, the peers, and what has not been measured."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from escalade.ops import OPERATIONS
from escalade_bench.calls import FORWARD, WITH_GRADIENT
from escalade_bench.measure.records import Record
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers.comparison import COVERAGE, TRAINING_STEP
from escalade_bench.peers.registry import PEERS, Peer
from escalade_bench.report import cells
from escalade_bench.report.compare import compared, grouped, of
from escalade_bench.report.document import Heading, Item, begun, not_measured
from escalade_bench.report.pages import layers, networks
from escalade_bench.report.table import Column, Table, columns, items, text

GPU_TEST, SOAK, SERVICE, STARTUP, PHOTOGRAPHS = "gpu_test", "soak", "service", "startup", "photographs"
"""Workloads of the test suite and of the scripts under tests/gpu that file a record."""
INDIGO = "indigo"
"""Workload of what the twin reports of a public suite of planted bugs (docs/twin.md)."""
NOT_TIMED = (GPU_TEST, SOAK, SERVICE, STARTUP, PHOTOGRAPHS, "campaign")
"""Workloads that do not measure a kernel or a network."""
_LETTERS = 160
"""Characters of a failure that fit into its cell."""
_RUN = "`python -m tests.gpu.{} --results results`"


def page(records: Sequence[Record]) -> list[Item]:
    calls = of(records, FORWARD, WITH_GRADIENT)
    return [
        *begun(
            "Records: tests, long runs, peers, gaps", "What is recorded beside ladders, layers and networks."
        ),
        *gpu_tests(records),
        Heading(2, "Long runs"),
        *long_runs(records),
        Heading(2, "Host time per call"),
        "The time until a call of an operator from Python returns; its work on the GPU is not waited for. The ratio is "
        "PyTorch's time divided by ours: above 1× our call costs less.",
        calls_table(calls) if calls else not_measured("escalade bench calls --results results"),
        Heading(2, "Peers"),
        peers(records),
        Heading(2, "Not measured"),
        "".join(f"- {line}\n" for line in gaps(records)) or "Nothing is missing.",
    ]


def _config(heading: str, name: str = "") -> Column:
    def cell(r: Record) -> str:
        value = r.config.get(name or heading)
        return " to ".join(f"{v:,.5g}" for v in value) if isinstance(value, list) else cells.whole(value)

    return Column(heading, cell)


def gpu_tests(records: Sequence[Record]) -> Iterator[Item]:
    """The last run of each part of `make gpu-test`, passed or failed."""
    own = of(records, GPU_TEST)

    def result(r: Record) -> str:
        failure = textwrap.shorten(r.failure, _LETTERS, placeholder=" …")
        return f"failed: {failure}" if r.failure else "right"

    shown = columns("part=problem|program=rung") + [
        _config(n) for n in ("passed", "failed", "skipped", "seconds")
    ]
    title = "The tests on a GPU: `make gpu-test`, as each part last ran"
    yield Table([*shown, text("result", result)], own, title=title, level=2)
    reasons = {why: count for r in own for why, count in r.config.get("reasons", {}).items()}
    if reasons:
        listed = "".join(f"- {why}: {count}\n" for why, count in sorted(reasons.items()))
        yield f"Skipped, with the number of tests:\n\n{listed}"


def indigo(records: Sequence[Record]) -> list[Item]:
    """Planted bugs of a public suite, and how many of them the twin reports."""
    shown = [*columns("planted=problem"), _config("kernels"), _config("reported")]
    found = sorted(
        of(records, INDIGO), key=lambda r: (r.problem != "nothing", r.problem[0].isdigit(), r.problem)
    )
    return [Table(shown, found)] if found else ["It is not recorded yet."]


def long_runs(records: Sequence[Record]) -> Iterator[Item]:
    """Soak, calls from several threads, images from JPEG files to classes, and start-up."""
    soak = [
        *columns("run=problem"),
        *map(_config, ("seconds", "calls", "cancelled", "refused", "trainings")),
        *(_config("host MiB", "host"), _config("device MiB", "device"), _config("open files", "files")),
        *(_config("threads"), *columns("result")),
    ]
    legend = (
        "Threads call engines with batches of many sizes and in every dtype, cancel futures, leave streams half way, "
        "and train networks, while memory is withheld at times; every result is compared. Memory, files and threads "
        "are the least and the most in the last three quarters of the run. A run is named by its threads and its end."
    )
    seconds = [*columns("network=problem|what=rung|dtype"), Column("seconds", _seconds)]
    for workload, script, title, shown, said in (
        (SOAK, "soak", "Soak", soak, legend),
        (SERVICE, "service", "Calls per second of threads that share one engine, each call awaited",
         columns("what=problem|how=rung|dtype|calls/s=images/s"), ""),
        (PHOTOGRAPHS, "photographs", "Images per second from JPEG files to classes",
         columns("files=problem|what=rung|dtype|images/s"), ""),
        (STARTUP, "starting", "Seconds of a fresh process to its first result", seconds, ""),
    ):  # fmt: skip
        own = of(records, workload)
        if workload == SOAK:
            own = _with_sums(own)
        if own:
            yield Table(shown, own, title=f"{title}: {_RUN.format(script)}", legend=said, level=3)


def _with_sums(records: Sequence[Record]) -> list[Record]:
    """Return the runs of a soak, and behind those of the same threads their sum."""
    found: list[Record] = []
    for what, runs in grouped(records, lambda r: r.problem.partition(", ")[0]).items():
        runs = sorted(runs, key=lambda r: r.date)
        found += runs
        if len(runs) > 1:
            config: dict[str, Any] = {}
            for name, value in (item for run in runs for item in run.config.items()):
                if isinstance(value, list):
                    every = [*config.get(name, []), *value]
                    config[name] = [min(every), max(every)] if every else []
                else:
                    config[name] = config.get(name, 0) + value
            failure = "; ".join(run.failure for run in runs if run.failure)
            found.append(
                replace(runs[-1], problem=f"{what}, {len(runs)} runs", config=config, failure=failure)
            )
    return found


def _seconds(record: Record) -> str:
    return "" if record.wall_us is None else f"{record.wall_us / 1e6:.2f}"


def calls_table(records: Sequence[Record], title: str = "") -> Table:
    """A row for each call, dtype and layout, without and with gradients."""
    heads, rows = ["call", "dtype", "layout"], []
    for kind in ("", " with gradients"):
        heads += [f">µs{kind}", f">PyTorch's{kind}", f">ratio over PyTorch's{kind}"]
    for key, own in grouped(records, lambda r: (r.problem, r.dtype, r.layout)).items():
        row = [*key]
        for workload in (FORWARD, WITH_GRADIENT):
            found = {r.system: r for r in own if r.workload == workload}
            pair = found.get("escalade"), found.get("torch")
            ours, theirs = (r.median_us if r else None for r in pair)
            row += [cells.time_or_reason(r, lambda r: r.median_us) for r in pair]
            row.append(cells.quotient(theirs, ours))
        rows.append((*row, own))
    return Table.of("|".join(heads), rows, title)


def peers(records: Sequence[Record]) -> Table:
    """A row for each peer: whether it was measured, or why not."""

    def measured(peer: Peer) -> str:
        own = [record for record in records if record.system in peer.systems]
        timed = sum(record.median_us is not None for record in own)
        refusals = Counter(cells.first_line(record.failure) for record in own if record.failure)
        said = [f"times measured: {timed:,}"] if timed else []
        for why, count in refusals.most_common(1):
            said.append(f"refused {sum(refusals.values()):,} times, {count:,} of them: {why}")
        return "; ".join(said) or "not yet"

    rows = [
        (p.title, ", ".join(p.systems), p.what, p.takes_part,
         ", ".join(p.needs) or "PyTorch", measured(p))
        for p in PEERS
    ]  # fmt: skip
    return Table(items("peer", "in records", "at its best", "takes part in", "needs", "measured"), rows, None)


def gaps(records: Sequence[Record]) -> Iterator[str]:
    """List what has no record, and comparisons that lack a peer that matters."""
    workloads = {record.workload for record in records}
    steps = [name for name, one in WORKLOADS.items() if "training-step" in one.parts]
    for what, absent in (
        ("Networks", [name for name in WORKLOADS if name not in networks.names(records)]),
        ("Training steps", [name for name in steps if name + TRAINING_STEP not in workloads]),
        ("Layers and ladders", [n for n in (*layers.WORKLOADS.values(), *OPERATIONS) if n not in workloads]),
    ):
        if absent:
            yield f"**{what}** without a record: {', '.join(absent)}."
    kinds = (*WORKLOADS, *layers.WORKLOADS.values())
    for workload, own in grouped(records, lambda r: r.workload).items():
        if workload.startswith(COVERAGE) or workload.endswith(TRAINING_STEP) or workload in kinds:
            rows = compared(own)
            notes = Counter(row.device.note for row in rows if row.device.note)
            said = "; ".join(f"{note} ({count} of {len(rows)})" for note, count in notes.most_common())
            if said:
                yield f"**{workload}**: {said}."
    known = [record for record in records if record.conditions]
    held = Counter(record.throttled for record in known if record.throttled)
    if held:
        reasons = ", ".join(f"{count} by {why}" for why, count in held.most_common())
        yield f"**Clocks** were held down in {held.total()} of {len(known)} measurements: {reasons}."
    older = sum(bool(record.older) for record in records)
    if older:
        yield f"**Older code**: {older:,} of {len(records):,} records are no longer current ({cells.OLDER})."
