"""Classify images on many machines in shards, so that an interrupted job can be resumed.

The list of images is split into shards of one size. The results of a shard are one file, named after its number and
moved into place when complete, so a killed worker leaves either all of a shard or nothing. Ray restarts workers and
retries their shards without limit; an image that crashes every worker is reported as unreadable (`attempts`). To resume
after the driver was killed, start the same job again: shards whose files exist are done.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
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
from escalade_apps.ray.attempts import MAX_CRASHES, Attempts
from escalade_apps.ray.prediction import Network, Predictor, require_counts
from escalade_apps.ray.storage import Folder, find

MANIFEST = "_escalade.json"
"""Describes the job. Parquet readers skip names that start with an underscore."""
FORMATS: Mapping[str, Callable[[pa.Table, pa.BufferOutputStream], None]] = {
    "parquet": pa.parquet.write_table,
    "csv": pa.csv.write_csv,
}
"""Writer of each file format."""
_ENDS = {"parquet": b"PAR1", "csv": b"\n"}
"""Last bytes of a complete file of each format."""
_CRASHED = f"{MAX_CRASHES} worker processes crashed while reading it"
_READERS = 32
"""Files read concurrently, to hide the latency of an object store."""
_LOCAL = "local"
"""Ray's address for a new cluster on this machine that ends with this process."""
_CONNECT_SECONDS = 5.0
"""Timeout for a TCP connection. Ray itself would retry for more than a minute."""


@dataclass(frozen=True)
class Part:
    """Finished shard, with its number of images and how many of them could not be read."""

    shard: int
    images: int
    unreadable: int


class ShardWriter:
    """Worker actor that classifies shards and writes one result file per shard.

    Returns the message of an EscaladeError as a value, because Ray turns an exception into the text of a traceback.
    """

    def __init__(self, factory: _PredictorFactory, output: str, form: str) -> None:
        self._factory, self._folder, self._form = factory, Folder(output), form
        self._batch = factory.batch
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
        """Write the results of a shard. Return the number of images that could not be read."""
        name = _file_name(shard, self._form)
        with Attempts.of(self._folder, name, len(rows["shard"]), self._batch) as attempts:
            if self._predictor is None:
                attempts.load()
                self._predictor = self._factory()
            table = pa.concat_tables(self._tables(self._predictor, rows, attempts))
            written = pa.BufferOutputStream()
            FORMATS[self._form](table, written)
            self._folder.write(name, written.getvalue())
        return len(table) - int(table["unreadable"].null_count)

    @staticmethod
    def _tables(
        predictor: Predictor, rows: Mapping[str, np.ndarray], attempts: Attempts
    ) -> Iterator[pa.Table]:
        for (first, last), skip in attempts.ranges():
            part = {name: column[first:last] for name, column in rows.items()}
            yield predictor.skip(part, _CRASHED) if skip else predictor(part)


