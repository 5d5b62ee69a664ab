"""Measure problems into a table, or a sweep of random problems into a file, for `escalade tune`."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from escalade import models, ops
from escalade.commands.progress import progress_bar
from escalade.commands.selection import check_names, require_gpu
from escalade.device.cuda import architecture
from escalade.device.precompilation import precompile
from escalade.device.program import Program
from escalade.engine.capture.export import capture
from escalade.engine.graph.forms import InputFormat, require_dtype
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import for_batch, optimize
from escalade.engine.plan.planner import make_plan
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.problem import Problem
from escalade.ops.choose.table import Entry, add, key_of, read
from escalade.terminal_text import counted
from escalade.tune import judgement, search
from escalade.tune import samples as store
from escalade.tune import sweep as sweeping
from escalade_bench.ladder import free

Wanted = dict[str, tuple[str, Any]]
"""Operation and problem by key."""
SWEPT = "conv2d"
NEEDS_GPU = "tuning needs a GPU"
COMPILE_GROUP = 16
"""Problems whose kernels are compiled together, while the previous group is measured."""


def fill(path: pathlib.Path, wanted: Wanted, device: torch.device, again: bool) -> None:
    """Measure the problems that the table does not have yet. Every entry is saved immediately."""
    table = read(path, "your table")
    missing = {key: value for key, value in wanted.items() if again or key not in table.entries}
    console = Console(stderr=True)
    found = 0

    def measure(key: str, operation: str, problem: Problem) -> None:
        nonlocal table, found
        entry = _measured(operation, problem, device, console, key)
        if entry is not None:
            table = add(path, key, entry)
            found += 1

    _measure_all(missing, device, console, measure)
    console.print(f"{path}: {counted(len(table.entries), 'problem')}, {len(missing)} of them in this run")
    if missing and not found:
        raise UnsupportedError(
            f"none of the {len(missing)} problems could be measured; the reasons are above"
        )


def problems_of(graph: Graph, dtype: str, batch: int) -> list[tuple[str, Problem]]:
    """Return the operation and problem of every kernel step in the plan of a captured network."""
    concrete = for_batch(optimize(graph, dtype), dtype, batch)
    formats = {
        each.name: InputFormat(getattr(torch, each.dtype), "nchw" if len(each.shape) == 4 else "flat")
        for each in graph.inputs
    }
    plan = make_plan(concrete, dtype, torch.device("cpu"), formats)
    return [(step.lowered.operation.name, step.lowered.problem) for step in plan.steps if step.lowered]


def sweep_into(path: pathlib.Path, count: int, seed: int) -> None:
    """Time every candidate of random problems, skipping problems that the file already has."""
    device = require_gpu(NEEDS_GPU)
    existing = store.resume(path)
    wanted: Wanted = {key_of(SWEPT, p): (SWEPT, p) for p in sweeping.problems(count, seed)}
    missing = {key: value for key, value in wanted.items() if key not in existing}
    console = Console(stderr=True)

    def measure(key: str, operation: str, problem: Problem) -> None:
        try:
            store.append(path, search.samples(ops.operation(operation), problem, device))
        except RuntimeError as error:  # PyTorch's: out of memory, or cuDNN does not support the problem
            console.print(f"{key}: not measured: {str(error).splitlines()[0]}")

    _measure_all(missing, device, console, measure)
    console.print(f"{path}: {counted(len(wanted), 'problem')}, {len(missing)} of them in this run")


def choices_hold(path: pathlib.Path, console: Console) -> bool:
    """Return True if every choice was measured and none takes more than twice as long as the best. Needs no GPU."""
    swept = store.load(path)
    if not swept:
        raise UnsupportedError(
            f"{path} has no measured problems; fill it with `escalade tune --sweep 300 --out {path}`"
        )
    return judgement.show(judgement.judge(swept), judgement.calibrations(swept), console)


def check_request(
    names: Sequence[str], problems: Sequence[str], dtypes: Sequence[str], layouts: Sequence[str]
) -> None:
    """Raise UnsupportedError for invalid names before anything is measured."""
    if not problems:
        if not names:
            raise UnsupportedError(f"name a network to tune: {', '.join(models.NAMES)}")
        for dtype in dtypes:
            require_dtype(dtype)
        return
    if len(names) != 1:
        raise UnsupportedError(
            f"--problem needs one operation, as in `escalade tune conv2d --problem …`; {len(names)} were passed"
        )
    operation = ops.operation(names[0])
    check_names(f"{operation.name} with dtype", dtypes, operation.dtypes)
    check_names(f"{operation.name} with layout", layouts, operation.layouts)


def steps_of_networks(names: Sequence[str], dtypes: Sequence[str], batches: Sequence[int]) -> Wanted:
    wanted: Wanted = {}
    for name in names:
        model, example = models.model(name)
        graph = capture(model, (example,))
        for dtype, batch in itertools.product(dtypes, batches):
            for operation, problem in problems_of(graph, dtype, batch):
                wanted[key_of(operation, problem)] = operation, problem
    return wanted


def named_problems(
    name: str, problems: Sequence[str], dtypes: Sequence[str], layouts: Sequence[str]
) -> Wanted:
    operation = ops.operation(name)
    wanted: Wanted = {}
    for text, dtype, layout in itertools.product(problems, dtypes, layouts):
        problem = replace(operation.parse(text), dtype=dtype, layout=layout)
        wanted[key_of(name, problem)] = name, problem
    return wanted


def _measure_all(
    wanted: Wanted, device: torch.device, console: Console, measure: Callable[[str, str, Problem], None]
) -> None:
    """Measure problem by problem while the kernels of the next group are compiled in parallel."""
    card, arch = Card.of(device), architecture(device.index)
    items = list(wanted.items())
    groups = [items[first : first + COMPILE_GROUP] for first in range(0, len(items), COMPILE_GROUP)]
    with (
        progress_bar(console, transient=False, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(1) as ahead,
    ):
        compiling = progress.add_task("compiling", total=0)
        measuring = progress.add_task("measuring", total=len(items))

        def compile(group: Sequence[tuple[str, tuple[str, Any]]]) -> None:
            programs: dict[Program, None] = {}
            for _, (operation, problem) in group:
                programs |= dict.fromkeys(search.programs(ops.operation(operation), (problem,), card))
            progress.update(compiling, total=(progress.tasks[compiling].total or 0) + len(programs))
            precompile(list(programs), arch, done=lambda program: progress.advance(compiling))

        compiled: list[Future[None]] = [ahead.submit(compile, group) for group in groups]
        try:
            for group, ready in zip(groups, compiled, strict=True):
                ready.result()
                for key, (operation, problem) in group:
                    measure(key, operation, problem)
                    free(device)
                    progress.advance(measuring)
        finally:
            ahead.shutdown(wait=False, cancel_futures=True)


def _measured(
    operation: str, problem: Problem, device: torch.device, console: Console, key: str
) -> Entry | None:
    try:
        entry = search.fastest(ops.operation(operation), problem, device)
    except (UnsupportedError, torch.OutOfMemoryError) as error:
        console.print(f"{key}: not measured: {error}")
        return None
    console.print(f"{key}: {entry.rung} {entry.median_us:.2f} µs")
    return entry
