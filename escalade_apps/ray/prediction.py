"""Serializable classifier, and the predictor that runs it in a Ray Data worker."""

from __future__ import annotations

import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from escalade.engine import Engine, load
from escalade.engine.file import fingerprint
from escalade.errors import UnsupportedError
from escalade.version import VERSION
from escalade_apps.classify.images import Crop, Source, Unreadable
from escalade_apps.classify.labels import class_labels
from escalade_apps.classify.prediction import Prediction, predict
from escalade_apps.classify.preparation import classes_of, crop_to, side_of
from escalade_apps.ray.storage import source

SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("rank", pa.int32()),
        ("class", pa.int32()),
        ("label", pa.string()),
        ("probability", pa.float32()),
        ("unreadable", pa.string()),
        ("shard", pa.int64()),
        ("network", pa.string()),
        ("weights", pa.string()),
        ("sha256", pa.string()),
        ("dtype", pa.string()),
        ("device", pa.string()),
        ("version", pa.string()),
    ]
)
"""One row per guess or unreadable image, with the provenance of the result."""


@dataclass(frozen=True)
class Network:
    """Serializable classifier: the bytes of an engine file, its crop, class labels and provenance."""

    contents: bytes
    crop: Crop
    labels: tuple[str, ...]
    title: str
    weights: str
    sha256: str
    dtype: str
    fingerprint: str
    """Hash of the computation, independent of compilation. `sha256` is the hash of the weights file, if there is
    one."""

    @staticmethod
    def of(
        engine: Engine, crop: Crop, labels: Sequence[str], title: str, weights: str, *, saved: bool = False
    ) -> Network:
        """Serialize an engine.

        `weights` is the path of its weights, or of its engine file if it was `saved`, or any other description.
        """
        file = pathlib.Path(weights)
        original = file.read_bytes() if file.is_file() else None
        contents = original if saved and original is not None else _serialize(engine)
        computation = fingerprint(engine.graph, engine.dtype)
        digest = computation if original is None else hashlib.sha256(original).hexdigest()
        return Network(contents, crop, tuple(labels), title, weights, digest, engine.dtype, computation)

    @staticmethod
    def read(path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None) -> Network:
        """Read an engine file that was compiled with `normalize`, and a file of labels."""
        engine = load(path, device="cpu")
        names = class_labels(classes_of(engine), None if labels is None else pathlib.Path(labels))
        crop = crop_to(side_of(engine.graph.inputs[0].shape))
        return Network.of(engine, crop, names, pathlib.Path(path).name, os.fspath(path), saved=True)

    def engine(self, device: str | None) -> Engine:
        """Load the engine on `device`, by default the GPU if there is one."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "engine")
            path.write_bytes(self.contents)
            return load(path, device=device)


class Predictor:
    """Callable class for Ray Data's `map_batches` that classifies rows with one engine.

    A row has a `path` (local or URI), and optionally `bytes`, the file's contents, as from Ray Data's
    `read_binary_files(..., include_paths=True)`, and a `shard` number. Results have the schema `SCHEMA`.
    """

    def __init__(self, network: Network, *, device: str | None = None, batch: int = 32, top: int = 5) -> None:
        require_counts(batch=batch, top=top)
        self.network, self.batch, self.top = network, batch, top
        self.engine = network.engine(device)
        self.made_by = {
            "network": network.title,
            "weights": network.weights,
            "sha256": network.sha256,
            "dtype": network.dtype,
            "device": _device_name(self.engine),
            "version": VERSION,
        }

    def __call__(self, rows: Mapping[str, np.ndarray]) -> pa.Table:
        if "path" not in rows:
            raise UnsupportedError(
                f"the rows have the columns {', '.join(rows)}; a Predictor needs `path`, and uses `bytes` if present: "
                "read_binary_files(..., include_paths=True) returns both"
            )
        paths = [os.fsdecode(path) for path in rows["path"]]
        contents = rows["bytes"] if "bytes" in rows else [None] * len(paths)
        files = [source(path, content) for path, content in zip(paths, contents, strict=True)]
        shards = (
            dict(zip(files, rows["shard"].tolist(), strict=True)) if "shard" in rows else dict[Source, int]()
        )
        predictions, unreadable = self.predict(files)
        found: list[dict[str, Any]] = [
            {
                "file": _text(prediction.file),
                "rank": rank,
                **guess.as_dict(),
                "shard": shards.get(prediction.file),
            }
            for prediction in predictions
            for rank, guess in enumerate(prediction.guesses, start=1)
        ]
        found += [
            {"file": _text(each.file), "unreadable": each.reason, "shard": shards.get(each.file)}
            for each in unreadable
        ]
        return self._table(found)

    def skip(self, rows: Mapping[str, np.ndarray], reason: str) -> pa.Table:
        """Return results that mark all images as unreadable."""
        shards = rows["shard"].tolist() if "shard" in rows else [None] * len(rows["path"])
        return self._table(
            {"file": _text(source(os.fsdecode(path))), "unreadable": reason, "shard": shard}
            for path, shard in zip(rows["path"], shards, strict=True)
        )

    def _table(self, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
        return pa.Table.from_pylist([{**row, **self.made_by} for row in rows], SCHEMA)

    def predict(self, files: Sequence[Source]) -> tuple[list[Prediction], list[Unreadable]]:
        """Return predictions in the order of the images, and the images that could not be read."""
        unreadable: list[Unreadable] = []
        found = predict(
            self.engine, files, self.network.crop, self.network.labels,
            batch=self.batch, top=self.top, skipped=unreadable.append,
        )  # fmt: skip
        return list(found), unreadable


def require_counts(**counts: object) -> None:
    """Raise UnsupportedError unless all arguments are positive integers."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise UnsupportedError(f"{name}={value!r}: must be an integer of at least 1")


def _serialize(engine: Engine) -> bytes:
    """Return the contents of the engine's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "engine")
        engine.save(path)
        return path.read_bytes()


def _device_name(engine: Engine) -> str:
    if engine.on_twin:
        return "twin"
    device = torch.device(engine.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _text(file: Source) -> str:
    """Return a file's name with bytes that are not UTF-8 escaped, because Arrow strings are UTF-8."""
    return str(file).encode(errors="backslashreplace").decode()
