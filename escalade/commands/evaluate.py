"""The command `evaluate`: a ResNet's right answers on labelled images, in each dtype."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer

from escalade.commands.devices import engine_device
from escalade.commands.options import (
    ColorMean,
    ColorStd,
    Dtypes,
    EngineOn,
    RecordsFolder,
    count,
    listed,
    written,
)
from escalade.commands.progress import status
from escalade.commands.running import ON_CPU, Run
from escalade.engine.graph.forms import require_dtype
from escalade.errors import UnsupportedError
from escalade.models import read_resnet
from escalade.terminal_text import printable
from escalade_apps.classify import output
from escalade_apps.classify.labeled import find_labeled, spread
from escalade_apps.classify.preparation import normalization
from escalade_bench.evaluation import DTYPES, SUFFIX, Task, evaluate
from escalade_bench.measure.records import Record
from escalade_bench.report.pages import networks

NETWORKS = {"resnet18": 18, "resnet34": 34, "resnet50": 50}


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
            "--data", "-d", help="A folder of images: a folder a class in it, or files named CLASS_whatever."
        ),
    ],
    classes: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="What the classes are called there, in the network's order: a name a line, or a .json list. Without "
            "it: their numbers, or all of them in alphabetical order.",
            show_default=False,
        ),
    ] = None,
    dtype: Dtypes = None,
    batch: Annotated[int, count("--batch", "-b", help="Images at a time.")] = 32,
    limit: Annotated[
        int | None,
        count("--limit", help="At most so many images, evenly from all of them.", show_default=False),
    ] = None,
    device: EngineOn = None,
    mean: ColorMean = None,
    std: ColorStd = None,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Write the figures to this file too.")
    ] = None,
    csv: Annotated[pathlib.Path | None, written("--csv", help="Write the figures to this file too.")] = None,
    results: RecordsFolder = None,
) -> None:
    """Count a ResNet's correct predictions on labeled images, by dtype and for PyTorch. Fails if logits are off."""
    if network not in NETWORKS:
        raise UnsupportedError(f"there is no network {network!r} to evaluate; there is {', '.join(NETWORKS)}")
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
        output.write(json, _json(records, data, where))
    if csv is not None:
        output.write(csv, _csv(records))
    title = f"{network} with {printable(records[0].config['weights'])} on {printable(data)}, on {where}"
    run.show(table.titled(title) for table in networks.evaluation(records))
    run.end()


def _json(records: Sequence[Record], data: pathlib.Path, device: str) -> str:
    about: dict[str, Any] = {
        "network": records[0].workload.removesuffix(SUFFIX),
        "weights": records[0].config["weights"],
        "data": str(data),
        "images": records[0].batch,
        "device": device,
        "decoder": records[0].config["decoder"],
        "systems": [_figures(record) for record in records],
    }
    return json_format.dumps(about, indent=1) + "\n"


def _csv(records: Sequence[Record]) -> str:
    text = io.StringIO()
    rows = [_figures(record) for record in records]
    writer = csv_format.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _figures(record: Record) -> dict[str, Any]:
    said = record.config
    return {
        "system": record.system,
        "dtype": record.dtype,
        "images": record.batch,
        "top1": record.accuracy,
        "top5": said["top5"],
        "agreement": said["agreement"],
        "largest_difference": said["difference"],
        "error": record.error,
        "failure": record.failure,
    }
