"""Predictions as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from escalade.classify.images import Unreadable
from escalade.classify.predict import Prediction
from escalade.errors import UnsupportedError


def table(predictions: Sequence[Prediction]) -> Table:
    made = Table(box=None, pad_edge=False)
    made.add_column("image", overflow="fold")
    made.add_column("class", justify="right")
    made.add_column("label", overflow="fold")
    made.add_column("probability", justify="right")
    for prediction in predictions:
        for rank, guess in enumerate(prediction.guesses):
            name = escape(str(prediction.file)) if rank == 0 else ""
            style = "bold" if rank == 0 else "dim"
            made.add_row(
                name, str(guess.number), escape(guess.label), f"{guess.probability:.2%}", style=style
            )
    return made


def as_json(
    predictions: Sequence[Prediction], skipped: Sequence[Unreadable], about: Mapping[str, Any]
) -> str:
    images = [
        {
            "file": str(prediction.file),
            "top": [
                {"class": guess.number, "label": guess.label, "probability": guess.probability}
                for guess in prediction.guesses
            ],
        }
        for prediction in predictions
    ]
    unreadable = [{"file": str(each.file), "reason": each.reason} for each in skipped]
    return (
        json.dumps({**about, "images": images, "unreadable": unreadable}, indent=1, ensure_ascii=False) + "\n"
    )


def as_csv(predictions: Sequence[Prediction]) -> str:
    """A row for each guess."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("file", "rank", "class", "label", "probability"))
    for prediction in predictions:
        for rank, guess in enumerate(prediction.guesses, start=1):
            writer.writerow((prediction.file, rank, guess.number, guess.label, f"{guess.probability:.6g}"))
    return text.getvalue()


def require_folder(path: pathlib.Path | None) -> None:
    """Said before the work is done rather than after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UnsupportedError(
            f"{path} cannot be written: it is a folder, or the folder it is to be in is not there"
        )


def write(path: pathlib.Path, text: str) -> None:
    """Beside its place and then moved there, so that a reader never sees half of it."""
    with tempfile.NamedTemporaryFile(
        "w",
        dir=path.absolute().parent,
        prefix=".writing-",
        delete=False,
        encoding="utf-8",
        errors="surrogateescape",
    ) as file:
        try:
            file.write(text)
            file.close()
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            pathlib.Path(file.name).unlink(missing_ok=True)
            raise
