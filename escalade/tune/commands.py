"""What the command `tune` does: the problems of networks' plans, measured into a table."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from escalade import models
from escalade.device.cuda import architecture
from escalade.device.precompile import precompile
from escalade.engine.capture import capture
from escalade.engine.forms import InputFormat
from escalade.engine.graph import Graph
from escalade.engine.passes import optimise
from escalade.engine.plan import make_plan
from escalade.errors import UnsupportedError
from escalade.ops.ladder import Problem
from escalade.tune import search
from escalade.tune.table import Table, key_of, read, user_path


def problems_of(graph: Graph, dtype: str, batch: int) -> list[tuple[str, Problem]]:
    """What the plan of a captured network asks of the ladders."""
    concrete = optimise(graph, dtype).at(batch)
    formats = {
        given.name: InputFormat(getattr(torch, given.dtype), "nchw" if len(given.shape) == 4 else "flat")
        for given in graph.inputs
    }
    plan = make_plan(concrete, dtype, torch.device("cpu"), formats)
    return [(step.lowered.operation, step.lowered.problem) for step in plan.steps if step.lowered]


def tune(
    names: Sequence[str],
    dtypes: Sequence[str],
    batches: Sequence[int],
    path: pathlib.Path | None,
    again: bool,
) -> int:
    """Measures what the table does not have yet; every entry is saved when it is found."""
    if not torch.cuda.is_available():
        raise UnsupportedError("tuning measures kernels, and there is no GPU here")
    device = torch.device("cuda", torch.cuda.current_device())
    path = path or user_path(torch.cuda.get_device_name(device))
    table = read(path, "your table")
    wanted: dict[str, tuple[str, Any]] = {}
    for name in names:
        model, example = models.model(name)
        graph = capture(model, (example,))
        for dtype, batch in itertools.product(dtypes, batches):
            for operation, problem in problems_of(graph, dtype, batch):
                wanted[key_of(operation, problem)] = operation, problem
    missing = {key: value for key, value in wanted.items() if again or key not in table.entries}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        here = architecture(device.index)
        programs = list(
            dict.fromkeys(
                program
                for operation, problem in missing.values()
                for program in search.programs(operation, (problem,), here)
            )
        )
        compiling = progress.add_task("compiling", total=len(programs))
        precompile(programs, here, done=lambda program: progress.advance(compiling))
        measuring = progress.add_task("measuring", total=len(missing))
        for key, (operation, problem) in missing.items():
            table = _measured(table, operation, problem, device, console, key)
            table.save(path)
            progress.advance(measuring)
    console.print(f"{path}: {len(table.entries)} problems, {len(missing)} of them new")
    return 0


def _measured(
    table: Table, operation: str, problem: Problem, device: torch.device, console: Console, key: str
) -> Table:
    try:
        entry = search.fastest(operation, problem, device)
    except (UnsupportedError, torch.OutOfMemoryError) as error:
        console.print(f"{key}: not measured: {error}")
        return table
    console.print(f"{key}: {entry.rung} {entry.median_us:.2f} µs")
    return table.with_entry(operation, problem, entry)
