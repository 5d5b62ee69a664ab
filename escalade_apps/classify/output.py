"""Predictions as a table, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from escalade import files
from escalade.narrow_tables import Table
from escalade.terminal_text import printable
from escalade_apps.classify.images import Unreadable
from escalade_apps.classify.prediction import Prediction

_SURROGATE = re.compile("[\ud800-\udfff]")


def table(predictions: Sequence[Prediction]) -> Table:
    made = Table(box=None, pad_edge=False)
    made.add_column("image", overflow="fold")
    made.add_column("class", justify="right")
    made.add_column("label", overflow="fold")
    made.add_column("probability", justify="right")
    for prediction in predictions:
        for rank, guess in enumerate(prediction.guesses):
            name = Text(printable(prediction.file) if rank == 0 else "")
            style = "bold" if rank == 0 else "dim"
            made.add_row(
                name, str(guess.number), Text(printable(guess.label)), f"{guess.probability:.2%}", style=style
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
    text = json.dumps({**about, "images": images, "unreadable": unreadable}, indent=1, ensure_ascii=False)
    # A name that is no text in UTF-8: its bytes as Python reads them, which JSON can spell and UTF-8 cannot.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def as_csv(predictions: Sequence[Prediction]) -> str:
    """A row for each guess; lines end as CSV's do, so that a name with either half of that in it is quoted."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("file", "rank", "class", "label", "probability"))
    for prediction in predictions:
        for rank, guess in enumerate(prediction.guesses, start=1):
            writer.writerow((prediction.file, rank, guess.number, guess.label, f"{guess.probability:.6g}"))
    return text.getvalue()


def write(path: pathlib.Path, text: str) -> None:
    """Writes a file whole; names of files in it keep the bytes that they have."""
    files.replace(path, text.encode(errors="surrogateescape"))
