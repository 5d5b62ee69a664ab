"""The command `tune`: problems measured into a table, or a whole sweep into a file to judge choices by."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from escalade import models, ops
from escalade.commands.options import Dtypes, Layouts, Problems, count, listed, numbers, seed_option, written
from escalade.commands.progress import progress_bar
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
from escalade.ops.choose.table import Entry, add, key_of, read, user_path
from escalade.tune import judgement, search
from escalade.tune import samples as store
from escalade.tune import sweep as sweeping
from escalade_bench.ladder import free

Wanted = dict[str, tuple[str, Any]]
"""The operation and problem of each key."""
SWEPT = "conv2d"
TOGETHER = 16
"""Problems whose kernels are compiled at once, while those before are measured."""


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Networks of escalade.models, such as resnet18; with --problem, the operation that it is of.",
            show_default=False,
        ),
    ] = None,
    problem: Problems = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    batch: Annotated[str, typer.Option(help="Batch sizes of networks, separated by commas.")] = "1,8,32,256",
    table: Annotated[
        pathlib.Path | None,
        written("--table", help="The table to fill; yours for this GPU without it.", show_default=False),
    ] = None,
    again: Annotated[bool, typer.Option(help="Measure anew what the table already has.")] = False,
    sweep: Annotated[
        int | None,
        count(
            "--sweep",
            help="Instead: time every candidate of so many random convolutions into the file --out, which is "
            "gone on with if it is there.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, seed_option("Of the random convolutions.")] = 0,
    judge: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Instead: how the choices that need no measurement compare with the best of such a file. Fails if any "
            "takes more than twice as long. Needs no GPU.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None,
        written("--out", help="Where --sweep writes; sweep.jsonl without it.", show_default=False),
    ] = None,
) -> None:
    """Measure every rung and config for the steps of networks, or for problems, and remember the fastest.

    Entries are saved as they are found: a run that is stopped goes on where it was when it is started again.
    """
    instead = sum((sweep is not None, judge is not None))
    if instead > 1 or (instead and (names or problem)):
        raise typer.BadParameter("--sweep, --judge and what is to be tuned exclude each other")
    if judge is not None:
        if not choices_hold(judge, Console()):
            raise typer.Exit(1)
    elif sweep is not None:
        sweep_into(out or pathlib.Path("sweep.jsonl"), sweep, seed)
    else:
        batches = numbers("--batch", listed([batch]))
        dtypes, layouts = tuple(dtype or ("fp16",)), tuple(layout or ("nhwc",))
        named, problems = tuple(names or ()), tuple(problem or ())
        _check(named, problems, dtypes, layouts)
        device = _require_gpu()
        wanted = (
            _of_problems(named[0], problems, dtypes, layouts)
            if problems
            else _of_networks(named, dtypes, batches)
        )
        if not wanted:
            raise UnsupportedError(
                f"{', '.join(named)} asks nothing of the ladders: there is nothing to tune"
            )
        fill(table or user_path(torch.cuda.get_device_name(device)), wanted, device, again)


def fill(path: pathlib.Path, wanted: Wanted, device: torch.device, again: bool) -> None:
    """Measures what the table does not have yet; every entry is saved when it is found."""
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

    _go_through(missing, device, console, measure)
    console.print(f"{path}: {len(table.entries)} problems, {len(missing)} of them asked for now")
    if missing and not found:
        raise UnsupportedError("none of what was asked for could be measured, so nothing was tuned")


def problems_of(graph: Graph, dtype: str, batch: int) -> list[tuple[str, Problem]]:
    """What the plan of a captured network asks of the ladders."""
    concrete = for_batch(optimize(graph, dtype), dtype, batch)
    formats = {
        given.name: InputFormat(getattr(torch, given.dtype), "nchw" if len(given.shape) == 4 else "flat")
        for given in graph.inputs
    }
    plan = make_plan(concrete, dtype, torch.device("cpu"), formats)
    return [(step.lowered.operation.name, step.lowered.problem) for step in plan.steps if step.lowered]


def sweep_into(path: pathlib.Path, count: int, seed: int) -> None:
    """Times every candidate of random problems; problems that the file has already are not measured again."""
    device = _require_gpu()
    there = store.resume(path)
    wanted: Wanted = {key_of(SWEPT, p): (SWEPT, p) for p in sweeping.problems(count, seed)}
    missing = {key: value for key, value in wanted.items() if key not in there}
    console = Console(stderr=True)

    def measure(key: str, operation: str, problem: Problem) -> None:
        try:
            store.append(path, search.samples(ops.operation(operation), problem, device))
        except RuntimeError as error:  # PyTorch's: no memory, or nothing of cuDNN's to compare with
            console.print(f"{key}: not measured: {str(error).splitlines()[0]}")

    _go_through(missing, device, console, measure)
    console.print(f"{path}: {len(wanted)} problems, {len(missing)} of them asked for now")


def choices_hold(path: pathlib.Path, console: Console) -> bool:
    """Whether no choice was left unmeasured or takes more than twice as long as the best. Needs no GPU."""
    swept = store.load(path)
    if not swept:
        raise UnsupportedError(
            f"{path} has no measured problems; `escalade tune --sweep 300 --out {path}` fills it"
        )
    return judgement.show(judgement.judge(swept), judgement.calibrations(swept), console) == 0


def _require_gpu() -> torch.device:
    if not torch.cuda.is_available():
        raise UnsupportedError("tuning measures kernels, and there is no GPU here")
    return torch.device("cuda", torch.cuda.current_device())


def _check(
    names: Sequence[str], problems: Sequence[str], dtypes: Sequence[str], layouts: Sequence[str]
) -> None:
    """Refuses names that are wrong before anything is measured."""
    if not problems:
        if not names:
            raise UnsupportedError(
                f"nothing to tune is named; there are the networks {', '.join(models.NAMES)}"
            )
        for dtype in dtypes:
            require_dtype(dtype)
        return
    if len(names) != 1:
        raise UnsupportedError(
            f"problems are of one operation, as in `escalade tune conv2d --problem …`; {len(names)} are named"
        )
    operation = ops.operation(names[0])
    known = {"dtype": (dtypes, operation.dtypes), "layout": (layouts, operation.layouts)}
    for what, (given, there) in known.items():
        for one in given:
            if one not in there:
                raise UnsupportedError(f"{operation.name} has no {what} {one!r}; it has {', '.join(there)}")


def _of_networks(names: Sequence[str], dtypes: Sequence[str], batches: Sequence[int]) -> Wanted:
    """What the plans of networks ask of the ladders."""
    wanted: Wanted = {}
    for name in names:
        model, example = models.model(name)
        graph = capture(model, (example,))
        for dtype, batch in itertools.product(dtypes, batches):
            for operation, problem in problems_of(graph, dtype, batch):
                wanted[key_of(operation, problem)] = operation, problem
    return wanted


def _of_problems(name: str, problems: Sequence[str], dtypes: Sequence[str], layouts: Sequence[str]) -> Wanted:
    operation = ops.operation(name)
    wanted: Wanted = {}
    for text, dtype, layout in itertools.product(problems, dtypes, layouts):
        problem = replace(operation.parse(text), dtype=dtype, layout=layout)
        wanted[key_of(name, problem)] = name, problem
    return wanted


def _go_through(
    wanted: Wanted, device: torch.device, console: Console, measure: Callable[[str, str, Problem], None]
) -> None:
    """Measures problem by problem; the kernels of the next ones are compiled in parallel meanwhile."""
    card, here = Card.of(device), architecture(device.index)
    items = list(wanted.items())
    groups = [items[first : first + TOGETHER] for first in range(0, len(items), TOGETHER)]
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
        entry = search.fastest(ops.operation(operation), problem, device)
    except (UnsupportedError, torch.OutOfMemoryError) as error:
        console.print(f"{key}: not measured: {error}")
        return None
    console.print(f"{key}: {entry.rung} {entry.median_us:.2f} µs")
    return entry
