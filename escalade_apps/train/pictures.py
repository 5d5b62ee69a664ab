"""Plots of a run: reconstructed images next to the originals, and the loss curve."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from escalade import files
from escalade_apps.train.logs import EVALUATION, STEP

COLUMNS = 8
_GAP = 2
_MIN_SIDE = 96
"""Smaller images are enlarged by a whole factor, to about this many pixels."""


def pairs(originals: torch.Tensor, outputs: torch.Tensor, path: pathlib.Path) -> None:
    """Write a PNG that alternates rows of originals and rows of outputs, both uint8, [images, rows, columns, 3]."""
    count, rows, columns, _ = originals.shape
    lines = -(-count // COLUMNS)
    high, wide = rows + _GAP, columns + _GAP
    sheet = torch.full(
        (lines * 2 * high - _GAP, min(count, COLUMNS) * wide - _GAP, 3), 255, dtype=torch.uint8
    )
    for number in range(count):
        line, column = divmod(number, COLUMNS)
        for below, image in enumerate((originals[number], outputs[number])):
            top, left = (2 * line + below) * high, column * wide
            sheet[top : top + rows, left : left + columns] = image.cpu()
    picture = Image.fromarray(sheet.numpy())
    scale = _scale(rows, columns)
    files.replace(path, _png(picture, picture.width * scale, picture.height * scale))


def reduced(path: pathlib.Path, rows: int, columns: int) -> bytes:
    """Return a PNG written by `pairs` at the images' own resolution."""
    scale = _scale(rows, columns)
    with Image.open(path) as picture:
        return _png(picture, picture.width // scale, picture.height // scale)


def _scale(rows: int, columns: int) -> int:
    return max(1, _MIN_SIDE // max(rows, columns))


def _png(picture: Image.Image, width: int, height: int) -> bytes:
    contents = io.BytesIO()
    picture.resize((width, height), Image.Resampling.NEAREST).save(contents, "PNG", optimize=True)
    return contents.getvalue()


def curve(lines: Sequence[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """Write a PNG of the training loss by step, with evaluations as dots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
    for event, style, label in ((STEP, "-", "training"), (EVALUATION, "o", "evaluation")):
        chosen = [(line["step"], line["loss"]) for line in lines if line.get("event") == event]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss", title=title, yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    contents = io.BytesIO()
    figure.savefig(contents, format="png", bbox_inches="tight")
    plt.close(figure)
    files.replace(path, contents.getvalue())
