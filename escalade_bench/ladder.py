"""Climbs: all rungs of an operation on one problem and its peers, each verified before it is timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from escalade.ops.base.card import Card
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Rung
from escalade.terminal_text import counted
from escalade.tune import verification
from escalade_bench.measure.figures import with_gains
from escalade_bench.measure.records import Record
from escalade_bench.peers.layer import LayerPeer, operator_peers
from escalade_bench.trial import Bench, Settings, Verified, blank_record, verified_peers

DEFAULTS = Settings()


def climb(operation: Operation[Any], problem: Any, settings: Settings = DEFAULTS) -> list[Record]:
    """Return a record of every peer and every supporting rung in every dtype and layout, failures included."""
    chosen = [operation.ladder.rung(name) for name in settings.rungs] or list(operation.ladder)
    records: list[Record] = []
    for dtype in settings.dtypes or operation.dtypes:
        asked = replace(problem, dtype=dtype)
        records += _climb_dtype(operation, asked, chosen, settings)
        free(settings.device)
    return with_gains(records, operation.ladder)


def ablate(operation: Operation[Any], problem: Any, settings: Settings = DEFAULTS) -> list[Record]:
    """Measure rungs with one idea off at a time: `gain` is how many times faster the idea makes the rung."""
    records: list[Record] = []
    plain = replace(settings, with_peers=False)
    for base, variants in ablations(operation).items():
        rungs = [operation.ladder.rung(base), *variants.values()]
        for dtype in settings.dtypes or operation.dtypes:
            found = _climb_dtype(operation, replace(problem, dtype=dtype), rungs, plain)
            whole = {r.layout: r for r in found if r.rung == base and r.median_us is not None}
            for record in found:
                timed = record.rung != base and record.median_us is not None and record.timing != "twin"
                if timed and (with_idea := whole.get(record.layout)):
                    record = replace(record, gain=record.time / with_idea.time, gain_over=base)
                records.append(replace(record, workload=f"{operation.name}_ablation"))
            free(settings.device)
    return records


def ablations(operation: Operation[Any]) -> dict[str, dict[str, Rung[Any]]]:
    """Return each rung's ideas and its variant without each, from `ablations()` of the modules that define them."""
    found: dict[str, dict[str, Rung[Any]]] = {}
    for module in dict.fromkeys(type(rung).__module__ for rung in operation.ladder):
        offered = getattr(sys.modules[module], "ablations", None)
        for idea, variant in (offered() if offered else {}).items():
            found.setdefault(variant.name.removesuffix(f"-without-{idea}"), {})[idea] = variant
    return found


def free(device: torch.device) -> None:
    """Free the memory of one problem before the next one allocates."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _climb_dtype(
    operation: Operation[Any], problem: Any, rungs: Sequence[Rung[Any]], settings: Settings
) -> list[Record]:
    settings.say(f"{problem.name} {problem.dtype}: verifying")
    layouts, device = settings.layouts or operation.layouts, settings.device
    planned = [
        job
        for layout in layouts
        for rung in rungs
        for job in verification.rung_jobs(
            rung, replace(problem, layout=layout), Card.of(device), "all" if settings.tune else "default"
        )
    ]
    if not any(job.config for job in planned):
        return [_failure(operation, job) for job in planned if job.failure]
    beside = device.type == "cuda" and settings.with_peers
    offered = operator_peers(operation, problem, settings.compiled) if beside else ()
    records = measure_jobs(operation, problem, planned, offered, settings)
    height = {rung.name: position for position, rung in enumerate(rungs)}
    # The peers, then the rungs from the foot to the summit, each in all its layouts.
    return sorted(records, key=lambda r: (height.get(r.rung, -1), layouts.index(r.layout) if r.rung else -1))


def measure_jobs(
    operation: Operation[Any],
    problem: Any,
    planned: Iterable[verification.VerificationJob],
    offered: Iterable[LayerPeer],
    settings: Settings,
) -> list[Record]:
    """Verify rungs and peers on one problem, and time those that are right in turns."""
    say, case = (
        settings.say,
        verification.VerificationCase(operation, problem, settings.device, settings.seed),
    )
    records, verified = _verify(operation, case, planned)
    peers, refused = verified_peers(offered, operation, case)
    records += refused
    del case
    bench = Bench(operation, problem, [v.rung.recipe(v.problem, v.config) for v in verified], settings)
    if settings.tune:
        say(f"{problem.name} {problem.dtype}: screening {counted(len(verified), 'config')}")
        verified = bench.screen(verified)
    say(
        f"{problem.name} {problem.dtype}: timing {counted(len(verified), 'rung')} and {counted(len(peers), 'peer')}"
    )
    records += bench.measure(verified, peers)
    for text in bench.left_out:
        (settings.note or say)(text)
    return records


def _verify(
    operation: Operation[Any],
    case: verification.VerificationCase,
    planned: Iterable[verification.VerificationJob],
) -> tuple[list[Record], list[Verified]]:
    """Return what may be timed, and a failure for each rung and layout without a right config."""
    right: dict[tuple[str, str], list[Verified]] = {}
    wrong: dict[tuple[str, str], list[Record]] = {}
    for job in planned:
        key = (job.rung.name, job.problem.layout)
        outcome = case.check(job.rung, job.problem.layout, job.config) if job.config else None
        if job.config and outcome and outcome.passed:
            right.setdefault(key, []).append(Verified(job.rung, job.problem, job.config, outcome))
        elif failure := outcome.failure if outcome else job.failure:
            wrong.setdefault(key, []).append(_failure(operation, replace(job, failure=failure), outcome))
    verified = []
    for key, group in right.items():
        bad = wrong.pop(key, [])
        note = f"{len(bad)} of {len(bad) + len(group)} configs failed, the first: " if bad else ""
        verified += [replace(one, note=note + bad[0].failure if bad else "") for one in group]
    return [records[0] for records in wrong.values()], verified


def _failure(
    operation: Operation[Any], job: verification.VerificationJob, outcome: verification.Outcome | None = None
) -> Record:
    return replace(
        blank_record(operation, job.problem, "escalade", job.rung.name),
        config=job.config.as_dict() if job.config else {},
        error=outcome.error if outcome else None,
        tolerance=outcome.tolerance if outcome else None,
        predicted_gain=job.rung.predicted_gain,
        failure=job.failure,
    )
