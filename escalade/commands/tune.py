"""What the command `tune` does: problems measured into a table, or a whole sweep into a file to judge choices by."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from escalade import models, ops
from escalade.bench.ladder import free
from escalade.device.cuda import architecture
from escalade.device.precompile import precompile
from escalade.device.program import Program
from escalade.engine.capture.export import capture
from escalade.engine.graph.forms import InputFormat, require_dtype
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import for_batch, optimise
from escalade.engine.plan.plan import make_plan
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.problem import Problem
from escalade.ops.choose.table import Entry, add, key_of, read, user_path
from escalade.tune import judge as judging
from escalade.tune import samples as store
from escalade.tune import search, sweep

Wanted = dict[str, tuple[str, Any]]
"""Operation and problem, by key."""
SWEPT = "conv2d"
TOGETHER = 16
"""Problems whose kernels are compiled at once, while those before are measured."""


def problems_of(graph: Graph, dtype: str, batch: int) -> list[tuple[str, Problem]]:
    """What the plan of a captured network asks of the ladders."""
    concrete = for_batch(optimise(graph, dtype), dtype, batch)
    formats = {
        given.name: InputFormat(getattr(torch, given.dtype), "nchw" if len(given.shape) == 4 else "flat")
        for given in graph.inputs
    }
    plan = make_plan(concrete, dtype, torch.device("cpu"), formats)
    return [(step.lowered.operation, step.lowered.problem) for step in plan.steps if step.lowered]


@dataclass(frozen=True)
class TuneOptions:
    names: tuple[str, ...]
    """Networks; or, with problems, the operation that they are of."""
    problems: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("fp16",)
    layouts: tuple[str, ...] = ("nhwc",)
    batches: tuple[int, ...] = (1,)
    """Of networks; problems have theirs in the name."""
    table: pathlib.Path | None = None
    again: bool = False


def tune(options: TuneOptions) -> int:
    """Measures what the table does not have yet; every entry is saved when it is found."""
    _check(options)
    device = _gpu()
    wanted = _of_problems(options) if options.problems else _of_networks(options)
    if not wanted:
        names = ", ".join(options.names)
        raise UnsupportedError(f"{names} asks nothing of the ladders: there is nothing to tune")
    path = options.table or user_path(torch.cuda.get_device_name(device))
    table = read(path, "your table")
    missing = {key: value for key, value in wanted.items() if options.again or key not in table.entries}
    console = Console(stderr=True)
    found = 0

    def measure(key: str, operation: str, problem: Problem) -> None:
        nonlocal table, found
        entry = _measured(operation, problem, device, console, key)
        if entry is not None:
            table = add(path, key, entry)
            found += 1

    _go_through(missing, device, console, measure)
    console.print(f"{path}: {len(table.entries)} problems, {len(missing)} of them asked for now")
    if missing and not found:
        raise UnsupportedError("none of what was asked for could be measured, so nothing was tuned")
    return 0


def sweep_into(path: pathlib.Path, count: int, seed: int) -> int:
    """Every candidate of random problems, timed; problems that the file has already are not measured again."""
    device = _gpu()
    there = store.resume(path)
    wanted: Wanted = {key_of(SWEPT, p): (SWEPT, p) for p in sweep.problems(count, seed)}
    missing = {key: value for key, value in wanted.items() if key not in there}
    console = Console(stderr=True)

    def measure(key: str, operation: str, problem: Problem) -> None:
        try:
            store.append(path, search.samples(operation, problem, device))
        except RuntimeError as error:  # PyTorch's: no memory, or nothing of cuDNN's to compare with
            console.print(f"{key}: not measured: {str(error).splitlines()[0]}")

    _go_through(missing, device, console, measure)
    console.print(f"{path}: {len(wanted)} problems, {len(missing)} of them asked for now")
    return 0


def judge(path: pathlib.Path, console: Console | None = None) -> int:
    """Needs no GPU. 1 if any choice takes more than twice as long as the best, or was not measured."""
    swept = store.load(path)
    if not swept:
        raise UnsupportedError(
            f"{path} has no measured problems; `escalade tune --sweep 300 --out {path}` fills it"
        )
    return judging.show(judging.judge(swept), judging.calibrations(swept), console or Console())


def _gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise UnsupportedError("tuning measures kernels, and there is no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


def _check(options: TuneOptions) -> None:
    """What can be said of the names before anything is measured."""
    if not options.problems:
        if not options.names:
            raise UnsupportedError(
                f"nothing to tune is named; there are the networks {', '.join(models.NAMES)}"
            )
        for dtype in options.dtypes:
            require_dtype(dtype)
        return
    if len(options.names) != 1:
        raise UnsupportedError(
            f"problems are of one operation, as in `escalade tune conv2d --problem …`; {len(options.names)} are named"
        )
    operation = ops.operation(options.names[0])
    known = {"dtype": (options.dtypes, operation.dtypes), "layout": (options.layouts, operation.layouts)}
    for what, (given, there) in known.items():
        for one in given:
            if one not in there:
                raise UnsupportedError(f"{operation.name} has no {what} {one!r}; it has {', '.join(there)}")


def _of_networks(options: TuneOptions) -> Wanted:
    wanted: Wanted = {}
    for name in options.names:
        model, example = models.model(name)
        graph = capture(model, (example,))
        for dtype, batch in itertools.product(options.dtypes, options.batches):
            for operation, problem in problems_of(graph, dtype, batch):
                wanted[key_of(operation, problem)] = operation, problem
    return wanted


def _of_problems(options: TuneOptions) -> Wanted:
    (name,) = options.names
    operation = ops.operation(name)
    wanted: Wanted = {}
    for text, dtype, layout in itertools.product(options.problems, options.dtypes, options.layouts):
        problem = replace(operation.parse(text), dtype=dtype, layout=layout)
        wanted[key_of(name, problem)] = name, problem
    return wanted


def _go_through(
    wanted: Wanted, device: torch.device, console: Console, measure: Callable[[str, str, Problem], None]
) -> None:
    """With progress. The kernels of the next problems are compiled in parallel while the last ones are measured."""
    card, here = Card.of(device), architecture(device.index)
    items = list(wanted.items())
    groups = [items[first : first + TOGETHER] for first in range(0, len(items), TOGETHER)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ThreadPoolExecutor(1) as ahead,
    ):
        compiling = progress.add_task("compiling", total=0)
        measuring = progress.add_task("measuring", total=len(items))

        def compile(group: Sequence[tuple[str, tuple[str, Any]]]) -> None:
            programs: dict[Program, None] = {}
            for _, (operation, problem) in group:
                programs |= dict.fromkeys(search.programs(operation, (problem,), card))
            progress.update(compiling, total=(progress.tasks[compiling].total or 0) + len(programs))
            precompile(list(programs), here, done=lambda program: progress.advance(compiling))

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
        entry = search.fastest(operation, problem, device)
    except (UnsupportedError, torch.OutOfMemoryError) as error:
        console.print(f"{key}: not measured: {error}")
        return None
    console.print(f"{key}: {entry.rung} {entry.median_us:.2f} µs")
    return entry
