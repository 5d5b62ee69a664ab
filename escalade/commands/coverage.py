"""`escalade bench coverage`: compile, verify and time every network of a module."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from escalade.commands.options import (
    MAX_SIDE,
    NetworkOn,
    RecordsFile,
    RecordsFolder,
    count,
    dtypes_option,
    duration,
    listed,
    numbers,
    seed_option,
    several,
)
from escalade.commands.progress import status
from escalade.terminal_text import counted

_CEILING_SECONDS = 0.1


def command(
    networks: Annotated[
        str,
        typer.Argument(
            help="torchvision, timm, or any module of constructors: MODULE or MODULE:name,name. Functions that are not "
            "named are called only if their annotation says that they return an nn.Module.",
            show_default=False,
        ),
    ],
    only: Annotated[
        str | None,
        typer.Option(help="Only networks whose names match this regular expression.", show_default=False),
    ] = None,
    dtype: Annotated[list[str] | None, dtypes_option("fp16,tf32")] = None,
    batch: Annotated[list[str] | None, several("--batch", "-b", help="Batch sizes.", default="1,32")] = None,
    size: Annotated[
        int | None,
        count(
            "--size",
            most=MAX_SIDE,
            help="Side of the images. A constructor of other inputs has the shape of one item as its example_shape.",
            show_default="224, or what a network was made for",
        ),
    ] = None,
    layout: Annotated[
        str, typer.Option(help="Layout of the images, for all systems: nhwc (channels_last) or nchw.")
    ] = "nhwc",
    peers: Annotated[
        list[str] | None,
        several(
            help="torch-graph, torch-compile-default, torch-compile (max-autotune: minutes per network); all, none.",
            default="torch-graph",
        ),
    ] = None,
    seconds: Annotated[float, duration("Seconds to time each system.")] = 0.1,
    budget: Annotated[
        float | None,
        duration(
            "Time budget in seconds: no network is started that would exceed it; the rest is reported.",
            show_default="no limit",
        ),
    ] = None,
    timed: Annotated[
        bool, typer.Option("--time/--no-time", help="Run and time the plans; without, only plan for an H200.")
    ] = True,
    device: NetworkOn = None,
    seed: Annotated[int, seed_option("Seed of the random weights and images.")] = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """Compile every network of a module, verify it, count the steps left to PyTorch, and time it against PyTorch."""
    import torch

    from escalade.commands.running import ON_CPU, Run, wide_console
    from escalade.commands.selection import check_names, network_device
    from escalade.ops.base.dtypes import QUANTIZED
    from escalade.tune.refusal import LostDevice
    from escalade_bench.campaign.units import Session
    from escalade_bench.coverage.catalogue import entries
    from escalade_bench.coverage.run import LAYOUTS, Coverage, left_over, workload_of
    from escalade_bench.networks.judging import MOST
    from escalade_bench.peers import registry
    from escalade_bench.report.pages import coverage as tables

    batches, dtypes = numbers("--batch", listed(batch)) or (1, 32), listed(dtype) or ("fp16", "tf32")
    check_names("layout", (layout,), LAYOUTS)
    check_names("dtype", dtypes, [dtype for dtype in MOST if dtype not in QUANTIZED])
    beside = registry.chosen(listed(peers), registry.NETWORKS)
    where = network_device(device) if timed else torch.device("cpu")
    found = entries(networks, only)
    run = Run(where, json, results, wide_console(), ON_CPU if timed else "no GPU: plans for an H200")
    if where.type != "cuda":
        beside = {}
        run.console.print(
            "On the CPU PyTorch computes everything: no kernel of Escalade's runs, and there are no peers. Launches "
            "and steps in PyTorch are those of an H200's plan; [yellow]errors and times are PyTorch's on this CPU.[/]"
            if timed
            else "Plans as an H200 would have them: [yellow]nothing is run.[/]"
        )
    workload = workload_of(networks.partition(":")[0], layout)
    left = {entry.name: entry for entry in found}
    with status(run.console) as say:
        session = Session(where, seconds, seed, run.measure_ceilings(_CEILING_SECONDS))
        coverage = Coverage(workload, session, batches, dtypes, beside, size, timed, layout)
        try:
            for entry, records in coverage.each(found, budget, say):
                for line in tables.lines(run.keep(records)):
                    run.console.print(escape(line))
                left.pop(entry.name, None)
        except LostDevice as lost:
            run.console.print(f"[red]stopped:[/] {escape(str(lost))}")
    for part in tables.parts(run.records):
        run.console.print(part.table)
        run.console.print(escape(f"{part.title}: {part.summary()}"))
    if left:
        run.console.print(
            f"[yellow]not measured:[/] {len(left)} of {counted(len(found), 'network')}, for lack of time or after an "
            f"error. The rest: --only {escape(repr(left_over(list(left.values()))))}"
        )
    run.end()
