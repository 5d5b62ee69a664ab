"""What the commands `ladder`, `verify` and `precompile` do, with progress on the terminal."""

from __future__ import annotations

import itertools
import pathlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from escalade import ops
from escalade.bench import ladder as climbing
from escalade.bench.trial import Settings
from escalade.device import precompile as compiling
from escalade.device.cuda import architecture
from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.measure import ceilings as card
from escalade.measure import records as store
from escalade.measure import verify as verifying
from escalade.ops.base.card import Card
from escalade.ops.base.cards import typical
from escalade.ops.base.rung import ALL_ARCHITECTURES
from escalade.report import terminal


@dataclass(frozen=True)
class Which:
    """A part of an operation's ladder; empty stands for all."""

    operation: str | None
    problems: tuple[str, ...] = ()
    rungs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()

    def parsed(self, operation: ops.Operation[Any]) -> tuple[Any, ...]:
        _check_names("dtype", self.dtypes, operation.dtypes)
        _check_names("layout", self.layouts, operation.layouts)
        for rung in self.rungs:
            operation.ladder.rung(rung)
        return tuple(operation.parse(name) for name in self.problems)

    def parsed_by(self, operations: Sequence[ops.Operation[Any]]) -> dict[str, tuple[Any, ...]]:
        """The problems, by the names of the operations that know every name; if none does, why the last does not."""
        found: dict[str, tuple[Any, ...]] = {}
        refusal: UnsupportedError | None = None
        for operation in operations:
            try:
                found[operation.name] = self.parsed(operation)
            except UnsupportedError as unknown:
                refusal = unknown
        if not found and refusal is not None:
            if len(operations) == 1:
                raise refusal
            raise UnsupportedError(f"no operation has all that is named; the last one says: {refusal}")
        return found

    def require_work(self, planned: Sequence[verifying.Job], what: str) -> None:
        """Something is left to do, and of everything that was named a part: what nobody ran is not right."""
        wanted = [job for job in planned if not job.refusal]
        kinds: dict[str, tuple[tuple[str, ...], Callable[[verifying.Job], str]]] = {
            "problem": (self.problems, lambda job: str(job.problem.name)),
            "rung": (self.rungs, lambda job: job.rung.name),
            "dtype": (self.dtypes, lambda job: str(job.problem.dtype)),
            "layout": (self.layouts, lambda job: str(job.problem.layout)),
        }
        for kind, (names, name_of) in kinds.items():
            if not names:
                continue
            done = {name_of(job) for job in wanted}
            for idle in dict.fromkeys(name_of(job) for job in planned):
                if idle not in done:
                    refusal = next(job.refusal for job in planned if name_of(job) == idle)
                    raise UnsupportedError(f"there is nothing to {what} for {kind} {idle}: {refusal}")
        if not wanted:
            refusal = planned[0].refusal if planned else "nothing that there is has been named"
            raise UnsupportedError(f"there is nothing to {what}: {refusal}")


@dataclass(frozen=True)
class LadderOptions(Which):
    device: str | None = None
    tune: bool = False
    ablate: bool = False
    crossover: bool = False
    seconds: float = 0.3
    seed: int = 0
    json: pathlib.Path | None = None
    results: pathlib.Path | None = None


@dataclass(frozen=True)
class VerifyOptions(Which):
    device: str | None = None
    all_configs: bool = False
    checks: bool = False
    order: int = 0
    late: bool = False
    seed: int | None = None


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise UnsupportedError(f"there is no {what} {name!r} here; there is {', '.join(known)}")


def chosen_device(name: str | None) -> torch.device:
    """`cuda` (the default where there is a GPU) or `twin`."""
    if name == "twin" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda needs an NVIDIA GPU that PyTorch can use, and there is none; `escalade doctor` says why, "
            "and --device twin runs the same kernels on the CPU"
        )
    return torch.device("cuda", torch.cuda.current_device())


def ladder(options: LadderOptions, console: Console | None = None) -> int:
    """0 if every rung that was tried is right."""
    console = console or Console()
    operation = ops.operation(options.operation or "")
    device = chosen_device(options.device)
    named = options.parsed(operation)
    problems = named or _ladder_problems(operation, device, options.crossover)
    dtypes = options.dtypes
    if device.type != "cuda":
        dtypes = dtypes or operation.dtypes[:1]  # g++ compiles every rung for every dtype first
        console.print(
            f"On the twin, in {', '.join(dtypes)}: results are checked, and wall-clock seconds of the CPU shown; "
            "[yellow]they are no speeds.[/]"
        )
    settings = Settings(
        dtypes,
        options.layouts,
        options.rungs,
        options.tune,
        seed=options.seed,
        seconds_each=options.seconds,
    )
    origin = store.provenance(device)
    ceilings = None
    failed = 0
    _compile_for_ladder(operation, problems, settings, device, options, console)
    if device.type == "cuda":
        console.print("Measuring the card's ceilings")
        ceilings = card.measure(device)
        console.print(terminal.ceilings_line(ceilings))
    for problem in problems:
        with status(console) as say:
            records = climbing.climb(operation, problem, device, settings, ceilings, say)
            if options.crossover:
                records = [replace(record, workload=f"{operation.name}_crossover") for record in records]
            if options.ablate:
                records += climbing.ablate(operation, problem, device, settings, ceilings, say)
        records = [record.stamped(origin) for record in records]
        failed += sum(bool(record.failure) and not record.is_peer for record in records)
        for table in terminal.ladder_tables(records, console.width):
            console.print(table)
        for record in records:
            if record.failure:
                kind = "[yellow]note:[/]" if record.is_peer else "[red]failed:[/]"
                console.print(f"{kind} {escape(terminal.failure(record))}")
            elif record.note and record.timing != "twin":
                console.print(f"[yellow]note:[/] {escape(terminal.remark(record))}")
        _save(records, options, console)
    if ceilings and options.results:
        store.file_away(options.results, [r.stamped(origin) for r in card.records(ceilings)])
    if failed:
        console.print(f"[red]{failed} failed; they were not timed.[/]")
    return 1 if failed else 0


