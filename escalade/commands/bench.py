"""`escalade bench`: a network and its peers."""

from __future__ import annotations

import pathlib
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
    written,
)
from escalade.commands.progress import status
from escalade.device import host_memory

PICTURES = (".png", ".svg", ".pdf")
"""File types of `escalade_bench.report.plots`, repeated here because that module imports PyTorch."""


def command(
    workload: Annotated[
        str,
        typer.Argument(
            help="resnet18, resnet34, resnet50, autoencoder, lenet or spectral_autoencoder; a constructor as "
            "MODULE:name, torchvision:name or timm:name; a .pt2 or .onnx file; or a folder with config.json.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        list[str] | None,
        several(
            "--batch", "-b", help="Batch sizes such as 1,8,32; may be repeated.", default="the network's"
        ),
    ] = None,
    dtype: Annotated[list[str] | None, dtypes_option("the network's")] = None,
    peers: Annotated[
        list[str] | None,
        several(
            help="torch-eager, torch-graph, torch-compile (max-autotune: 90 s per batch and more), "
            "torch-compile-default, jax; all, none.",
            default="torch-eager, torch-graph, jax",
        ),
    ] = None,
    parts: Annotated[
        list[str] | None,
        several(
            help="Only these: accuracy, batches; training-step (ResNets and autoencoders), "
            "training-ablation, training-pairs (autoencoder); phases, cpu, layer-kinds, stream (ResNets); "
            "op-times, stream (lenet); score (spectral_autoencoder).",
            default="the usual ones",
        ),
    ] = None,
    device: NetworkOn = None,
    seconds: Annotated[float, duration("Seconds to time each system.")] = 0.3,
    budget: Annotated[
        float | None,
        duration("Time budget in seconds for starting further torch.compile runs.", show_default="no limit"),
    ] = None,
    phases: Annotated[bool, typer.Option(help="Time one image from naive kernels to the engine.")] = True,
    stream: Annotated[bool, typer.Option(help="Also stream uint8 images from host memory.")] = False,
    size: Annotated[
        int | None,
        count("--size", help="Side of a ResNet's images.", most=MAX_SIDE, show_default="224"),
    ] = None,
    seed: Annotated[int, seed_option("Seed of the random weights and images.")] = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
    plot: Annotated[
        pathlib.Path | None,
        written("--plot", help="Plot the figures into this .png, .svg or .pdf file.", endings=PICTURES),
    ] = None,
) -> None:
    """Verify a network and its peers, then time them for every batch size and dtype in one run."""
    from escalade.commands.running import ON_CPU, Run
    from escalade.commands.selection import check_names, network_device
    from escalade_bench.campaign.units import Session
    from escalade_bench.networks.judging import MOST
    from escalade_bench.networks.workload import Setting
    from escalade_bench.networks.workloads import require_options, wanted_parts
    from escalade_bench.networks.workloads import workload as named_workload
    from escalade_bench.peers import registry
    from escalade_bench.peers.network import Budget
    from escalade_bench.peers.registry import SLOW
    from escalade_bench.report.pages import networks as tables
    from escalade_bench.report.plots import by_batch, save

    batches, dtypes = numbers("--batch", listed(batch)), listed(dtype)
    asked_peers, asked_parts = listed(peers), listed(parts)
    chosen = named_workload(workload)
    beside = registry.chosen(asked_peers, chosen.peers)
    where = network_device(device)
    on_gpu = where.type == "cuda"
    check_names("dtype", dtypes, tuple(MOST))
    require_options(dtypes, size, chosen)
    named = {*asked_parts, *(("stream",) if stream else ())}
    measured = wanted_parts(named, not asked_parts, phases, chosen, on_gpu)
    slow_batches = () if batches else chosen.slow_batches
    batches = batches or (chosen.batches if on_gpu else chosen.small_batches)
    run = Run(where, json, results, without_gpu=ON_CPU)
    if not on_gpu:
        beside = {}
        run.console.print(
            f"On the CPU, batch {', '.join(map(str, batches))}: PyTorch computes everything. No kernel of Escalade's "
            "runs, and there are no graphs and peers. [yellow]Times are this CPU's.[/]"
        )
    slow = [name for name in beside if name in SLOW]
    if slow_batches and slow:
        run.console.print(
            f"{', '.join(slow)}: only at batches {', '.join(map(str, slow_batches))}, because making it takes long; "
            "--batch names others."
        )
    if chosen.notice():
        run.note(chosen.notice())
    with status(run.console) as say:
        say(f"{chosen.name}: making the network")
        needed = max(batches) * chosen.inputs(1, size, seed).nbytes
        host_memory.require(needed, f"{chosen.name} for a batch of {max(batches):,}")
        setting = Setting.of(
            chosen, Session(where, seconds, seed, run.measure_ceilings()), size, batches=batches, peers=beside,
            slow_batches=slow_batches, dtypes=dtypes or (chosen.dtypes if on_gpu else ("fp32",)), budget=Budget(budget),
        )  # fmt: skip
        for name in measured:
            for records in chosen.parts[name].measure(setting, say):
                run.keep(records)
    run.show(tables.terminal_tables(run.records))
    if plot:
        timed = [record for record in run.records if record.workload == workload]
        run.console.print(f"wrote {escape(str(save(lambda: by_batch(timed, workload), plot)))}")
    run.end()
