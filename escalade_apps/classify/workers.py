"""Pool of decode worker processes: threads of this process would wait for the GIL.

Each job has its own workers, which exit with it. Asking for the next chunk collects replies and hands out work. Each
worker has two chunks in flight, so that it stays busy while the caller does something else. Results are read in place
from memory shared with the worker; nothing is copied.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import pathlib
import pickle
import select
import socket
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageFile

from escalade.fork_server import ForkServer
from escalade.interruption import POLL_SECONDS
from escalade_apps.classify import decode_worker
from escalade_apps.classify.decode_worker import REPLY, ROW, DecodeSettings, ReadResult
from escalade_apps.classify.images import Crop, DecodedImage, Unreadable
from escalade_apps.classify.jpeg import JpegBytes

logger = logging.getLogger("escalade")
_IN_FLIGHT = 2
"""Chunks per worker."""
_MAX_HELD_BYTES = 2**30
"""Above this many bytes of results not yet consumed, only the chunk that is needed next is handed out."""
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
"""NumPy's libraries start thread pools on import, and threads do not survive a fork."""
DIED = "a worker process crashed while reading it"
_server = ForkServer(f"{decode_worker.__name__}.serve", _ONE_THREAD)
_jobs: weakref.WeakSet[_DecodeJob] = weakref.WeakSet()
_libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the GIL: getting it back takes longer than the call
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def prestart() -> None:
    """Start the fork server in the background."""
    _server.start()


def shutdown() -> None:
    """Stop the fork server. It is started again when needed."""
    _server.stop()


def read_chunks(
    chunks: Iterable[Sequence[pathlib.Path]], crop: Crop, *, keep_jpeg: bool, ahead: int, count: int
) -> Generator[list[ReadResult], None, None]:
    """Yield the results of each chunk in order, read by `count` workers up to `ahead` chunks (or two per worker) early.

    Ends early if no workers can be started; the remaining chunks are then the caller's to read.
    """
    if not all(
        str(getattr(opener, "__module__", "")).startswith("PIL.") for opener, _ in Image.OPEN.values()
    ):
        logger.debug("reading files in threads: workers lack the Pillow plugins registered in this process")
        return
    settings = DecodeSettings(crop, keep_jpeg, Image.MAX_IMAGE_PIXELS, bool(ImageFile.LOAD_TRUNCATED_IMAGES))
    job = _DecodeJob(settings, iter(chunks), max(ahead, _IN_FLIGHT * count))
    try:
        job.start(count)
        yield from job.results()
    finally:
        job.close()


@dataclass(eq=False)
class _Chunk:
    """Files, and the results for the first `len(results)` of them."""

    files: Sequence[pathlib.Path]
    results: list[ReadResult] = field(default_factory=list)
    size: int = 0
    """Bytes of the shared buffers that hold the results."""
    one_by_one: bool = False
    """Set once a worker has crashed on this chunk, to find the file that crashes it."""

    @property
    def remaining(self) -> Sequence[pathlib.Path]:
        return self.files[len(self.results) :]

    @property
    def next_files(self) -> Sequence[pathlib.Path]:
        return self.remaining[:1] if self.one_by_one else self.remaining


class _Worker:
    """Parent side of a connection to a worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.process: int | None = None
        """Process id, known once the worker has announced itself."""
        self.in_flight: deque[tuple[_Chunk, _MappedBuffer | None]] = deque()
        """Chunks with the buffer each is written to, None if that buffer is not mapped yet."""
        self.free: deque[_MappedBuffer] = deque()
        self.buffers = 0

    def send(self, chunk: _Chunk) -> None:
        buffer = self.free.popleft() if self.free else None
        number = self.buffers if buffer is None else buffer.number
        self.buffers += buffer is None
        self.in_flight.append((chunk, buffer))
        task = pickle.dumps((number, [*map(os.fsencode, chunk.next_files)]))
        with suppress(ConnectionError):  # a dead worker is handled when its replies are polled
            self.connection.sendall(task)


class _MappedBuffer:
    """A worker's shared buffer, mapped into this process."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number, self.size = number, size
        self.address = _libc.mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
        )
        if self.address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"cannot map {size:,} bytes shared by a decode worker")
        weakref.finalize(self, _libc.munmap, self.address, size).atexit = False


class _BufferLease:
    """Array exporter over one reply. Its buffer becomes free when the last array viewing it is collected."""

    def __init__(self, buffer: _MappedBuffer, worker: _Worker) -> None:
        self._buffer = buffer
        self._free = worker.free if buffer.size <= decode_worker.MAX_REUSED_BYTES else deque[_MappedBuffer]()
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (buffer.size,), "data": (buffer.address, False),
        }  # fmt: skip

    def __del__(self) -> None:
        self._free.append(self._buffer)


