"""A classifier that travels to other machines, and what a worker of Ray Data does with it."""

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
"""A row of results: a guess, or an image that could not be read; then what made it."""


@dataclass(frozen=True)
class Network:
    """A classifier as workers get it: the bytes of an engine's file, how images are cut for it, what its classes are
    called, and what it is made of."""

    contents: bytes
    crop: Crop
    labels: tuple[str, ...]
    title: str
    weights: str
    sha256: str
    dtype: str
    fingerprint: str
    """A hash of what it computes, the same whenever it is compiled; `sha256` is that of a file, if it is of one."""

    @staticmethod
    def of(
        engine: Engine, crop: Crop, labels: Sequence[str], title: str, weights: str, *, saved: bool = False
    ) -> Network:
        """An engine of this process. `weights` is the file that it is of, its own if it was `saved`, or whatever else
        says what it is."""
        file = pathlib.Path(weights)
        made_of = file.read_bytes() if file.is_file() else None
        contents = made_of if saved and made_of is not None else _saved(engine)
        computed = fingerprint(engine.graph, engine.dtype)
        digest = computed if made_of is None else hashlib.sha256(made_of).hexdigest()
        return Network(contents, crop, tuple(labels), title, weights, digest, engine.dtype, computed)

    @staticmethod
    def read(path: str | os.PathLike[str], labels: str | os.PathLike[str] | None = None) -> Network:
        """An engine that was saved with `normalize`, with the machine code that its file has; `labels` is a file."""
        engine = load(path, device="cpu")
        names = class_labels(classes_of(engine), None if labels is None else pathlib.Path(labels))
        crop = crop_to(side_of(engine.graph.inputs[0].shape))
        return Network.of(engine, crop, names, pathlib.Path(path).name, os.fspath(path), saved=True)

    def engine(self, device: str | None) -> Engine:
        """The engine on a device of this machine: on the GPU if there is one, unless a device is named."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "engine")
            path.write_bytes(self.contents)
            return load(path, device=device)


class Predictor:
    """One engine, and batches of rows through it: what Ray Data's `map_batches` wants of a class.

    A row has a `path`, a local one or a URI. It may have the file's contents, `bytes`, as rows of Ray Data's
    `read_binary_files(..., include_paths=True)` do, and the number of a `shard`. Results have `SCHEMA`.
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
            "device": _called(self.engine),
            "version": VERSION,
        }

    def __call__(self, rows: Mapping[str, np.ndarray]) -> pa.Table:
        if "path" not in rows:
            raise UnsupportedError(
                f"the rows have the columns {', '.join(rows)}; a Predictor reads `path`, and `bytes` where they are "
                "given: read_binary_files(..., include_paths=True) gives both"
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
                "class": guess.number,
                "label": guess.label,
                "probability": guess.probability,
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

    def given_up(self, rows: Mapping[str, np.ndarray], reason: str) -> pa.Table:
        """The results of images that are not to be read, and why."""
        shards = rows["shard"].tolist() if "shard" in rows else [None] * len(rows["path"])
        return self._table(
            {"file": _text(source(os.fsdecode(path))), "unreadable": reason, "shard": shard}
            for path, shard in zip(rows["path"], shards, strict=True)
        )

    def _table(self, rows: Iterable[Mapping[str, Any]]) -> pa.Table:
        return pa.Table.from_pylist([{**row, **self.made_by} for row in rows], SCHEMA)

    def predict(self, files: Sequence[Source]) -> tuple[list[Prediction], list[Unreadable]]:
        """The classes of images in their order, and those that could not be read."""
        unreadable: list[Unreadable] = []
        found = predict(
            self.engine, files, self.network.crop, self.network.labels,
            batch=self.batch, top=self.top, skipped=unreadable.append,
        )  # fmt: skip
        return list(found), unreadable


def require_counts(**given: object) -> None:
    """Refuses what is no number of something, by its name."""
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise UnsupportedError(f"{name}={value!r}: it is a whole number, at least 1")


def _saved(engine: Engine) -> bytes:
    """What the engine's file would hold."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "engine")
        engine.save(path)
        return path.read_bytes()


def _called(engine: Engine) -> str:
    """What the engine runs on: a GPU by its name."""
    if engine.on_twin:
        return "twin"
    device = torch.device(engine.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _text(file: Source) -> str:
    """A file's name; bytes of it that are no UTF-8 are spelled, since Arrow's texts are UTF-8."""
    return str(file).encode(errors="backslashreplace").decode()