class Job:
    """Images to classify with a network, and the folder of the results."""

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
        """Find the images and the shards that are not done yet.

        `names` are paths and URIs of images or folders. `workers` engines run at a time, each on its own GPU if
        `device` is "cuda"; the default is one per GPU of the cluster, or one per CPU without GPUs. `output` may hold
        results of the same job, interrupted.
        """
        if form not in FORMATS:
            raise UnsupportedError(f"form={form!r}: results are written as {' or '.join(FORMATS)}")
        require_counts(batch=batch, top=top, shard=shard, workers=1 if workers is None else workers)
        found, self.closed = find(names)
        self.images = len(found)
        self._shards = [found[start : start + shard] for start in range(0, len(found), shard)]
        self._folder, self._form = Folder(output), form
        self._folder.make()
        self._folder.clean(notes=False)
        self._check_manifest(network, found, top, shard)
        done = self._finished()
        self.left = [number for number in range(len(self._shards)) if number not in done]
        self._factory = _PredictorFactory(predictor, network, device, batch, top)
        self._workers, self._device = workers, device

    @property
    def images_left(self) -> int:
        """Number of images without results."""
        return sum(len(self._shards[number]) for number in self.left)

    def run(self) -> Iterator[Part]:
        """Process the remaining shards and yield each when its file is written, in completion order.

        Deletes files left over by killed workers at the end.
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
                ShardWriter,
                fn_constructor_args=(self._factory, self._folder.name, self._form),
                batch_size=None,
                compute=ray.data.ActorPoolStrategy(size=min(size, len(self.left))),
                num_cpus=1,
                num_gpus=1 if gpus else 0,
            )
            try:
                # Prefetching would delay the report of a shard until the next one is done.
                for done in parts.iter_batches(batch_size=None, prefetch_batches=0):
                    yield from _finished_parts(done)
                self._folder.clean(notes=True)
            except ray.exceptions.RayTaskError:  # has the worker's own traceback
                raise
            except ray.exceptions.RayError as error:
                lines = str(error).strip().splitlines() or [type(error).__name__]
                raise LaunchError(
                    f"Ray failed: {printable(lines[0])}. Finished shards are kept; run the same job again to continue"
                ) from error

    def _gpus(self) -> float:
        """Return the number of GPUs to use."""
        found = float(ray.cluster_resources().get("GPU", 0))
        if self._device == "cuda" and not found:
            raise UnsupportedError(
                "device cuda needs a cluster with GPUs, and this one has none; use cpu to run PyTorch's operators"
            )
        return found if self._device in (None, "cuda") else 0

    def _rows(self, number: int) -> pa.Table:
        """Return a shard as a table for Ray Data. Paths are bytes, because they need not be UTF-8."""
        paths = [os.fsencode(path) for path in self._shards[number]]
        return pa.table({"path": paths, "shard": [number] * len(paths)})

    def _finished(self) -> set[int]:
        """Return the shards with complete result files. A power failure can leave an incomplete one."""
        named = {_file_name(number, self._form): number for number in range(len(self._shards))}
        existing = sorted(self._folder.names() & named.keys())
        ending = _ENDS[self._form]
        with ThreadPoolExecutor(_READERS) as readers:
            ends = readers.map(lambda name: self._folder.end(name, len(ending)), existing)
            return {named[name] for name, end in zip(existing, ends, strict=True) if end == ending}

    def _check_manifest(self, network: Network, found: Sequence[str], top: int, shard: int) -> None:
        """Write the manifest. Raises UnsupportedError if the folder has results of another job."""
        asked = {
            "images": len(found), "list": _hash(map(os.fsencode, found)), "shard": shard, "top": top,
            "format": self._form, "sha256": network.sha256, "dtype": network.dtype,
            "network": network.fingerprint, "crop": [network.crop.resize, network.crop.side],
            "labels": _hash(label.encode(errors="surrogateescape") for label in network.labels),
        }  # fmt: skip
        if self._folder.read(MANIFEST) is None and (parts := self._parts()):
            raise UnsupportedError(
                f"{printable(self._folder.name)} has {printable(parts[0])} but no {MANIFEST} to identify its job; "
                "pass another folder"
            )
        # If two drivers start at once, one writes the manifest and the other is compared with it.
        known = _parsed(self._folder.write_once(MANIFEST, json.dumps(asked, indent=1).encode()))
        if known is None:
            raise UnsupportedError(
                f"{printable(self._folder.name)} has a {MANIFEST} that is not a valid manifest; pass another folder"
            )
        other = [name for name in asked if known.get(name) != asked[name]]
        if other:
            differences = ", ".join(
                f"{name} is {printable(str(known.get(name)))} there and {printable(str(asked[name]))} now"
                for name in other
            )
            raise UnsupportedError(
                f"{printable(self._folder.name)} has results of another job ({differences}); repeat that job to "
                "continue it, or pass another folder"
            )

    def _parts(self) -> list[str]:
        return sorted(name for name in self._folder.names() if name.startswith("part-"))


@dataclass(frozen=True)
class _PredictorFactory:
    """Creates the predictor of a worker."""

    kind: type[Predictor]
    network: Network
    device: str | None
    batch: int
    top: int

    def __call__(self) -> Predictor:
        return self.kind(self.network, device=self.device, batch=self.batch, top=self.top)


def _file_name(shard: int, form: str) -> str:
    return f"part-{shard:08}.{form}"


def _hash(texts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def _parsed(manifest: bytes) -> Mapping[str, Any] | None:
    try:
        found = parsing.parse(manifest)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _finished_parts(done: Mapping[str, Sequence[Any]]) -> Iterator[Part]:
    """Yield the shards that a worker has finished. Raises LaunchError if it failed."""
    for shard, images, unreadable, failure in zip(
        *(done[column] for column in ("shard", "images", "unreadable", "failure")), strict=True
    ):
        if failure:
            raise LaunchError(str(failure))
        yield Part(int(shard), int(images), int(unreadable))


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the cluster at an address, unless this process is already connected to one."""
    if ray.is_initialized():
        yield
        return
    logger = logging.getLogger("ray.data")  # its execution plans would garble our progress bar
    level = logger.level
    options = {"include_dashboard": False} if address == _LOCAL else {}
    try:
        _check_listening(address)
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedError(
            f"no Ray at {printable(address)} ({printable(error)}); pass the HOST:PORT of the cluster's head node, "
            "auto on one of its machines, or local"
        ) from error
    try:
        logger.setLevel(logging.ERROR)
        yield
    finally:
        logger.setLevel(level)
        ray.shutdown()


def _check_listening(address: str) -> None:
    """Open and close a connection to HOST:PORT. Other addresses are left to Ray."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