class _DecodeJob:
    """The workers of one job, and its chunks from when they are started until they are consumed."""

    def __init__(
        self, settings: DecodeSettings, chunks: Iterator[Sequence[pathlib.Path]], ahead: int
    ) -> None:
        self._settings, self._chunks, self._ahead = settings, chunks, ahead
        self.workers: dict[int, _Worker] = {}
        self._replies = select.poll()
        self._pending: deque[_Chunk] = deque()
        """Chunks not yet consumed, in order."""
        self._unassigned: deque[_Chunk] = deque()
        """Pending chunks that no worker has."""
        self._held = 0
        _jobs.add(self)

    def start(self, count: int) -> None:
        """Request `count` workers. Each is used once it has announced itself."""
        try:
            folder = os.open(os.curdir, os.O_PATH | os.O_CLOEXEC)
            try:
                with _server.exclusive():
                    process = _server.ensure_running()
                    assert process.stdin
                    with socket.socket(fileno=os.dup(process.stdin.fileno())) as requests:
                        for _ in range(count):
                            self._request_worker(requests, folder)
            finally:
                os.close(folder)
        except OSError as error:
            logger.debug("cannot start a decode worker: %s", error)

    def _request_worker(self, requests: socket.socket, folder: int) -> None:
        ours, theirs = socket.socketpair()
        self.workers[ours.fileno()] = _Worker(ours)
        self._replies.register(ours, select.POLLIN)
        with theirs:
            ours.sendall(pickle.dumps(self._settings))
            socket.send_fds(requests, [b"\0"], [theirs.fileno(), folder])

    def close(self) -> None:
        """Disconnect the workers. Each exits after the file it is reading."""
        for worker in self.workers.values():
            worker.connection.close()
        self.workers.clear()
        self._pending.clear()
        self._unassigned.clear()

    def results(self) -> Generator[list[ReadResult], None, None]:
        while self.workers:
            self._assign()
            if not self._pending:
                return
            is_ready = not self._pending[0].remaining
            self._poll(0 if is_ready else POLL_SECONDS)
            if is_ready:
                chunk = self._pending.popleft()
                self._held -= chunk.size
                yield chunk.results
        logger.debug("reading files in threads: no decode worker is left")

    def _assign(self) -> None:
        """Send unassigned chunks to the least busy workers."""
        while len(self._pending) < self._ahead:
            files = next(self._chunks, None)
            if files is None:
                break
            chunk = _Chunk(files)
            self._pending.append(chunk)
            self._unassigned.append(chunk)
        ready = [worker for worker in self.workers.values() if worker.process is not None]
        while self._unassigned and ready:
            worker = min(ready, key=lambda each: len(each.in_flight))
            chunk = self._unassigned[0] if self._held < _MAX_HELD_BYTES else self._pending[0]
            if len(worker.in_flight) >= _IN_FLIGHT or chunk not in self._unassigned:
                return
            self._unassigned.remove(chunk)
            worker.send(chunk)

    def _poll(self, seconds: float) -> None:
        for descriptor, _ in self._replies.poll(seconds * 1000):
            worker = self.workers[descriptor]
            try:
                reply, descriptors, _, _ = socket.recv_fds(worker.connection, REPLY.size, 1)
            except ConnectionError:
                reply, descriptors = b"", []
            try:
                if not reply:
                    self._replace(descriptor)
                elif worker.process is None:
                    worker.process = REPLY.unpack(reply)[0]
                else:
                    self._receive(worker, reply, descriptors)
            finally:
                for each in descriptors:
                    os.close(each)

    def _receive(self, worker: _Worker, reply: bytes, descriptors: Sequence[int]) -> None:
        number, size, end, rows = REPLY.unpack(reply)
        chunk, buffer = worker.in_flight.popleft()
        if descriptors:
            buffer = _MappedBuffer(number, descriptors[0], size)
        assert buffer is not None
        contents = np.asarray(_BufferLease(buffer, worker))
        table = ROW.iter_unpack(contents[end : end + rows * ROW.size].data)
        for file, (kind, begin, length, width, height) in zip(chunk.remaining, table, strict=False):
            part = contents[begin : begin + length]
            if kind == decode_worker.KIND_JPEG:
                chunk.results.append(JpegBytes(file, part, width, height))
            elif kind == decode_worker.KIND_DECODED:
                chunk.results.append(DecodedImage(file, part.reshape(height, width, 3)))
            else:
                chunk.results.append(Unreadable(file, part.tobytes().decode(errors="surrogatepass")))
        chunk.size += size
        self._held += size
        if chunk.remaining:
            self._unassigned.appendleft(chunk)

    def _replace(self, descriptor: int) -> None:
        """Reassign the chunks of a crashed worker, the one it was reading file by file, and start another worker."""
        worker = self.workers.pop(descriptor)
        self._replies.unregister(descriptor)
        worker.connection.close()
        if worker.process is None:  # it never started, so another would not either
            return
        lost = [chunk for chunk, _ in worker.in_flight]
        if lost:
            first = lost[0]
            logger.debug("a decode worker crashed while reading %s", first.next_files)
            if first.one_by_one:
                first.results.append(Unreadable(first.remaining[0], DIED))
            first.one_by_one = True
        self._unassigned.extendleft(chunk for chunk in reversed(lost) if chunk.remaining)
        self.start(1)


def _close_after_fork() -> None:
    """Close the inherited connections in a forked child, so that workers need not wait for it to exit too."""
    for job in tuple(_jobs):
        job.close()


os.register_at_fork(after_in_child=_close_after_fork)
