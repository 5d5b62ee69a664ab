"""The command `layers`: single convolutions beside their peers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import typer
from rich.markup import escape

from escalade import ops
from escalade.commands.devices import kernel_device
from escalade.commands.options import (
    Dtypes,
    InputSeed,
    KernelsOn,
    RecordsFile,
    RecordsFolder,
    duration,
    listed,
    numbers,
    several,
)
from escalade.commands.progress import status
from escalade.commands.running import Run, wide_console
from escalade.commands.selection import check_names
from escalade.device.cuda import architecture
from escalade.device.precompilation import precompile
from escalade.errors import UnsupportedError
from escalade.ops.conv2d.problem import DTYPES
from escalade_bench.ladder import free
from escalade_bench.layers import WORKLOADS, Layer, Part, measure, parts, programs
from escalade_bench.measure.records import Record
from escalade_bench.peers import registry
from escalade_bench.report import terminal
from escalade_bench.report.pages import layers as tables
from escalade_bench.trial import Settings, blank_record

_CEILING_SECONDS = 0.1


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
        list[str] | None, several("--batch", "-b", help="Batch sizes such as 32,256; 256 without it.")
    ] = None,
    dtype: Dtypes = None,
    direction: Annotated[
        str, typer.Option("--direction", "-d", help="forward, input_gradient or weight_gradient.")
    ] = "forward",
    peers: Annotated[
        list[str] | None,
        several(
            help="cudnn-graph (the best plan of cuDNN; needs nvidia-cudnn-frontend), torch, torch-compile (tens of "
            "seconds per layer); none. Without it: the first two."
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
    if where.type == "cuda":
        _compile(list(distinct.values()), tune, run)
        run.measure_ceilings(_CEILING_SECONDS)
    else:
        run.console.print("On the twin: results are checked, and [yellow]nothing here is a speed.[/]")
    settings = Settings(
        tune=tune, seed=seed, seconds_each=seconds, device=where, ceilings=run.ceilings, note=run.note
    )
    measured: dict[tuple[str, object], list[Record]] = {}
    for key, layer in distinct.items():
        with status(run.console) as say:
            measured[key] = run.keep(
                _measured(layer, chosen, replace(settings, say=say), WORKLOADS[direction])
            )
    for part in wanted:
        _show(part, measured, run)
    over_fp16 = tables.over_fp16(tables.rows(distinct.values(), measured))
    for name, ratio in over_fp16.items():
        run.console.print(f"fp8 {name}: {ratio:.2f}× our fp16")
    if over_fp16:
        mean = statistics.geometric_mean(over_fp16.values())
        run.console.print(f"fp8 over our own fp16: {mean:.3f}× in the geometric mean")
    if not run.records:
        raise UnsupportedError(
            "none of these layers can be done here, so nothing was measured; the notes say why"
        )
    of_peers = Counter(f"{r.system}: {r.failure}" for r in run.records if r.failure and r.is_peer)
    for why, count in of_peers.items():
        run.note(f"{why} ({count} layers)" if count > 1 else why)
    run.show_failures(record for record in run.records if not record.is_peer)
    run.end()


def wanted_parts(
    names: Sequence[str], batches: tuple[int, ...], dtypes: tuple[str, ...], direction: str
) -> tuple[Part, ...]:
    """Return the layers to measure, grouped by table; without batches and dtypes, in batches of 256 in fp16."""
    check_names("dtype", dtypes, DTYPES)
    return parts(tuple(names), batches or (256,), dtypes or ("fp16",), direction)


def _compile(wanted: Sequence[Layer], tune: bool, run: Run) -> None:
    """Compile all kernels in parallel before the first layer is measured."""
    here = architecture(run.device.index or 0)
    kernels = programs(wanted, run.device, tune)
    run.console.print(f"compiling {len(kernels)} kernels for {here}")
    for failure in precompile(kernels, here):
        run.console.print(f"[red]refused:[/] {escape(failure.message.splitlines()[0])}")


def _measured(layer: Layer, peers: Sequence[str], settings: Settings, workload: str) -> list[Record]:
    try:
        return measure(layer, peers, settings, workload)
    except RuntimeError as error:  # out of memory, a launch that fails: the other layers are still measured
        free(settings.device)
        reason = str(error).strip() or type(error).__name__
        blank = blank_record(ops.operation(layer.operation), layer.problem, "escalade", "")
        return [replace(blank, workload=workload, failure=reason.splitlines()[0])]


def _show(part: Part, measured: dict[tuple[str, object], list[Record]], run: Run) -> None:
    own = [record for layer in part.layers for record in measured[layer.key]]
    if run.device.type != "cuda":
        run.show(terminal.ladder_tables(own), ())
        return
    found = tables.rows(part.layers, measured)
    run.show([tables.table(part.title, found)], [replace(record, failure="") for record in own])
    if total := tables.summary(found):
        run.console.print(f"{part.title}: {total}")
    if run.ceilings:
        rates = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in run.ceilings.tflops.items())
        run.console.print(f"the best of several matrix products in the same run, TFLOP/s: {rates}")
