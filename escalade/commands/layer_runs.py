"""Compile, measure and print single convolutions, for `escalade bench layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.markup import escape

from escalade import ops
from escalade.commands.progress import announce, progress_bar
from escalade.commands.running import Run
from escalade.commands.selection import check_names
from escalade.device.cuda import architecture
from escalade.device.precompilation import compile_seconds, precompile, uncompiled
from escalade.ops.conv2d.problem import DTYPES
from escalade.terminal_text import counted
from escalade_bench.ladder import free
from escalade_bench.layers import Layer, Part, measure, parts, programs
from escalade_bench.measure.records import Record
from escalade_bench.report import terminal
from escalade_bench.report.pages import layers as tables
from escalade_bench.trial import Settings, blank_record

CEILING_SECONDS = 0.1
_OVERHEAD_SECONDS = 1.0
"""Time to prepare and verify a system for a layer on a GPU; assumed."""
_TWIN_FLOPS = 14e6
"""Operations per second on the twin: 24 small problems of conv2d on a Xeon at 2.5 GHz."""


def wanted_parts(
    names: Sequence[str], batches: tuple[int, ...], dtypes: tuple[str, ...], direction: str
) -> tuple[Part, ...]:
    """Return the layers to measure, grouped by table; without batches and dtypes, in batches of 256 in fp16."""
    check_names("dtype", dtypes, DTYPES)
    return parts(tuple(names), batches or (256,), dtypes or ("fp16",), direction)


def announce_layers(layers: Sequence[Layer], peers: int, seconds: float, run: Run) -> None:
    """Print how many layers are measured, and about how long that takes without compiling."""
    if run.device.type == "cuda":
        each = (1 + peers) * (seconds + _OVERHEAD_SECONDS)
        total, less = each * len(layers), "Take less with fewer layers, --peers none or fewer --seconds"
    else:
        total = sum(layer.problem.flops for layer in layers) / _TWIN_FLOPS
        less = "Take less with fewer layers or --batch 1"
    announce(run.console, f"{counted(len(layers), 'layer')} to measure", total, less)


def compile_layers(wanted: Sequence[Layer], tune: bool, run: Run) -> None:
    """Compile all kernels in parallel before the first layer is measured."""
    here = architecture(run.device.index or 0)
    kernels = programs(wanted, run.device, tune)
    new = uncompiled(kernels, here)
    work = f"{counted(len(kernels), 'kernel')} for {here} ({len(new):,} to compile)"
    announce(run.console, work, compile_seconds(len(new), here), "Compiled kernels are cached")
    with progress_bar(run.console) as progress:
        task = progress.add_task(f"compiling for {here}", total=len(kernels))
        failures = precompile(kernels, here, done=lambda program: progress.advance(task))
    for failure in failures:
        run.console.print(f"[red]refused:[/] {escape(failure.message.splitlines()[0])}")


def measure_layer(layer: Layer, peers: Sequence[str], settings: Settings, workload: str) -> list[Record]:
    try:
        return measure(layer, peers, settings, workload)
    except RuntimeError as error:  # out of memory, a launch that fails: the other layers are still measured
        free(settings.device)
        reason = str(error).strip() or type(error).__name__
        blank = blank_record(ops.operation(layer.operation), layer.problem, "escalade", "")
        return [replace(blank, workload=workload, failure=reason.splitlines()[0])]


def show_part(part: Part, measured: dict[tuple[str, object], list[Record]], run: Run) -> None:
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
