"""`escalade demo`: a short tour."""

from __future__ import annotations

from rich.console import Console

from escalade.commands import doctor
from escalade.commands.options import KernelDevice


def command() -> None:
    """Take a short tour: this machine, a ladder, a network compared with PyTorch, and one that trains."""
    import torch

    from escalade.commands import ladder
    from escalade.commands.tour import (
        GPU_PROBLEM,
        GPU_TRAINING,
        ON_TWIN,
        RESULTS,
        TWIN_TRAINING,
        show_network,
        show_training,
        write_report,
    )

    console = Console()
    on_gpu = torch.cuda.is_available()
    console.rule("This machine: escalade doctor")
    doctor.command()
    if not on_gpu:
        console.print(ON_TWIN)
    console.rule("A ladder, rung by rung: escalade ladder conv2d")
    if on_gpu:
        ladder.command(
            "conv2d", problem=[GPU_PROBLEM], dtype=["fp32", "fp16"], device=KernelDevice.cuda, seconds=0.1
        )
    else:
        ladder.command("conv2d", device=KernelDevice.twin)
    console.rule("A network: escalade.compile")
    show_network(console, "cuda" if on_gpu else "twin")
    console.rule("Training: escalade train autoencoder")
    show_training(console, "cuda" if on_gpu else "twin", GPU_TRAINING if on_gpu else TWIN_TRAINING)
    if RESULTS.is_dir():
        console.rule("All records: escalade report")
        write_report(console)
