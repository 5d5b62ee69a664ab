"""Units of the ladders: every problem in every dtype, rungs with one idea off, and the sweep over filter sizes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from escalade import ops
from escalade.bench.campaign.units import SECONDS_EACH, Say, Session, Unit
from escalade.bench.ladder import ablate, ablations, climb
from escalade.bench.trial import Settings
from escalade.device.program import Program
from escalade.measure import verification
from escalade.measure.records import Record
from escalade.ops.base.card import Card
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Rung

FEATURED = ("64to64_56_k3s1_b256",)
"""Problems that are worth as much as the first of a ladder: the docs' climb is over this one."""
_WORTH = {"fp16": 1.0, "fp32": 0.8, "tf32": 0.5, "fp8": 0.4, "bf16": 0.3}
_FIRST, _FURTHER = 10.0, 2.0
_COMPILED = ("fp16", "fp32")
_LEFT_TO_PYTORCH = ("conv2d_input_gradient", "conv2d_weight_gradient")
"""Operations whose kernels torch.compile does not make itself."""
_START_SECONDS, _RUNG_SECONDS = 1.5, 0.12
_COMPILE_SECONDS, _CONVOLUTION_SECONDS = 5.0, 20.0
_SLOW_SECONDS = 70.0
"""Seconds for 10^12 operations: the foot of a ladder does them in one, and is called dozens of times."""


def units() -> Iterator[Unit]:
    """Every unit of every ladder."""
    for operation in ops.OPERATIONS.values():
        for number, problem in enumerate(operation.problems):
            first = number == 0 or problem.name in FEATURED
            for dtype in operation.dtypes:
                yield _ladder(operation, problem, dtype, first)
        yield from _ablations(operation)
        for problem in operation.crossover:
            for dtype in operation.dtypes:
                yield _crossover(operation, problem, dtype, _WORTH[dtype] * _FURTHER)


def _ladder(operation: Operation[Any], problem: Any, dtype: str, first: bool) -> Unit:
    """A problem beside PyTorch's operator; the first of a ladder also beside its compiler, which takes seconds."""
    compiled = first and dtype in _COMPILED and operation.name not in _LEFT_TO_PYTORCH
    compiling = _CONVOLUTION_SECONDS if operation.name == "conv2d" else _COMPILE_SECONDS
    return Unit(
        f"ladder/{operation.name}/{problem.name}/{dtype}",
        f"every rung of {operation.name} beside PyTorch" + (" and torch.compile" if compiled else ""),
        _command(operation, problem, dtype, *(("--compiled",) if compiled else ())),
        _predicted(operation, problem, list(operation.ladder)) + (compiling if compiled else 0.0),
        _WORTH[dtype] * (_FIRST if first else _FURTHER) * (2.0 if compiled else 1.0),
        partial(_climb, operation, problem, dtype, compiled),
        (*_rungs(operation.ladder), compiled),
        programs=partial(_programs, operation, problem, dtype),
    )


def _ablations(operation: Operation[Any]) -> Iterator[Unit]:
    variants = [rung for group in ablations(operation).values() for rung in group.values()]
    featured = [problem for problem in operation.problems if problem.name in FEATURED]
    for problem in (featured or operation.problems[:1]) if variants else ():
        for dtype in operation.dtypes:
            yield Unit(
                f"ablation/{operation.name}/{problem.name}/{dtype}",
                f"rungs of {operation.name} with one idea off at a time",
                _command(operation, problem, dtype, "--ablate"),
                _predicted(operation, problem, variants),
                _WORTH[dtype] * _FIRST,
                partial(_ablate, operation, problem, dtype),
                _rungs(variants),
                programs=partial(_variant_programs, variants, operation, problem, dtype),
            )


def _crossover(operation: Operation[Any], problem: Any, dtype: str, value: float) -> Unit:
    return Unit(
        f"crossover/{operation.name}/{problem.name}/{dtype}",
        f"which algorithm of {operation.name} wins as the filter grows",
        _command(operation, problem, dtype, "--crossover"),
        _predicted(operation, problem, list(operation.ladder)),
        value,
        partial(_sweep, operation, problem, dtype),
        _rungs(operation.ladder),
        programs=partial(_programs, operation, problem, dtype),
    )


def _command(operation: Operation[Any], problem: Any, dtype: str, *more: str) -> str:
    asked = ("-p", problem.name, "-t", dtype, *more, "--seconds", str(SECONDS_EACH))
    return shlex.join(("escalade", "ladder", operation.name, *asked))


def _rungs(rungs: Any) -> tuple[object, ...]:
    return tuple(rung.name for rung in rungs)


def _predicted(operation: Operation[Any], problem: Any, rungs: Sequence[Rung[Any]]) -> float:
    subjects = len(rungs) * len(operation.layouts)
    return _START_SECONDS + _RUNG_SECONDS * subjects + _SLOW_SECONDS * problem.flops / 1e12


def _settings(session: Session, dtype: str) -> Settings:
    return Settings((dtype,), seed=session.seed, seconds_each=session.seconds)


def _climb(
    operation: Operation[Any], problem: Any, dtype: str, compiled: bool, session: Session, say: Say
) -> Iterator[list[Record]]:
    settings = replace(_settings(session, dtype), compiled=compiled)
    yield climb(operation, problem, session.device, settings, session.ceilings, say)


def _ablate(
    operation: Operation[Any], problem: Any, dtype: str, session: Session, say: Say
) -> Iterator[list[Record]]:
    yield ablate(operation, problem, session.device, _settings(session, dtype), session.ceilings, say)


def _sweep(
    operation: Operation[Any], problem: Any, dtype: str, session: Session, say: Say
) -> Iterator[list[Record]]:
    for found in _climb(operation, problem, dtype, False, session, say):
        yield [replace(record, workload=f"{operation.name}_crossover") for record in found]


def _programs(operation: Operation[Any], problem: Any, dtype: str, device: torch.device) -> Sequence[Program]:
    return verification.programs(verification.jobs(operation, device, problems=[problem], dtypes=[dtype]))


def _variant_programs(
    variants: Sequence[Rung[Any]], operation: Operation[Any], problem: Any, dtype: str, device: torch.device
) -> Sequence[Program]:
    planned = [
        job
        for layout in operation.layouts
        for rung in variants
        for job in verification.rung_jobs(rung, replace(problem, dtype=dtype, layout=layout), Card.of(device))
    ]
    return verification.programs(planned)
