"""Worker processes that read and decode files for this one, whose interpreter's lock would be waited for by threads.

A job has workers of its own, which end with it. Whoever asks for the next share hears what workers have answered and
gives them more; each has two shares at a time, so that it is not without while nobody asks. What a worker has made is
seen where the worker has put it, and nothing is copied.
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
from escalade_apps.classify.decode_worker import ANSWER, KEPT, PHOTOGRAPH, PICTURE, ROW, Job, Opened, serve
from escalade_apps.classify.images import Crop, Picture, Unreadable
from escalade_apps.classify.jpeg import Photograph

logger = logging.getLogger("escalade")
_QUEUE = 2
"""Shares that a worker has at a time."""
_HELD = 2**30
"""Bytes that may wait to be asked for: with more of them, workers are given only what is asked for next."""
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL")}
"""NumPy's libraries start threads as soon as they are loaded."""
DIED = "a process died over it, and another one that tried again"
_first = ForkServer(f"{serve.__module__}.{serve.__name__}", _ONE_THREAD)
_jobs: weakref.WeakSet[_Running] = weakref.WeakSet()
_system = ctypes.PyDLL(None, use_errno=True)  # with the interpreter's lock: to get it back takes longer
_system.mmap.restype = ctypes.c_void_p
_system.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_system.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def begin() -> None:
    """Makes ready for workers, while the caller goes on."""
    _first.start()


def end() -> None:
    """Ends what makes workers; it is started again when it is needed."""
    _first.stop()


def opened(
    shares: Iterable[Sequence[pathlib.Path]], crop: Crop, *, photographs: bool, ahead: int, count: int
) -> Generator[list[Opened], None, None]:
    """What is made of each share, in their order, by `count` workers; at most `ahead` shares, or two for each
    worker, before they are asked for. Ends early if there are no workers: what is left is left to the caller.
    """
    if not all(
        str(getattr(opener, "__module__", "")).startswith("PIL.") for opener, _ in Image.OPEN.values()
    ):
        logger.debug("files are read by threads: workers do not know formats that Pillow was told of here")
        return
    job = Job(crop, photographs, Image.MAX_IMAGE_PIXELS, bool(ImageFile.LOAD_TRUNCATED_IMAGES))
    running = _Running(job, iter(shares), max(ahead, _QUEUE * count))
    try:
        running.start(count)
        yield from running.made()
    finally:
        running.close()


@dataclass(eq=False)
class _Share:
    """Files, and what has been made of the first of them."""

    files: Sequence[pathlib.Path]
    made: list[Opened] = field(default_factory=list)
    size: int = 0
    """Bytes of the rooms that it is in."""
    singly: bool = False
    """A worker has died over it: from there on file by file."""

    @property
    def left(self) -> Sequence[pathlib.Path]:
        return self.files[len(self.made) :]

    @property
    def next_files(self) -> Sequence[pathlib.Path]:
        return self.left[:1] if self.singly else self.left


