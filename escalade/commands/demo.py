"""The command `demo`: a first look. This machine, a ladder, and a network whose results are compared with PyTorch's."""

from __future__ import annotations

import copy
import time

import torch
import typer
from rich.console import Console

from escalade.bench.networks.judging import Standard, standard
from escalade.bench.networks.workloads import workload
from escalade.commands import doctor, ladder
from escalade.commands.options import KernelDevice
from escalade.engine import compile

NETWORK, DTYPE = "resnet18", "fp16"
IMAGES = 4
TWIN_SIZE = 64
"""Rows and columns of an image on the twin, where each thread of a kernel takes its turn on the CPU."""
GPU_PROBLEM = "64to64_56_k3s1_b32"
"""A problem whose whole ladder takes a minute to measure."""
_PLACES = {"cuda": "GPU", "twin": "twin"}
_TWIN = (
    "There is no GPU here, so the kernels run on the twin: the CUDA sources themselves, compiled by g++ and run on the "
    "CPU, thread by thread. The results are the kernels' own. Times on it are the CPU's, and no speeds."
)


def command() -> None:
    """A first look: this machine, a ladder, and a network whose results are compared with PyTorch's."""
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


def _network(console: Console, device: str) -> None:
    """Compiles a network for the GPU or the twin, runs images through it, and holds the results against float64."""
    chosen = workload(NETWORK)
    size = chosen.size if device == "cuda" else TWIN_SIZE
    model, x = chosen.model(size, 0), chosen.inputs(IMAGES, size, 0)
    began = time.perf_counter()
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
