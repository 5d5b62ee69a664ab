"""Format predictions as a table, as JSON or as CSV."""

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
    result = Table(box=None, pad_edge=False)
    result.add_column("image", overflow="fold")
    result.add_column("class", justify="right")
    result.add_column("label", overflow="fold")
    result.add_column("probability", justify="right")
    for prediction in predictions:
        for rank, guess in enumerate(prediction.guesses):
            name = Text(printable(prediction.file) if rank == 0 else "")
            style = "bold" if rank == 0 else "dim"
            result.add_row(
                name, str(guess.number), Text(printable(guess.label)), f"{guess.probability:.2%}", style=style
            )
    return result


def as_json(
    predictions: Sequence[Prediction], skipped: Sequence[Unreadable], about: Mapping[str, Any]
) -> str:
    images = [
        {
            "file": str(prediction.file),
            "top": [guess.as_dict() for guess in prediction.guesses],
        }
        for prediction in predictions
    ]
    unreadable = [{"file": str(each.file), "reason": each.reason} for each in skipped]
    text = json.dumps({**about, "images": images, "unreadable": unreadable}, indent=1, ensure_ascii=False)
    # File names that are not UTF-8 contain surrogates, which UTF-8 cannot encode and JSON can escape.
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def as_csv(predictions: Sequence[Prediction]) -> str:
    """Return one row per guess. Lines end in CRLF, so the writer quotes names that contain CR or LF."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(("file", "rank", "class", "label", "probability"))
    for prediction in predictions:
        for rank, guess in enumerate(prediction.guesses, start=1):
            writer.writerow((prediction.file, rank, guess.number, guess.label, f"{guess.probability:.6g}"))
    return text.getvalue()


def write(path: pathlib.Path, text: str) -> None:
    """Write a file atomically. File names in it keep their original bytes."""
    files.replace(path, text.encode(errors="surrogateescape"))
