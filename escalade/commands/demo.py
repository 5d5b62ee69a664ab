"""The command `demo`: a first look. This machine, a ladder, a network compared with PyTorch's, and one that learns."""

from __future__ import annotations

import copy
import pathlib
import time
from dataclasses import dataclass

import torch
import typer
from rich.console import Console

from escalade.commands import doctor, ladder, report
from escalade.commands.options import KernelDevice
from escalade.commands.progress import waiting
from escalade.engine import compile, training_step
from escalade.errors import EscaladeError
from escalade.models import ConvAutoencoder
from escalade_apps.train.batches import Batch, Normalization
from escalade_apps.train.data.synthetic import make
from escalade_apps.train.tasks import mean_squared_error
from escalade_bench.networks.judging import Standard, standard
from escalade_bench.networks.workloads import workload

NETWORK, DTYPE = "resnet18", "fp16"
IMAGES = 4
TWIN_SIZE = 64
"""Rows and columns of an image on the twin, where each thread of a kernel takes its turn on the CPU."""
GPU_PROBLEM = "64to64_56_k3s1_b32"
"""A problem whose whole ladder takes a minute to measure."""


@dataclass(frozen=True)
class Training:
    """A short run of the autoencoder."""

    width: int
    side: int
    batch: int
    steps: int
    dtype: str


GPU_TRAINING = Training(256, 32, 256, 200, "fp16")
TWIN_TRAINING = Training(8, 8, 8, 12, "fp32")
_SHOWN = 6
"""Losses that are shown of a run."""
RESULTS = pathlib.Path("results")
"""Where a checkout has its records, of which the demo ends by writing the report."""
_PLACES = {"cuda": "GPU", "cpu": "CPU", "twin": "twin"}
_TWIN = (
    "There is no GPU here, so the kernels run on the twin: the CUDA sources themselves, compiled by g++ and run on the "
    "CPU, thread by thread. The results are the kernels' own. Times on it are the CPU's, and no speeds."
)


def command() -> None:
    """A first look: this machine, a ladder, a network that is compared with PyTorch's, and one that learns."""
    console = Console()
    on_gpu = torch.cuda.is_available()
    console.rule("This machine: escalade doctor")
    doctor.command()
    if not on_gpu:
        console.print(_TWIN)
    console.rule("A ladder, rung by rung: escalade ladder conv2d")
    if on_gpu:
        ladder.command(
            "conv2d", problem=[GPU_PROBLEM], dtype=["fp32", "fp16"], device=KernelDevice.cuda, seconds=0.1
        )
    else:
        ladder.command("conv2d", device=KernelDevice.twin)
    console.rule("A network: escalade.compile")
    _network(console, "cuda" if on_gpu else "twin")
    console.rule("A network that learns: escalade train autoencoder")
    _training(console, "cuda" if on_gpu else "twin", GPU_TRAINING if on_gpu else TWIN_TRAINING)
    if RESULTS.is_dir():
        console.rule("All that is recorded: escalade report")
        _report(console)


def _network(console: Console, device: str) -> None:
    """Compiles a network for the GPU or the twin, runs images through it, and holds the results against float64."""
    chosen = workload(NETWORK)
    size = chosen.size if device == "cuda" else TWIN_SIZE
    model, x = chosen.model(size, 0), chosen.inputs(IMAGES, size, 0)
    began = time.perf_counter()
    with waiting(f"compiling ResNet-18 for the {_PLACES[device]}"):
        engine = compile(model, x, dtype=DTYPE, device=device)
    console.print(
        f"ResNet-18 with random weights, {IMAGES} images of {size}×{size}, compiled in {DTYPE} for the "
        f"{_PLACES[device]} in {time.perf_counter() - began:.1f} s. The plan, as engine.explain() gives it:"
    )
    there = x.to(engine.device)
    console.print(engine.explain(there))
    results = engine(there).cpu()
    with torch.no_grad():
        in_fp32 = model(x)
        exact = copy.deepcopy(model).double()(x.double())
    _compare(console, results, in_fp32, standard(model, x, DTYPE, exact))


def _training(console: Console, device: str, run: Training) -> None:
    """Trains an autoencoder for a few steps on one batch, and ends the program unless the loss falls."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = ConvAutoencoder(run.width).to(
            "cuda" if device == "cuda" else "cpu", memory_format=torch.channels_last
        )  # type: ignore[call-overload]
    pixels = make(run.batch, run.side, 0, "train").pixels.to(next(model.parameters()).device)
    images = Batch(pixels, None).images(Normalization())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2 if device != "cuda" else 1e-3)
    began = time.perf_counter()
    step = training_step(
        model,
        mean_squared_error,
        optimizer,
        (images, images),
        dtype=run.dtype,
        device="twin" if device == "twin" else None,
    )
    console.print(
        f"An autoencoder of width {run.width}, {run.batch} images of {run.side}×{run.side}: forward, loss, backward "
        f"and optimiser made one plan in {run.dtype} for the {_PLACES[device]} in {time.perf_counter() - began:.1f} s."
    )
    losses = [float(step(images, images)) for _ in range(run.steps)]
    shown = sorted({number * (run.steps - 1) // (_SHOWN - 1) for number in range(_SHOWN)})
    console.print(
        "; ".join(f"step {number + 1}: loss {losses[number]:.4f}" for number in shown), highlight=False
    )
    if not losses[-1] < losses[0]:
        console.print("[red]The loss has not fallen.[/]")
        raise typer.Exit(1)
    console.print(f"[green]The loss has fallen to {losses[-1] / losses[0]:.0%} in {run.steps} steps.[/]")


def _report(console: Console) -> None:
    """Writes the report of what is recorded, if anything is."""
    try:
        report.command(RESULTS)
    except EscaladeError as error:
        console.print(f"There is no report to write: {error}", markup=False)


def _compare(console: Console, results: torch.Tensor, in_fp32: torch.Tensor, wanted: Standard) -> None:
    """Says how near the results are to PyTorch's; ends the program if they are too far off."""
    same = int((results.argmax(1) == in_fp32.argmax(1)).sum())
    error, wrong = wanted.judge((results,))
    console.print(
        f"Escalade's kernels name the class that PyTorch's fp32 does on {same} of {len(results)} images. Against "
        f"PyTorch in float64 their error is {error:.1e}; PyTorch's own in {wanted.dtype} is {wanted.own[0]:.1e}, and "
        f"{wanted.tolerance:.1e} is allowed."
    )
    if wrong:
        console.print(f"[red]That is wrong:[/] {wrong}")
        raise typer.Exit(1)
    console.print("[green]The kernels compute what PyTorch does.[/]")
