"""What worker processes do: they read and decode files into memory that whoever asked for them sees too.

The first of them imports NumPy and Pillow, and copies itself for every worker; none has PyTorch or CUDA. A worker is
told of files by their names' bytes and answers where in a *room*, a file in memory, it has put them. Rooms are written
to again when nobody uses what was in them: to get memory from the system and to give it back takes longer than to fill
it.
"""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import pickle
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from PIL import Image, ImageFile

from escalade_apps.classify.images import Crop, Picture, Source, Unreadable, attempt
from escalade_apps.classify.jpeg import Photograph, photograph_or_picture

IDLE_SECONDS = 60.0
"""How long the first process stays when nobody asks for workers."""
FULL = 2**24
"""Bytes in a room with which a worker answers, whether its share is done or not."""
KEPT = 2**25
"""Bytes of a room up to which it is kept to be used again."""
ANSWER = struct.Struct("=4Q")
"""The room's number and its size, where in it the images end and rows begin, and how many rows there are. A worker's
first answer is that it is there: its process's number, and zeros."""
ROW = struct.Struct("=5Q")
"""What was made of a file, where in the room that is and how many bytes, its width and its height."""
PHOTOGRAPH, PICTURE, UNREADABLE = range(3)
_ALIGNED = 64
Opened = Photograph | Picture | Unreadable


@dataclass(frozen=True)
class Job:
    """What is wanted of all files: whether JPEG files that decoders read alike are wanted as they are; and what whoever
    asks has told Pillow."""

    crop: Crop
    photographs: bool
    most_pixels: int | None
    truncated: bool

    def opener(self) -> Callable[[Source, Crop], Opened]:
        """What makes something of a file."""
        return photograph_or_picture if self.photographs else attempt


def serve() -> None:
    """The first process: copies itself for every connection that it is sent, with the folder that names are of."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is for whoever asks, who ends them
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the copies ended
    asked = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)
    try:
        os.close(os.memfd_create("escalade"))
    except (AttributeError, OSError):  # whoever asks finds nobody here, and goes without
        return
    Image.preinit()
    Image.init()
    gc.freeze()  # what is looked through for garbage is copied
    while select.select([asked], [], [], IDLE_SECONDS)[0]:
        said, descriptors, _, _ = socket.recv_fds(asked, 1, 2)
        if not said:
            return
        with suppress(OSError):  # where there may be no more processes, the connection ends
            if len(descriptors) == 2 and not os.fork():
                _be_a_worker(asked, *descriptors)
        for each in descriptors:
            os.close(each)


def _be_a_worker(asked: socket.socket, connection: int, folder: int) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        asked.close()
        os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
        os.fchdir(folder)
        os.close(folder)
        with suppress(EOFError, pickle.UnpicklingError, ConnectionError):  # whoever asked is gone
            _Worker(socket.socket(fileno=connection)).work()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # at once: what the first process has loaded is not this one's to put away


class _Worker:
    """A connection, and the rooms that were answered with."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._rooms: dict[int, _Room] = {}
        self._hung_up = select.poll()
        self._hung_up.register(connection, 0)

    def work(self) -> None:
        source = self._connection.makefile("rb")
        self._connection.sendall(ANSWER.pack(os.getpid(), 0, 0, 0))
        job: Job = pickle.load(source)
        Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES = job.most_pixels, job.truncated
        while True:
            number, names = pickle.load(source)
            if number not in self._rooms:
                self._rooms[number] = _Room()
            room = self._rooms[number]
            end, rows = self._filled(room, job, names)
            descriptors = [room.descriptor] if room.grow() else []
            self._answer(ANSWER.pack(number, room.size, end, rows), descriptors)
            if room.size > KEPT:
                os.close(self._rooms.pop(number).descriptor)

    def _filled(self, room: _Room, job: Job, names: Sequence[bytes]) -> tuple[int, int]:
        """Where in the room the images end, and how many rows are behind them."""
        rows: list[bytes] = []
        room.end = 0
        opener = job.opener()
        for name in names:
            if self._hung_up.poll(0):
                raise EOFError
            made = opener(pathlib.Path(os.fsdecode(name)), job.crop)
            if isinstance(made, Photograph):
                row = (PHOTOGRAPH, *room.put(made.contents.data), made.width, made.height)
            elif isinstance(made, Picture):
                height, width, _ = made.pixels.shape
                row = (PICTURE, *room.put(made.pixels.data), width, height)
            else:
                row = (UNREADABLE, *room.put(made.reason.encode(errors="surrogatepass")), 0, 0)
            rows.append(ROW.pack(*row))
            if room.end >= FULL:
                break
        end, _ = room.put(b"".join(rows))
        return end, len(rows)

    def _answer(self, answer: bytes, descriptors: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._connection, [answer], descriptors)
                return
            except OSError as error:
                # Of all processes of a user only so many are on their way at a time.
                if error.errno != errno.ETOOMANYREFS:
                    raise
            time.sleep(0.01)


class _Room:
    """A file in memory: how large whoever asked knows it to be, and where the next thing goes."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("escalade-images", os.MFD_CLOEXEC)
        self.size = self.end = 0

    def put(self, contents: memoryview | bytes) -> tuple[int, int]:
        """Writes something, and says where, and how many bytes it has."""
        begin = -(-self.end // _ALIGNED) * _ALIGNED
        left = memoryview(contents).cast("B")
        self.end = begin + len(left)
        while left:
            left = left[os.pwrite(self.descriptor, left, self.end - len(left)) :]
        return begin, self.end - begin

    def grow(self) -> bool:
        """Whether it has become larger than whoever asked knows: by more than is needed, so that it is seldom."""
        if self.end <= self.size:
            return False
        self.size = self.end + self.end // 4
        os.ftruncate(self.descriptor, self.size)
        return True
