"""A LeNet's convolutions in three cumulative steps, and what fusion could have saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from escalade import ops
from escalade.bench.networks.op_times import FORMS, OPERATION
from escalade.measure.records import Record
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.report import cells
from escalade.report.commits import newest
from escalade.report.markdown import origin, table
from escalade.report.op_time_pages import OpTimes, Variant, op_times
from escalade.report.plans.section import Section

STEPS: tuple[Mapping[str, str], ...] = (
    {"matrix_unroll": "the matrix unrolled in memory"},
    {"fusion": "+ fusion + tensor cores"},
    {
        "half": "+ `__restrict__` + unrolled loops + 16-bit operands",
        "unrolling": "+ `__restrict__` + unrolled loops",
    },
)
"""The rung with which each step is done, or the next best; the ladder has what lies between them one by one."""
_UNROLLED, _APART, _FUSED = "matrix_unroll", "tensor_cores", "fusion"
_PRODUCTS = {"fp32": "tf32", "fp16": "fp16"}
"""The dtype of tensor cores' products, by that of the tensors."""
_ABOUT = f"""The plan, for two convolutions over 10,000 images, is: unroll the matrix and multiply; then one kernel that
unrolls, multiplies on tensor cores and permutes; then pointers that do not overlap, loops that are unrolled, and
operands of 16 bits. Tensor cores and fusion are two rungs of [{OPERATION}](ladders/{OPERATION}.md), so that it shows
what each brings: where fusion alone is below 1 it loses.

What fusion saves is the unrolled matrix, which is no longer written and read again. What it costs is that the place of
every value in x is found by the threads that multiply, a dozen integer instructions for as many multiply-adds as there
are filters, and with 4 or 16 filters these are few. Where memory is slow beside arithmetic the first can be the
larger, and fusion the biggest step of all. Here it is not: the last column is the most that fusion can save, what lies
between the launches written and read at the rate of a copy, and where fusion alone is below 1 finding the places has
cost that and more. It pays again when the filter's size is known to the compiler, which makes
multiplications of the divisions (`unrolling`), and more when pixels are not looked up one by one (`images_a_tile`)."""


def _block(records: Sequence[Record]) -> str:
    own = newest([r for r in records if r.workload == OPERATION])
    copy = _copy_gbps(records)
    found = [_table(times, copy) for times in op_times(own) if not times.form]
    tables = "".join(found)
    return f"{origin(own)}{tables}" if tables else ""


def _copy_gbps(records: Sequence[Record]) -> float | None:
    rates = [r.gbps for r in records if r.workload == "ceilings" and r.problem.startswith("copy") and r.gbps]
    return rates[0] if rates else None


def _table(times: OpTimes, copy_gbps: float | None) -> str:
    known = {variant.name.removesuffix(" (TF32)"): variant for variant in _fastest_names(times)}
    rows: list[tuple[str, ...]] = []
    first: Variant | None = None
    for step in STEPS:
        rung = next((name for name in step if name in known), None)
        if rung is not None:
            gain = cells.times(first.sum / known[rung].sum) if first else ""
            rows.append((step[rung], f"`{rung}`", *known[rung].cells[1:], gain))
            first = first or known[rung]
    if len(rows) < 2:
        return ""
    header = ("step", "rung", "Op-Time 1", "Op-Time 2", "Sum of Op-Times", "over the first")
    title = f"\n**{times.storage} tensors, {times.batch:,} images**\n\n"
    return title + table(header, rows, left=2) + _fusion_alone(known, times, copy_gbps)


def _fastest_names(times: OpTimes) -> list[Variant]:
    """The variants from slow to fast, so that of two by one name the faster counts."""
    return sorted((one for one in times.variants if not one.is_peer), key=lambda one: -one.sum)


def _fusion_alone(known: Mapping[str, Variant], times: OpTimes, copy_gbps: float | None) -> str:
    """What fusing alone did, beside the most that it could save."""
    if _APART not in known or _FUSED not in known:
        return ""
    apart, fused = known[_APART], known[_FUSED]
    problems = [
        replace(
            ops.operation(OPERATION).parse(name.format(batch=times.batch)), dtype=_PRODUCTS[times.storage]
        )
        for name in FORMS[""]
    ]
    rows = []
    for number, (problem, before, after) in enumerate(
        zip(problems, (apart.first, apart.second), (fused.first, fused.second), strict=True), start=1
    ):
        traffic = 2 * _between(problem)
        cost = "" if copy_gbps is None else f"{traffic / copy_gbps / 1e6:.3f} ms"
        rows.append(
            (str(number), str(problem.filters), f"{before / 1000:.3f} ms", f"{after / 1000:.3f} ms",
             cells.times(before / after), f"{traffic / 1e9:.1f} GB", cost)
        )  # fmt: skip
    header = (
        "convolution", "filters", "`tensor_cores`: the matrix in memory", "`fusion`", "fusion alone",
        "matrix and product, to and fro",
        "a copy of as much",
    )  # fmt: skip
    return "\n" + table(header, rows, left=1)


def _between(problem: FewChannelsProblem) -> int:
    """Bytes of what lies in memory between the launches that fusion makes one of: the matrix, and its product."""
    rung = ops.operation(OPERATION).ladder.rung(_UNROLLED)
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    return sum(workspace.bytes for workspace in recipe.workspaces)


SECTION = Section(
    "A LeNet's convolutions: unrolled, fused, tuned",
    _ABOUT,
    "escalade bench lenet --parts op-times --results results",
    _block,
)
