"""`escalade build`: save a network as one file that needs no compiler to load."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from escalade import files
from escalade.commands.options import ColorMean, ColorStd, Model, PlannedDtype, listed, numbers, written
from escalade.commands.progress import status
from escalade.device.architecture import ALL_ARCHITECTURES
from escalade.errors import UnsupportedError
from escalade.terminal_text import format_bytes, printable


def command(
    model: Model,
    output: Annotated[
        pathlib.Path,
        written(
            "--output",
            "-o",
            help="File to write; with --cpp, a folder.",
            check=lambda path: (
                files.require_writable_folder if path.is_dir() else files.require_writable_file
            )(path),
            show_default=False,
        ),
    ],
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", "-b", help="Batch sizes such as 1,8,32. Default: 1.", show_default=False),
    ] = None,
    dtype: PlannedDtype = None,
    weights: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Weights of a network by name: a .safetensors, .pth, .pt or .bin file. Default: random.",
            show_default=False,
        ),
    ] = None,
    mean: ColorMean = None,
    std: ColorStd = None,
    cpp: Annotated[
        bool,
        typer.Option(
            "--cpp", help="Write a folder for a C++ program instead: plans, a runtime and an example."
        ),
    ] = False,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="GPU architectures. Default: sm_90a (H100 and H200).", show_default=False),
    ] = None,
) -> None:
    """Save a network as one file with plans and machine code for given architectures. Needs no GPU."""
    import torch

    from escalade.commands.networks import inputs_of, is_saved, network
    from escalade.commands.selection import check_names
    from escalade.ops.base.card import H200
    from escalade.ops.base.dtypes import QUANTIZED
    from escalade_apps.classify.preparation import normalization_at, side_of

    console = Console()
    (files.require_writable_folder if cpp else files.require_writable_file)(output)
    batches = numbers("--batch", listed(batch)) or (1,)
    architectures = listed(arch) or (str(H200.architecture),)
    check_names("architecture", architectures, ALL_ARCHITECTURES)
    if cpp and len(architectures) > 1:
        raise UnsupportedError(
            f"--cpp writes plans for one architecture, not for {', '.join(architectures)}; build a folder for each"
        )
    if dtype in QUANTIZED:
        raise UnsupportedError(
            f"{dtype} needs calibration data: compile the model with calibration=batches, then call engine.save(path, "
            "kernels=...)"
        )
    takes_bytes = mean is not None or std is not None
    if takes_bytes and is_saved(model):
        raise UnsupportedError(
            f"{model} is a saved engine, whose normalization is fixed; leave out --mean and --std"
        )
    began = time.perf_counter()
    with status(console) as say:
        say(f"compiling {model}")
        engine, _ = network(
            model, batches[0], dtype, "cpu", plans=2 * len(batches), weights=weights,
            normalize=(lambda shape: normalization_at(side_of(shape), mean, std)) if takes_bytes else None,
        )  # fmt: skip
        for each in batches:
            say(f"planning for batch size {each}")
            inputs = inputs_of(engine, model, each, torch.device("cpu"))
            if takes_bytes:  # also plan for channels_last, in which decoders return images
                image = inputs[0].to(torch.uint8)
                engine.plan(image.contiguous(memory_format=torch.channels_last))
                inputs = (image,)
            engine.plan(*inputs)
        say(f"compiling kernels for {', '.join(architectures)}")
        if cpp:
            output = engine.export_cpp(output, kernels=architectures[0])
        else:
            output.parent.mkdir(parents=True, exist_ok=True)
            engine.save(output, kernels=architectures)
    console.print(
        f"wrote {escape(printable(output))}: {format_bytes(output.stat().st_size)}, {engine.dtype}, plans for batch "
        f"{', '.join(map(str, batches))} on {', '.join(architectures)}, in {time.perf_counter() - began:.1f} s",
        highlight=False,
    )
