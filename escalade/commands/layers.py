"""`escalade bench layers`: single convolutions and their peers."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from escalade.commands.options import (
    InputSeed,
    KernelsOn,
    RecordsFile,
    RecordsFolder,
    dtypes_option,
    duration,
    listed,
    numbers,
    several,
)
from escalade.commands.progress import counted_progress
from escalade.errors import UnsupportedError

if TYPE_CHECKING:
    from escalade_bench.measure.records import Record


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Sets of layers: resnet18, resnet50, stem, depthwise, untuned; or convolutions such as "
            "64to64_56_k3s1_b256_bias+relu.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        list[str] | None, several("--batch", "-b", help="Batch sizes such as 32,256.", default="256")
    ] = None,
    dtype: Annotated[list[str] | None, dtypes_option("fp16")] = None,
    direction: Annotated[
        str, typer.Option("--direction", "-d", help="forward, input_gradient or weight_gradient.")
    ] = "forward",
    peers: Annotated[
        list[str] | None,
        several(
            help="cudnn-graph (the best plan of cuDNN; needs nvidia-cudnn-frontend), torch, torch-compile (tens of "
            "seconds per layer); none.",
            default="cudnn-graph, torch",
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(help="Search the fastest config of all preferred rungs, instead of what a call takes."),
    ] = False,
    device: KernelsOn = None,
    seconds: Annotated[float, duration("Seconds to time each system.")] = 0.05,
    seed: InputSeed = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """Verify single convolutions and their peers, then time them interleaved, layer by layer."""
    from escalade.commands.layer_runs import (
        CEILING_SECONDS,
        announce_layers,
        compile_layers,
        measure_layer,
        show_part,
        wanted_parts,
    )
    from escalade.commands.running import Run, wide_console
    from escalade.commands.selection import kernel_device
    from escalade_bench.campaign.units import Session
    from escalade_bench.layers import WORKLOADS
    from escalade_bench.peers import registry
    from escalade_bench.report.pages import layers as tables

    batches, dtypes, asked_peers = numbers("--batch", listed(batch)), listed(dtype), listed(peers)
    where = kernel_device(device)
    chosen = tuple(registry.chosen(asked_peers, registry.LAYERS))
    wanted = wanted_parts(names, batches, dtypes, direction)
    distinct = {layer.key: layer for part in wanted for layer in part.layers}
    if not distinct:
        raise UnsupportedError(
            f"{', '.join(names)} has no layers in direction {direction}: there is nothing to measure"
        )
    run = Run(where, json, results, wide_console())
    announce_layers(list(distinct.values()), len(chosen), seconds, run)
    if where.type == "cuda":
        compile_layers(list(distinct.values()), tune, run)
        run.measure_ceilings(CEILING_SECONDS)
    else:
        run.console.print("On the twin: results are checked, and [yellow]nothing here is a speed.[/]")
    session = Session(where, seconds, seed, run.ceilings)
    measured: dict[tuple[str, object], list[Record]] = {}
    with counted_progress(run.console, "measuring layers", len(distinct)) as (say, advance):
        for key, layer in distinct.items():
            measured[key] = run.keep(
                measure_layer(
                    layer, chosen, session.settings(say, tune=tune, note=run.note), WORKLOADS[direction]
                )
            )
            advance()
    for part in wanted:
        show_part(part, measured, run)
    over_fp16 = tables.over_fp16(tables.rows(distinct.values(), measured))
    for name, ratio in over_fp16.items():
        run.console.print(f"fp8 {name}: {ratio:.2f}× our fp16")
    if over_fp16:
        mean = statistics.geometric_mean(over_fp16.values())
        run.console.print(f"fp8 over our own fp16: {mean:.3f}× in the geometric mean")
    if not run.records:
        raise UnsupportedError(
            "no rung or peer supports these layers here, so nothing was measured; see the notes"
        )
    of_peers = Counter(f"{r.system}: {r.failure}" for r in run.records if r.failure and r.is_peer)
    for why, count in of_peers.items():
        run.note(f"{why} ({count} layers)" if count > 1 else why)
    run.show_failures(record for record in run.records if not record.is_peer)
    run.end()
