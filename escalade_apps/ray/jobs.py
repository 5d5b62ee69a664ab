"""Many images through engines on many machines, shard by shard, so that what was interrupted goes on where it was.

The list of images is cut into shards of one size. A shard's results are one file, which is moved to its place when it
is whole, and whose name is the shard's number. So a worker that is killed leaves nothing, or all, of a shard; Ray
starts another and gives it the shard again, as often as it takes: an image that ends every process is told of as
unreadable (`attempts`). A driver that is killed is started again: the shards whose files are there
are done.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import ray
import ray.data
import ray.exceptions

from escalade import parsing
from escalade.errors import EscaladeError, LaunchError, UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.ray.attempts import MOST_ENDS, Attempts
from escalade_apps.ray.prediction import Network, Predictor, require_counts
from escalade_apps.ray.storage import Folder, find

MANIFEST = "_escalade.json"
"""What a folder's results are of; readers of Parquet pass over names that begin so."""
FORMATS: Mapping[str, Callable[[pa.Table, pa.BufferOutputStream], None]] = {
    "parquet": pa.parquet.write_table,
    "csv": pa.csv.write_csv,
}
"""The kinds of files that results are written to, and what writes them."""
_ENDS = {"parquet": b"PAR1", "csv": b"\n"}
"""How a whole file of each kind ends."""
_ENDED = f"the process that was to read it has ended {MOST_ENDS} times over it, and no other is tried"
_READERS = 32
"""Files whose ends are read at a time: of a store each takes as long as its answer."""


@dataclass(frozen=True)
class Part:
    """A shard whose results are written: how many images it has, and how many of these could not be read."""

    shard: int
    images: int
    unreadable: int


