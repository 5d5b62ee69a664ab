"""Units of the ladders: a problem in a dtype, rungs with one idea off, the sweep over filter sizes, counted bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from escalade import ops
from escalade.ops.base.card import Card
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Rung
from escalade.tune.verification import rung_jobs
from escalade_bench.campaign.units import TIMED, Say, Session, Unit, command
from escalade_bench.ladder import ablate, ablations, climb, free
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.profile.climb import Climb
from escalade_bench.profile.climb import measure as count_bytes

FEATURED = "64to64_56_k3s1_b256"
"""The convolution whose climb the docs show from the naive rung to the summit."""
_LENET = ("1to4_86_k7_b10000_relu_pool2", "4to16_40_k7_b10000_relu_pool4c")
"""LeNet's convolutions, each fused with the layers after it into one kernel."""
TRAFFIC = {
    ("conv2d", FEATURED, "fp32"): (
        "direct", "input_tile", "weight_tile", "padded_tile", "vector_loads", "register_blocking", "nhwc", "unrolled",
        "tuned", "winograd_f4_fused",
    ),
    ("conv2d", FEATURED, "fp16"): ("fused_epilogue", "tma_wgmma", "overlapped_store", "window"),
    **{("few_channels", problem, "fp16"): ("pooled",) for problem in _LENET},
}  # fmt: skip
"""Rungs that Nsight Compute counts, by operation, problem and dtype: bytes, and what limits each."""
_START_SECONDS, _RUNG_SECONDS = 1.5, 0.12
_TRAFFIC_START, _TRAFFIC_SECONDS = 15.0, 3.0
_SLOW_SECONDS = 70.0
"""Seconds per 10^12 operations: the naive rung takes one second for them, and is called dozens of times."""


def units() -> Iterator[Unit]:
    """Yield every unit of every ladder."""
    for operation in ops.OPERATIONS.values():
        for dtype in operation.dtypes:
            for problem in operation.problems:
                yield _unit("ladder", operation, problem, dtype)
            for problem in operation.crossover:
                yield _unit("crossover", operation, problem, dtype)
            if _variants(operation):
                named = [problem for problem in operation.problems if problem.name == FEATURED]
                yield _unit("ablation", operation, (named or operation.problems)[0], dtype)
    for counted, rungs in TRAFFIC.items():
        yield _traffic(Climb(*counted, list(rungs)))


def _variants(operation: Operation[Any]) -> list[Rung[Any]]:
    return [rung for group in ablations(operation).values() for rung in group.values()]


def _unit(kind: str, operation: Operation[Any], problem: Any, dtype: str) -> Unit:
    variants = _variants(operation)
    rungs = variants if kind == "ablation" else list(operation.ladder)
    option = {"ladder": (), "ablation": ("--ablate",), "crossover": ("--crossover",)}[kind]

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        workload = operation.name if kind == "ladder" else f"{operation.name}_{kind}"
        found = (ablate if kind == "ablation" else climb)(operation, problem, session.settings(say, dtype))
        yield [replace(record, workload=workload) for record in found]

    def made(session: Session, record: Record) -> Made | None:
        known = {rung.name: rung for rung in (*operation.ladder, *variants)}
        if record.rung not in known or record.layout not in operation.layouts:
            return None
        asked = replace(problem, dtype=dtype, layout=record.layout)
        (job, *_) = rung_jobs(known[record.rung], asked, Card.of(session.device))
        return Made.of_rung(job.rung, asked, job.config) if job.config else None

    subjects = len(rungs) * len(operation.layouts)
    return Unit(
        f"{kind}/{operation.name}/{problem.name}/{dtype}",
        f"{kind} of {operation.name}",
        command("ladder", operation.name, "-p", problem.name, "-t", dtype, *option, *TIMED),
        _START_SECONDS + _RUNG_SECONDS * subjects + _SLOW_SECONDS * problem.flops / 1e12,
        measure,
        made,
        tuple(rung.name for rung in rungs),
    )


def _traffic(counted: Climb) -> Unit:
    name, problem, dtype = counted.operation, counted.problem, counted.dtype

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        say(f"{name} {problem} {dtype}: counting by Nsight Compute")
        assert session.ceilings is not None
        _, records = count_bytes(counted, session.device, session.ceilings)
        yield records
        free(session.device)

    def made(session: Session, record: Record) -> Made | None:
        choices = {choice.rung.name: choice for choice in counted.choices(session.card)}
        found = choices.get(record.rung)
        return Made.of_rung(found.rung, found.problem, found.config) if found else None

    return Unit(
        f"traffic/{name}/{problem}/{dtype}",
        f"bytes that rungs of {name} move, counted by Nsight Compute",
        command("profile", name, "-p", problem, "-t", dtype, "-r", ",".join(counted.rungs)),
        _TRAFFIC_START + _TRAFFIC_SECONDS * len(counted.rungs),
        measure,
        made,
        tuple(counted.rungs),
        alone=True,
    )
