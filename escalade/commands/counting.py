"""Choose the rungs that `escalade profile count` counts, and make records of them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from escalade import ops
from escalade.tune import verification
from escalade_bench.measure.records import Record
from escalade_bench.report import terminal as tables
from escalade_bench.trial import blank_record

TWIN = torch.device("cpu")


def first_of_each_rung(planned: list[verification.VerificationJob]) -> list[verification.VerificationJob]:
    """Every rung on each problem and layout, in the first dtype that it takes: the others differ in bytes alone."""
    kept: dict[tuple[str, str, str], verification.VerificationJob] = {}
    for job in planned:
        key = (job.problem.name, job.problem.layout, job.rung.name)
        if key not in kept or (kept[key].refusal and not job.refusal):
            kept[key] = job
    return sorted(kept.values(), key=planned.index)


def count_record(operation: ops.Operation[Any], outcome: verification.Outcome) -> Record:
    return replace(
        blank_record(operation, outcome.problem, "escalade", outcome.rung),
        workload=operation.name + tables.COUNTS,
        config=asdict(outcome.config) if outcome.config else {},
        timing="twin",
        error=outcome.error,
        tolerance=outcome.tolerance,
        counts=outcome.counts.figures() if outcome.counts else {},
        failure=outcome.failure,
    )