class _Worker:
    """The connection to a worker, what it is at, and the rooms that it may write to again."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.process: int | None = None
        """The number of its process, when it has said that it is there."""
        self.shares: deque[tuple[_Share, _Room | None]] = deque()
        """Each with the room that it goes to, if that is known here."""
        self.free: deque[_Room] = deque()
        self.rooms = 0

    def give(self, share: _Share) -> None:
        room = self.free.popleft() if self.free else None
        number = self.rooms if room is None else room.number
        self.rooms += room is None
        self.shares.append((share, room))
        task = pickle.dumps((number, [*map(os.fsencode, share.next_files)]))
        with suppress(ConnectionError):  # one that is gone is noticed when it is listened to
            self.connection.sendall(task)


class _Room:
    """Memory that a worker writes to, seen from here."""

    def __init__(self, number: int, descriptor: int, size: int) -> None:
        self.number, self.size = number, size
        self.address = _system.mmap(
            None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0
        )
        if self.address == _FAILED:
            raise OSError(ctypes.get_errno(), "what a worker has made cannot be seen from here")
        weakref.finalize(self, _system.munmap, self.address, size).atexit = False


class _Use:
    """What a worker has answered with, until the last that was made of it is gone: then its room is free."""

    def __init__(self, room: _Room, worker: _Worker) -> None:
        self._room = room
        self._free = worker.free if room.size <= KEPT else deque[_Room]()
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (room.size,), "data": (room.address, False),
        }  # fmt: skip

    def __del__(self) -> None:
        self._free.append(self._room)


class _Running:
    """A job: its workers, and its shares from when they are begun until they are asked for."""

    def __init__(self, job: Job, shares: Iterator[Sequence[pathlib.Path]], ahead: int) -> None:
        self._job, self._shares, self._ahead = job, shares, ahead
        self.workers: dict[int, _Worker] = {}
        self._answers = select.poll()
        self._waiting: deque[_Share] = deque()
        """In the order in which they are asked for."""
        self._to_do: deque[_Share] = deque()
        """What no worker has of them."""
        self._held = 0
        _jobs.add(self)

    def start(self, count: int) -> None:
        """Asks for so many workers. They are there when they have said so."""
        try:
            folder = os.open(os.curdir, os.O_PATH | os.O_CLOEXEC)
            try:
                with _first.exclusive():
                    process = _first.ensure_running()
                    assert process.stdin
                    with socket.socket(fileno=os.dup(process.stdin.fileno())) as asked:
                        for _ in range(count):
                            self._ask(asked, folder)
            finally:
                os.close(folder)
        except OSError as error:
            logger.debug("no process can be started that reads files: %s", error)

    def _ask(self, asked: socket.socket, folder: int) -> None:
        ours, theirs = socket.socketpair()
        self.workers[ours.fileno()] = _Worker(ours)
        self._answers.register(ours, select.POLLIN)
        with theirs:
            ours.sendall(pickle.dumps(self._job))
            socket.send_fds(asked, [b"\0"], [theirs.fileno(), folder])

    def close(self) -> None:
        """Workers end, each when it is done with the file that it is at."""
        for worker in self.workers.values():
            worker.connection.close()
        self.workers.clear()
        self._waiting.clear()
        self._to_do.clear()

    def made(self) -> Generator[list[Opened], None, None]:
        while self.workers:
            self._begin_more()
            if not self._waiting:
                return
            is_there = not self._waiting[0].left
            self._hear(0 if is_there else POLL_SECONDS)
            if is_there:
                share = self._waiting.popleft()
                self._held -= share.size
                yield share.made
        logger.debug("files are read by threads: there are no processes left that would read them")

    def _begin_more(self) -> None:
        while len(self._waiting) < self._ahead:
            files = next(self._shares, None)
            if files is None:
                break
            share = _Share(files)
            self._waiting.append(share)
            self._to_do.append(share)
        ready = [worker for worker in self.workers.values() if worker.process is not None]
        while self._to_do and ready:
            worker = min(ready, key=lambda each: len(each.shares))
            share = self._to_do[0] if self._held < _HELD else self._waiting[0]
            if len(worker.shares) >= _QUEUE or share not in self._to_do:
                return
            self._to_do.remove(share)
            worker.give(share)

    def _hear(self, seconds: float) -> None:
        for descriptor, _ in self._answers.poll(seconds * 1000):
            worker = self.workers[descriptor]
            try:
                said, descriptors, _, _ = socket.recv_fds(worker.connection, ANSWER.size, 1)
            except ConnectionError:
                said, descriptors = b"", []
            try:
                if not said:
                    self._lose(descriptor)
                elif worker.process is None:
                    worker.process = ANSWER.unpack(said)[0]
                else:
                    self._take(worker, said, descriptors)
            finally:
                for each in descriptors:
                    os.close(each)

    def _take(self, worker: _Worker, said: bytes, descriptors: Sequence[int]) -> None:
        number, size, end, rows = ANSWER.unpack(said)
        share, room = worker.shares.popleft()
        if descriptors:
            room = _Room(number, descriptors[0], size)
        assert room is not None
        seen = np.asarray(_Use(room, worker))
        made = ROW.iter_unpack(seen[end : end + rows * ROW.size].data)
        for file, (kind, begin, length, width, height) in zip(share.left, made, strict=False):
            part = seen[begin : begin + length]
            if kind == PHOTOGRAPH:
                share.made.append(Photograph(file, part, width, height))
            elif kind == PICTURE:
                share.made.append(Picture(file, part.reshape(height, width, 3)))
            else:
                share.made.append(Unreadable(file, part.tobytes().decode(errors="surrogatepass")))
        share.size += size
        self._held += size
        if share.left:
            self._to_do.appendleft(share)

    def _lose(self, descriptor: int) -> None:
        """A worker has died: its shares are for others, and the one that it was at is done file by file."""
        worker = self.workers.pop(descriptor)
        self._answers.unregister(descriptor)
        worker.connection.close()
        if worker.process is None:  # where one cannot be started, another cannot either
            return
        lost = [share for share, _ in worker.shares]
        if lost:
            first = lost[0]
            logger.debug("a process died over %s", first.next_files)
            if first.singly:
                first.made.append(Unreadable(first.left[0], DIED))
            first.singly = True
        self._to_do.extendleft(share for share in reversed(lost) if share.left)
        self.start(1)


def _leave_to_the_parent() -> None:
    """In a process that was forked: workers are not to wait for its end, too."""
    for running in tuple(_jobs):
        running.close()


os.register_at_fork(after_in_child=_leave_to_the_parent)