class Writer:
    """A predictor in a worker, which writes the results of each shard to a file of its own.

    What Escalade refuses there comes back as a sentence among the results: of an exception Ray gives the driver no more
    than a traceback as text.
    """

    def __init__(self, predictor: _Making, output: str, form: str) -> None:
        self._make, self._folder, self._form = predictor, Folder(output), form
        self._batch = predictor.batch
        self._predictor: Predictor | None = None

    def __call__(self, rows: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
        (shard,) = set(rows["shard"].tolist())
        unreadable, failure = 0, ""
        try:
            unreadable = self._write(shard, rows)
        except EscaladeError as error:
            failure = str(error)
        return {
            "shard": [shard], "images": [len(rows["shard"])], "unreadable": [unreadable], "failure": [failure],
        }  # fmt: skip

    def _write(self, shard: int, rows: Mapping[str, np.ndarray]) -> int:
        """How many images could not be read."""
        name = _file(shard, self._form)
        with Attempts.of(self._folder, name, len(rows["shard"]), self._batch) as attempts:
            if self._predictor is None:
                attempts.make()
                self._predictor = self._make()
            table = pa.concat_tables(self._tables(self._predictor, rows, attempts))
            written = pa.BufferOutputStream()
            FORMATS[self._form](table, written)
            self._folder.write(name, written.getvalue())
        return len(table) - int(table["unreadable"].null_count)

    @staticmethod
    def _tables(
        predictor: Predictor, rows: Mapping[str, np.ndarray], attempts: Attempts
    ) -> Iterator[pa.Table]:
        for (first, last), is_given_up in attempts.pieces():
            piece = {name: column[first:last] for name, column in rows.items()}
            yield predictor.given_up(piece, _ENDED) if is_given_up else predictor(piece)


class Job:
    """Images, the network that they go through, and the folder of the results: what is done of it, and the rest."""

    def __init__(
        self,
        names: Sequence[str | os.PathLike[str]],
        output: str | os.PathLike[str],
        network: Network,
        *,
        workers: int | None = None,
        device: str | None = None,
        batch: int = 32,
        top: int = 5,
        shard: int = 4096,
        form: str = "parquet",
        predictor: type[Predictor] = Predictor,
    ) -> None:
        """Finds the images that paths and URIs stand for, and what is left of them to do.

        `workers` engines run at a time, each on a GPU of its own where `device` is "cuda"; without them as many as the
        cluster has GPUs, or CPUs where it has no GPU. The folder may hold results of the same job, interrupted.
        """
        if form not in FORMATS:
            raise UnsupportedError(f"results are written as {' or '.join(FORMATS)}, not {form!r}")
        require_counts(batch=batch, top=top, shard=shard, workers=1 if workers is None else workers)
        found, self.closed = find(names)
        self.images = len(found)
        self._shards = [found[start : start + shard] for start in range(0, len(found), shard)]
        self._folder, self._form = Folder(output), form
        self._folder.make()
        self._folder.clean(notes=False)
        self._agree(network, found, top, shard)
        done = self._done()
        self.left = [number for number in range(len(self._shards)) if number not in done]
        self._make = _Making(predictor, network, device, batch, top)
        self._workers, self._device = workers, device

    @property
    def images_left(self) -> int:
        """The images whose results are not there yet."""
        return sum(len(self._shards[number]) for number in self.left)

    def run(self) -> Iterator[Part]:
        """Does what is left, and gives each shard when its file is there, in the order in which they are done.

        What workers that were killed have left is gone when it has ended.
        """
        if not self.left:
            self._folder.clean(notes=True)
            return
        gpus = self._gpus()
        size = self._workers or int(gpus or ray.cluster_resources().get("CPU", 1))
        context = ray.data.DataContext.get_current().copy()
        context.enable_progress_bars = context.print_on_execution_start = False
        with ray.data.DataContext.current(context):
            parts = ray.data.from_blocks([self._rows(number) for number in self.left]).map_batches(
                Writer,
                fn_constructor_args=(self._make, self._folder.name, self._form),
                batch_size=None,
                compute=ray.data.ActorPoolStrategy(size=min(size, len(self.left))),
                num_cpus=1,
                num_gpus=1 if gpus else 0,
            )
            try:
                # With what would be prefetched, a shard was told of when the next one is done.
                for done in parts.iter_batches(batch_size=None, prefetch_batches=0):
                    yield from _told(done)
                self._folder.clean(notes=True)
            except ray.exceptions.RayTaskError:  # which has the worker's own traceback
                raise
            except ray.exceptions.RayError as error:
                said = str(error).strip().splitlines() or [type(error).__name__]
                raise LaunchError(
                    f"Ray did not get to the end: {printable(said[0])}. What is done is kept, and the same again goes "
                    "on from there"
                ) from error

    def _gpus(self) -> float:
        """The cluster's GPUs that may be used."""
        found = float(ray.cluster_resources().get("GPU", 0))
        if self._device == "cuda" and not found:
            raise UnsupportedError(
                "device cuda needs a cluster with GPUs, and this one has none; cpu runs PyTorch's operators instead"
            )
        return found if self._device in (None, "cuda") else 0

    def _rows(self, number: int) -> pa.Table:
        """A shard as Ray Data takes it; paths as bytes, since they need not be UTF-8."""
        paths = [os.fsencode(path) for path in self._shards[number]]
        return pa.table({"path": paths, "shard": [number] * len(paths)})

    def _done(self) -> set[int]:
        """The shards whose results are there, whole: what a machine that lost its power has left of one is not."""
        named = {_file(number, self._form): number for number in range(len(self._shards))}
        there = sorted(self._folder.names() & named.keys())
        ending = _ENDS[self._form]
        with ThreadPoolExecutor(_READERS) as readers:
            ends = readers.map(lambda name: self._folder.end(name, len(ending)), there)
            return {named[name] for name, end in zip(there, ends, strict=True) if end == ending}

    def _agree(self, network: Network, found: Sequence[str], top: int, shard: int) -> None:
        """Writes what the folder's results are of, and refuses one that has results of something else."""
        asked = {
            "images": len(found), "list": _hash(map(os.fsencode, found)), "shard": shard, "top": top,
            "format": self._form, "sha256": network.sha256, "dtype": network.dtype,
            "network": network.fingerprint, "crop": [network.crop.resize, network.crop.side],
            "labels": _hash(label.encode(errors="surrogateescape") for label in network.labels),
        }  # fmt: skip
        if self._folder.read(MANIFEST) is None and (parts := self._parts()):
            raise UnsupportedError(
                f"{printable(self._folder.name)} has {printable(parts[0])} and no {MANIFEST} that says what it is of; "
                "give another folder"
            )
        # Of two drivers that begin at once, one is first, and the other is asked whether it agrees.
        known = _parsed(self._folder.write_once(MANIFEST, json.dumps(asked, indent=1).encode()))
        if known is None:
            raise UnsupportedError(
                f"{printable(self._folder.name)} has a {MANIFEST} that does not say what its results are of; give "
                "another folder"
            )
        other = [name for name in asked if known.get(name) != asked[name]]
        if other:
            differences = ", ".join(
                f"{name} is {printable(str(known.get(name)))} there and {printable(str(asked[name]))} now"
                for name in other
            )
            raise UnsupportedError(
                f"{printable(self._folder.name)} has results of another job ({differences}); repeat that one to go on, "
                "or give another folder"
            )

    def _parts(self) -> list[str]:
        return sorted(name for name in self._folder.names() if name.startswith("part-"))


@dataclass(frozen=True)
class _Making:
    """How a worker makes its predictor."""

    kind: type[Predictor]
    network: Network
    device: str | None
    batch: int
    top: int

    def __call__(self) -> Predictor:
        return self.kind(self.network, device=self.device, batch=self.batch, top=self.top)


def _file(shard: int, form: str) -> str:
    return f"part-{shard:08}.{form}"


def _hash(texts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _parsed(manifest: bytes) -> Mapping[str, Any] | None:
    try:
        found = parsing.parse(manifest)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _told(done: Mapping[str, Sequence[Any]]) -> Iterator[Part]:
    """The shards that a worker tells of; what it could not do is raised here."""
    for shard, images, unreadable, failure in zip(
        *(done[column] for column in ("shard", "images", "unreadable", "failure")), strict=True
    ):
        if failure:
            raise LaunchError(str(failure))
        yield Part(int(shard), int(images), int(unreadable))
