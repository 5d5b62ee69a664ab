"""`escalade evaluate`: a ResNet's accuracy on labeled images, per dtype."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from escalade.commands.options import (
    ColorMean,
    ColorStd,
    EngineOn,
    RecordsFolder,
    count,
    dtypes_option,
    listed,
    written,
)
from escalade.commands.progress import status
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable


def command(
    network: Annotated[str, typer.Argument(help="resnet18, resnet34 or resnet50.", show_default=False)],
    weights: Annotated[
        pathlib.Path,
        typer.Option(
            "--weights", "-w", help="Its .safetensors, .pth or .pt file, named as torchvision or timm do."
        ),
    ],
    data: Annotated[
        pathlib.Path,
        typer.Option(
            "--data", "-d", help="Folder of images: one folder per class, or files named CLASS_anything."
        ),
    ],
    classes: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="File with the names of the classes in that folder, in the network's order: one per line, or a .json "
            "list.",
            show_default="their numbers, or alphabetical order",
        ),
    ] = None,
    dtype: Annotated[list[str] | None, dtypes_option("all")] = None,
    batch: Annotated[int, count("--batch", "-b", help="Batch size.")] = 32,
    limit: Annotated[
        int | None,
        count("--limit", help="Use at most this many images, evenly spread.", show_default="all"),
    ] = None,
    device: EngineOn = None,
    mean: ColorMean = None,
    std: ColorStd = None,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Also write the figures to this file.")
    ] = None,
    csv: Annotated[pathlib.Path | None, written("--csv", help="Also write the figures to this file.")] = None,
    results: RecordsFolder = None,
) -> None:
    """Count a ResNet's correct predictions on labeled images, by dtype and for PyTorch. Fails if logits are off."""
    import torch

    from escalade.commands.running import ON_CPU, Run
    from escalade.commands.selection import engine_device
    from escalade.engine.graph.forms import require_dtype
    from escalade.models import read_resnet
    from escalade_apps.classify import output
    from escalade_apps.classify.labels import find_labeled, spread
    from escalade_apps.classify.preparation import normalization
    from escalade_bench.evaluation import DTYPES, NETWORKS, Task, as_csv, as_json, evaluate
    from escalade_bench.report.pages import networks

    if network not in NETWORKS:
        raise UnsupportedError(f"there is no network {network!r} to evaluate; known: {', '.join(NETWORKS)}")
    dtypes = listed(dtype) or DTYPES
    for each in dtypes:
        require_dtype(each)
    where = engine_device(device)
    model = read_resnet(weights)
    if model.layers != NETWORKS[network]:
        raise UnsupportedError(f"{weights.name} has the weights of a ResNet-{model.layers}, not of {network}")
    images = spread(find_labeled(data, model.fc.out_features, classes), limit)
    task = Task(
        network, model, weights, data, images, normalization(model, mean, std), min(batch, len(images))
    )
    run = Run(
        torch.device("cuda" if where == "cuda" else "cpu"),
        None,
        results,
        without_gpu=ON_CPU * (where == "cpu"),
    )
    with status(run.console) as say:
        records = run.keep(evaluate(task, dtypes, where, say))
    if json is not None:
        output.write(json, as_json(records, data, where))
    if csv is not None:
        output.write(csv, as_csv(records))
    title = f"{network} with {printable(records[0].config['weights'])} on {printable(data)}, on {where}"
    run.show(table.titled(title) for table in networks.evaluation(records))
    run.end()
