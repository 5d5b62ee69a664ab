"""`escalade tune`: measure problems into a table, or a sweep of random problems into a file."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer
from rich.console import Console

from escalade.commands.options import Problems, count, dtypes_option, listed, numbers, seed_option, written
from escalade.errors import UnsupportedError


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Networks of escalade.models, such as resnet18; with --problem, its operation.",
            show_default=False,
        ),
    ] = None,
    problem: Problems = None,
    dtype: Annotated[list[str] | None, dtypes_option("fp16")] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option("--layout", "-l", help="nchw or nhwc; may be repeated.", show_default="nhwc"),
    ] = None,
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes of networks.")] = "1,8,32,256",
    table: Annotated[
        pathlib.Path | None,
        written("--table", help="Table to fill. Default: your own for this GPU.", show_default=False),
    ] = None,
    again: Annotated[bool, typer.Option(help="Also measure problems that the table already has.")] = False,
    sweep: Annotated[
        int | None,
        count(
            "--sweep",
            help="Instead: time every candidate of this many random convolutions into the file --out. An existing file "
            "is continued.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, seed_option("Seed of the random convolutions.")] = 0,
    judge: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Instead: compare the choices made without measuring with the best of such a file. Fails if any takes "
            "more than twice as long. Needs no GPU.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None,
        written("--out", help="File for --sweep. Default: sweep.jsonl.", show_default=False),
    ] = None,
) -> None:
    """Measure every rung and config for the steps of networks, or for given problems, and save the fastest.

    Entries are saved as they are found, so that an interrupted run can be continued by starting it again.
    """
    import torch

    from escalade.commands.selection import require_gpu
    from escalade.commands.tuning import (
        NEEDS_GPU,
        check_request,
        choices_hold,
        fill,
        named_problems,
        steps_of_networks,
        sweep_into,
    )
    from escalade.ops.choose.table import user_path

    modes = sum((sweep is not None, judge is not None))
    if modes > 1 or (modes and (names or problem)):
        raise typer.BadParameter("--sweep, --judge, and networks or problems to tune are mutually exclusive")
    if judge is not None:
        if not choices_hold(judge, Console()):
            raise typer.Exit(1)
    elif sweep is not None:
        sweep_into(out or pathlib.Path("sweep.jsonl"), sweep, seed)
    else:
        batches = numbers("--batch", listed([batch]))
        dtypes, layouts = listed(dtype) or ("fp16",), listed(layout) or ("nhwc",)
        named, problems = tuple(names or ()), tuple(problem or ())
        check_request(named, problems, dtypes, layouts)
        device = require_gpu(NEEDS_GPU)
        wanted = (
            named_problems(named[0], problems, dtypes, layouts)
            if problems
            else steps_of_networks(named, dtypes, batches)
        )
        if not wanted:
            raise UnsupportedError(f"{', '.join(named)} uses no operation with a ladder: nothing to tune")
        fill(table or user_path(torch.cuda.get_device_name(device)), wanted, device, again)