def _ladder_problems(operation: Any, device: torch.device, crossover: bool) -> tuple[Any, ...]:
    if crossover:
        sweep = climbing.crossover(operation)
        if not sweep:
            raise UnsupportedError(f"{operation.name} has no crossover sweep; leave --crossover out")
        return sweep
    return tuple(operation.problems if device.type == "cuda" else operation.small_problems[:1])


def _save(records: list[store.Record], options: LadderOptions, console: Console) -> None:
    """After every problem, so that a run that is stopped keeps what it has."""
    if options.json:
        store.write(options.json, records)
    if options.results:
        for path in store.file_away(options.results, records):
            console.print(f"wrote {path}")


def _compile_for_ladder(
    operation: Any,
    problems: Sequence[Any],
    settings: Settings,
    device: torch.device,
    options: LadderOptions,
    console: Console,
) -> None:
    configs = "all" if settings.tune else "default"
    dtypes, layouts = settings.dtypes or operation.dtypes, settings.layouts or operation.layouts
    planned = verifying.jobs(
        operation,
        device,
        problems=problems,
        rungs=settings.rungs,
        dtypes=dtypes,
        layouts=layouts,
        configs=configs,
    )
    options.require_work(planned, "measure")
    if options.ablate:
        variants = [rung for group in climbing.ablations(operation).values() for rung in group.values()]
        for problem, dtype, layout, rung in itertools.product(problems, dtypes, layouts, variants):
            planned += verifying.rung_jobs(
                rung, replace(problem, dtype=dtype, layout=layout), Card.of(device), configs
            )
    _compile_for(planned, device, console)


def _compile_for(
    planned: Sequence[verifying.Job], device: torch.device, console: Console, checks: bool = False
) -> None:
    """In parallel, before the run. What does not compile is reported by the run, rung by rung."""
    if device.type == "cuda":
        _compile_all(planned, architecture(device.index or 0), None, console)
        return
    wanted = verifying.programs(planned)
    with _progress(console) as progress:
        task = progress.add_task("compiling for the twin", total=len(wanted))
        compiling.build_for_twin(wanted, checks, done=lambda program: progress.advance(task))


def precompile(
    which: Which, arch: str, tune: bool, workers: int | None, console: Console | None = None
) -> int:
    """0 if everything compiles."""
    console = console or Console()
    _check_names("architecture", (arch,), ALL_ARCHITECTURES)
    operation = ops.operation(which.operation or "")
    problems = which.parsed(operation) or (
        *operation.small_problems, *operation.problems, *climbing.crossover(operation),
    )  # fmt: skip
    planned = verifying.jobs(
        operation,
        torch.device("cpu"),
        problems=problems,
        rungs=which.rungs,
        dtypes=which.dtypes,
        layouts=which.layouts,
        configs="all" if tune else "default",
        card=typical(arch),
    )
    which.require_work(planned, "compile")
    failures = _compile_all(planned, arch, workers, console)
    for failure in failures:
        console.print(f"[red]refused:[/] {escape(failure.message)}")
    return 1 if failures else 0


def _compile_all(
    planned: Sequence[verifying.Job], arch: str, workers: int | None, console: Console
) -> list[compiling.Failure]:
    wanted = verifying.programs(planned)
    began = time.perf_counter()
    with _progress(console) as progress:
        task = progress.add_task(f"compiling for {arch}", total=len(wanted))
        failures = compiling.precompile(wanted, arch, workers, lambda program: progress.advance(task))
    seconds = time.perf_counter() - began
    console.print(
        f"{len(wanted) - len(failures)} of {len(wanted)} kernels compiled for {arch} in {seconds:.1f} s"
    )
    return failures


def verify(options: VerifyOptions, console: Console | None = None) -> int:
    """0 if nothing is wrong."""
    console = console or Console()
    device = chosen_device(options.device)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    twin = TwinOptions(Order(options.order, options.late), options.checks)
    chosen = [ops.operation(options.operation)] if options.operation else list(ops.OPERATIONS.values())
    work = {
        ops.operation(name): verifying.jobs(
            ops.operation(name),
            device,
            problems=problems or None,
            rungs=options.rungs,
            dtypes=options.dtypes,
            layouts=options.layouts,
            configs="all" if options.all_configs else "default",
        )
        for name, problems in options.parsed_by(chosen).items()
    }
    options.require_work([job for planned in work.values() for job in planned], "verify")
    failed = 0
    for operation, planned in work.items():
        _compile_for(planned, device, console, options.checks)
        outcomes = []
        with _progress(console) as progress:
            task = progress.add_task(f"verifying {operation.name}", total=len(planned))
            for outcome in verifying.run(operation, device, planned, seed, twin):
                outcomes.append(outcome)
                progress.update(task, advance=1, description=f"{operation.name} {outcome.rung}")
                if outcome.failed:
                    progress.console.print(f"[red]wrong:[/] {escape(f'{outcome.label}: {outcome.failure}')}")
        console.print(terminal.verify_table(operation, outcomes))
        failed += sum(outcome.failed for outcome in outcomes)
    console.print(f"seed {seed}: " + ("[red]" + f"{failed} wrong[/]" if failed else "[green]all right[/]"))
    return 1 if failed else 0


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


@contextmanager
def status(console: Console) -> Iterator[climbing.Say]:
    """One line that changes on a terminal, one line each in a log."""
    if not console.is_terminal:
        yield lambda text: console.print(escape(text))
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(text))
