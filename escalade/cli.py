"""The command line. Each command gathers its options; what they do is in `bench`, `report` and `doctor`."""

from __future__ import annotations

import pathlib
import sys
from enum import StrEnum
from typing import Annotated

import typer

from escalade.errors import EscaladeError

app = typer.Typer(
    name="escalade",
    help="Convolutional-network kernels for NVIDIA GPUs, as ladders: every rung verified, then timed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class Device(StrEnum):
    cuda = "cuda"
    twin = "twin"


Operation = Annotated[str, typer.Argument(help="The operation, such as conv2d.", show_default=False)]
Problems = Annotated[
    list[str] | None,
    typer.Option("--problem", "-p", help="A problem such as 64to64_56_k3s1_b256; may be repeated."),
]
Rungs = Annotated[list[str] | None, typer.Option("--rung", "-r", help="Only this rung; may be repeated.")]
Dtypes = Annotated[
    list[str] | None, typer.Option("--dtype", "-t", help="fp32, tf32, fp16 or bf16; may be repeated.")
]
Layouts = Annotated[list[str] | None, typer.Option("--layout", "-l", help="nchw or nhwc; may be repeated.")]
Where = Annotated[
    Device | None,
    typer.Option(
        help="cuda, or twin: the kernels on the CPU. Without it: cuda if there is a GPU.", show_default=False
    ),
]


def _version(asked: bool) -> None:
    if asked:
        from escalade import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say it.")
    ] = False,
) -> None: ...


@app.command()
def doctor() -> None:
    """What is here: GPU, driver, compilers, versions, caches; what will and will not work, and what to do about it."""
    from escalade.doctor import examine, show

    raise typer.Exit(show(examine()))


@app.command()
def ladder(
    operation: Operation,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    device: Where = None,
    tune: Annotated[bool, typer.Option(help="Time every config of every rung, and keep the best.")] = False,
    ablate: Annotated[
        bool, typer.Option(help="Also time the rungs that offer it with one idea off at a time.")
    ] = False,
    crossover: Annotated[
        bool, typer.Option(help="Measure the sweep over filter sizes instead of the usual problems.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to measure each rung.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the records to this file too.")] = None,
    results: Annotated[
        pathlib.Path | None,
        typer.Option(help="File the records under this folder, as FOLDER/<gpu>/<workload>.jsonl."),
    ] = None,
) -> None:
    """The rungs of an operation, verified and then timed beside PyTorch and the card's ceilings."""
    from escalade.bench import commands

    options = commands.LadderOptions(
        operation, tuple(problem or ()), tuple(rung or ()), tuple(dtype or ()), tuple(layout or ()),
        device, tune, ablate, crossover, seconds, seed, json, results,
    )  # fmt: skip
    raise typer.Exit(commands.ladder(options))


@app.command()
def verify(
    operation: Annotated[
        str | None, typer.Argument(help="Without it: all operations.", show_default=False)
    ] = None,
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    device: Where = None,
    all_configs: Annotated[
        bool, typer.Option(help="Every config of every rung, not only the default.")
    ] = False,
    checks: Annotated[
        bool, typer.Option(help="On the twin: check every memory access, races and overruns.")
    ] = False,
    order: Annotated[int, typer.Option(help="On the twin: shuffle threads and blocks by this seed.")] = 0,
    late: Annotated[
        bool, typer.Option(help="On the twin: asynchronous operations as late as allowed.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the random inputs; a fresh one each time without it.", show_default=False),
    ] = None,
) -> None:
    """Every rung on every problem against the float64 reference. Fails if any result is wrong."""
    from escalade.bench import commands

    options = commands.VerifyOptions(
        operation, tuple(problem or ()), tuple(rung or ()), tuple(dtype or ()), tuple(layout or ()),
        device, all_configs, checks, order, late, seed,
    )  # fmt: skip
    raise typer.Exit(commands.verify(options))


@app.command()
def precompile(
    operation: Operation,
    arch: Annotated[str, typer.Option(help="The GPU architecture; an H100 or H200 is sm_90a.")] = "sm_90a",
    problem: Problems = None,
    rung: Rungs = None,
    dtype: Dtypes = None,
    layout: Layouts = None,
    tune: Annotated[bool, typer.Option(help="Every config, as `ladder --tune` needs them.")] = False,
    workers: Annotated[
        int | None, typer.Option(help="Processes; one a core without it.", show_default=False, min=1)
    ] = None,
) -> None:
    """Compile the kernels of an operation into the cache, in parallel. Needs no GPU."""
    from escalade.bench import commands

    which = commands.Which(
        operation, tuple(problem or ()), tuple(rung or ()), tuple(dtype or ()), tuple(layout or ())
    )
    raise typer.Exit(commands.precompile(which, arch, tune, workers))


@app.command()
def tables(
    check: Annotated[bool, typer.Option(help="Change nothing; fail if a table is out of date.")] = False,
    results: Annotated[pathlib.Path, typer.Option(help="Where the records are.")] = pathlib.Path("results"),
    root: Annotated[pathlib.Path, typer.Option(help="The folder of README.md and docs.")] = pathlib.Path("."),
) -> None:
    """The tables of README.md and docs/ladder.md, and the ladder plot, from the records in results/."""
    from escalade.report import tables as generated

    if check:
        stale = generated.stale(results, root)
        for path in stale:
            typer.echo(f"{path} is not what results/ says; run: escalade tables")
        raise typer.Exit(1 if stale else 0)
    for path in generated.write(results, root):
        typer.echo(f"wrote {path}")


def main() -> None:
    """The entry point: an error that Escalade raises on purpose is one sentence, not a traceback."""
    try:
        app()
    except EscaladeError as error:
        typer.echo(f"escalade: {error}", err=True)
        sys.exit(1)
