"""The steps of `escalade demo`."""

from __future__ import annotations

import copy
import pathlib
import time
from dataclasses import dataclass

import torch
import typer
from rich.console import Console

from escalade.commands import report
from escalade.commands.progress import waiting
from escalade.engine import compile, training_step
from escalade.errors import EscaladeError
from escalade.models import ConvAutoencoder
from escalade.terminal_text import counted
from escalade_apps.train.batches import Batch, Normalization
from escalade_apps.train.data.synthetic import make
from escalade_apps.train.tasks import mean_squared_error
from escalade_bench.networks.judging import Standard, standard
from escalade_bench.networks.workloads import workload

NETWORK, DTYPE = "resnet18", "fp16"
IMAGES = 4
TWIN_SIZE = 64
"""Rows and columns of an image on the twin, which runs the threads of a kernel one after another."""
GPU_PROBLEM = "64to64_56_k3s1_b32"
"""Measuring its whole ladder takes about a minute."""


@dataclass(frozen=True)
class DemoTraining:
    """Short training run of the autoencoder."""

    width: int
    side: int
    batch: int
    steps: int
    dtype: str


GPU_TRAINING = DemoTraining(256, 32, 256, 200, "fp16")
TWIN_TRAINING = DemoTraining(8, 8, 8, 12, "fp32")
_SHOWN_LOSSES = 6
RESULTS = pathlib.Path("results")
"""Folder of records in a checkout."""
_DEVICE_NAMES = {"cuda": "GPU", "cpu": "CPU", "twin": "twin"}
ON_TWIN = (
    "There is no GPU, so the kernels run on the twin: the CUDA sources, compiled by g++ and run on the CPU thread by "
    "thread. The results are those of the kernels; the times say nothing about a GPU."
)


def show_network(console: Console, device: str) -> None:
    """Compile a network, run images through it, and compare the results with float64."""
    chosen = workload(NETWORK)
    size = chosen.size if device == "cuda" else TWIN_SIZE
    model, x = chosen.model(size, 0), chosen.inputs(IMAGES, size, 0)
    began = time.perf_counter()
    with waiting(f"compiling ResNet-18 for the {_DEVICE_NAMES[device]}"):
        engine = compile(model, x, dtype=DTYPE, device=device)
    console.print(
        f"ResNet-18 with random weights, {IMAGES} images of {size}×{size}, compiled in {DTYPE} for the "
        f"{_DEVICE_NAMES[device]} in {time.perf_counter() - began:.1f} s. Its plan, from engine.explain():"
    )
    inputs = x.to(engine.device)
    console.print(engine.explain(inputs))
    results = engine(inputs).cpu()
    with torch.no_grad():
        in_fp32 = model(x)
        exact = copy.deepcopy(model).double()(x.double())
    _compare(console, results, in_fp32, standard(model, x, DTYPE, exact))


def show_training(console: Console, device: str, run: DemoTraining) -> None:
    """Train an autoencoder for a few steps on one batch. Exits with status 1 unless the loss falls."""
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
        f"Autoencoder of width {run.width}, {run.batch} images of {run.side}×{run.side}: forward, loss, backward and "
        f"optimizer planned as one step in {run.dtype} for the {_DEVICE_NAMES[device]} in "
        f"{time.perf_counter() - began:.1f} s."
    )
    losses = [float(step(images, images)) for _ in range(run.steps)]
    shown = sorted({number * (run.steps - 1) // (_SHOWN_LOSSES - 1) for number in range(_SHOWN_LOSSES)})
    console.print(
        "; ".join(f"step {number + 1}: loss {losses[number]:.4f}" for number in shown), highlight=False
    )
    if not losses[-1] < losses[0]:
        console.print("[red]The loss has not fallen.[/]")
        raise typer.Exit(1)
    console.print(f"[green]The loss has fallen to {losses[-1] / losses[0]:.0%} in {run.steps} steps.[/]")


def write_report(console: Console) -> None:
    try:
        report.command(RESULTS)
    except EscaladeError as error:
        console.print(f"No report was written: {error}", markup=False)


def _compare(console: Console, results: torch.Tensor, in_fp32: torch.Tensor, wanted: Standard) -> None:
    """Print the error against PyTorch. Exits with status 1 if it exceeds the tolerance."""
    same = int((results.argmax(1) == in_fp32.argmax(1)).sum())
    error, wrong = wanted.judge((results,))
    console.print(
        f"Escalade's kernels predict the same class as PyTorch in fp32 on {same} of "
        f"{counted(len(results), 'image')}. Their error "
        f"against PyTorch in float64 is {error:.1e}; PyTorch's own in {wanted.dtype} is {wanted.own[0]:.1e}, and the "
        f"tolerance is {wanted.tolerance:.1e}."
    )
    if wrong:
        console.print(f"[red]Wrong result:[/] {wrong}")
        raise typer.Exit(1)
    console.print("[green]The kernels agree with PyTorch.[/]")
