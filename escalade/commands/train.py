"""`escalade train`: train a network."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from escalade import files
from escalade.commands.options import MAX_SIDE, EngineOn, count, seed_option, written
from escalade.errors import UnsupportedError


def command(
    task: Annotated[str, typer.Argument(help="autoencoder or resnet18.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            help="CIFAR-10 (binary or Python version, unpacked), IDX files, a folder of images, an .npz file, or "
            "synthetic[:COUNT].",
            show_default="synthetic",
        ),
    ] = None,
    output: Annotated[
        pathlib.Path | None,
        written(
            "--output",
            "-o",
            help="Folder of the run. Default: runs/TASK.",
            check=files.require_writable_folder,
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in that folder.")] = False,
    epochs: Annotated[
        int | None, count("--epochs", help="Passes over the training images.", show_default="20")
    ] = None,
    steps: Annotated[
        int | None, count("--steps", help="Stop after this many steps.", show_default="no limit")
    ] = None,
    batch: Annotated[
        int | None, count("--batch", "-b", help="Batch size over all processes.", show_default="256")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate.", show_default="0.001 (autoencoder), 0.1 (resnet18)")
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="sgd (momentum 0.9), adam or adamw.", show_default="adam (autoencoder), sgd (resnet18)"
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            help="constant, or cosine with a linear warmup.",
            show_default="constant (autoencoder), cosine (resnet18)",
        ),
    ] = None,
    weight_decay: Annotated[
        float | None,
        typer.Option(
            help="Weight decay of the optimizer.", show_default="0 (autoencoder), 0.0005 (resnet18)"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "-t",
            help="fp32, tf32, or mixed precision with fp16 or bf16. Default: fp16 on a GPU, else fp32.",
        ),
    ] = None,
    seed: Annotated[
        int | None, seed_option("Seed for weights, shuffling and augmentation.", show_default="0")
    ] = None,
    device: EngineOn = None,
    width: Annotated[
        int | None,
        count(
            "--width",
            help="Channels of the first convolution.",
            show_default="256 (autoencoder), 64 (resnet18)",
        ),
    ] = None,
    side: Annotated[
        int | None,
        count(
            "--side",
            help="Size of images from folders and of synthetic images.",
            show_default="32",
            most=MAX_SIDE,
        ),
    ] = None,
    flip: Annotated[
        bool | None, typer.Option(help="Randomly mirror images.", show_default="on for resnet18")
    ] = None,
    shift: Annotated[
        int | None,
        count(
            "--shift",
            help="Randomly shift images by up to this many pixels.",
            show_default="0 (autoencoder), 4 (resnet18)",
            least=0,
        ),
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            help="Fraction held out for testing, of datasets without test images.", show_default="0.1"
        ),
    ] = None,
    patience: Annotated[
        int | None,
        count(
            "--patience", help="Stop after this many epochs without a better evaluation.", show_default="off"
        ),
    ] = None,
    every: Annotated[
        int | None,
        count("--every", help="Steps between checkpoints, in addition to one per epoch.", show_default="off"),
    ] = None,
    weights: Annotated[
        pathlib.Path | None, typer.Option("--weights", "-w", help="File of initial weights.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log to TensorBoard.")] = False,
    csv: Annotated[
        bool, typer.Option("--csv", help="Also log to the CSV files steps.csv and evaluations.csv.")
    ] = False,
    share_gpu: Annotated[
        bool,
        typer.Option(
            "--share-gpu",
            help="Let processes of torchrun share GPUs, connected by gloo instead of NCCL: slow, for tests.",
        ),
    ] = False,
    classifier: Annotated[
        bool,
        typer.Option(
            "--classifier", help="After training, fit a linear classifier to the autoencoder's features."
        ),
    ] = False,
    results: Annotated[
        pathlib.Path | None,
        written(
            "--results",
            check=files.require_writable_folder,
            help="File the loss curve of the run in this folder, under the name of the GPU, for the report.",
        ),
    ] = None,
) -> None:
    """Train the autoencoder or a ResNet-18, with checkpoints that resume bit for bit."""
    import torch

    from escalade.commands.selection import engine_device
    from escalade.commands.training import RUNS, announce, fit_classifier, train
    from escalade_apps.train.parallel import processes
    from escalade_apps.train.probing import Probe
    from escalade_apps.train.trainer import BEST, trainer
    from escalade_bench.learning import learning_record
    from escalade_bench.measure import records

    options: dict[str, Any] = {
        "data": data, "epochs": epochs, "steps": steps, "batch": batch, "lr": lr, "optimizer": optimizer,
        "schedule": schedule, "weight_decay": weight_decay, "dtype": dtype, "seed": seed, "width": width, "side": side,
        "flip": flip, "shift": shift, "held_out": held_out, "patience": patience, "every": every,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    folder = output or RUNS / task
    if classifier and task != "autoencoder":
        raise UnsupportedError(f"--classifier needs the autoencoder; {task} is itself a classifier")
    where = engine_device(device)
    twin = where == "twin"
    if results is not None and where == "cpu":
        raise UnsupportedError(
            "--results records runs of Escalade's kernels, so it needs --device cuda or twin; the log of this run is "
            "in its folder"
        )
    with processes(torch.device("cpu" if twin else where), share_gpus=share_gpu) as own:
        console = Console(quiet=not own.first)
        with console.status("Reading the images and planning the step"):
            run = trainer(
                task, given, folder, own,
                resume=resume, weights=weights, twin=twin, tensorboard=tensorboard, csv=csv,
            )  # fmt: skip
        probe = Probe(run.dataset, run.settings.seed) if classifier else None
        announce(console, run, own, folder, resume)
        began, first = time.monotonic(), run.step
        stopped_by = train(console, run, own)
        seconds = None if first else time.monotonic() - began
        best = f"the weights in {BEST}, " if (folder / BEST).is_file() else ""
        console.print(f"Wrote {folder}: {best}the log in log.jsonl, the curve in loss.png")
        if stopped_by:  # as the shell reports a program that the signal ends
            raise typer.Exit(128 + stopped_by)
        judgement = fit_classifier(console, run, probe, where) if probe is not None and own.first else None
        if results is not None and own.first:
            record = learning_record(run.settings, run.dataset, folder, seconds, judgement)
            for path in records.file_away(results, [record.stamped(records.provenance(own.device))]):
                console.print(f"wrote {escape(str(path))}")
