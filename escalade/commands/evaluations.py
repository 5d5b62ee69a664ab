"""Write the figures of `escalade bench evaluate`."""

from __future__ import annotations

import csv as csv_format
import io
import json as json_format
import pathlib
from collections.abc import Sequence
from typing import Any

from escalade_bench.evaluation import SUFFIX
from escalade_bench.measure.records import Record

NETWORKS = {"resnet18": 18, "resnet34": 34, "resnet50": 50}


def as_json(records: Sequence[Record], data: pathlib.Path, device: str) -> str:
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


def as_csv(records: Sequence[Record]) -> str:
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
