"""Decode worker processes: read and decode files into memory shared with the parent process.

A fork server imports NumPy and Pillow once and forks one worker per connection. Neither it nor the workers load PyTorch
or CUDA. A worker receives file names as bytes and replies with offsets into a shared buffer (a memfd). Buffers are
reused once the parent drops what was in them: mapping and unmapping memory takes longer than filling it.
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

from escalade_apps.classify.images import Crop, DecodedImage, Source, Unreadable, try_decode
from escalade_apps.classify.jpeg import JpegBytes, read_jpeg_or_decode

IDLE_SECONDS = 60.0
"""The fork server exits after this many seconds without a request."""
FLUSH_BYTES = 2**24
"""A worker replies once its buffer holds this many bytes, even if files of the chunk are left."""
MAX_REUSED_BYTES = 2**25
"""Larger buffers are released instead of reused."""
REPLY = struct.Struct("=4Q")
"""Buffer number, buffer size, end of the images (= start of the rows), row count. A worker's first reply announces that
it runs: its process id and three zeros."""
ROW = struct.Struct("=5Q")
"""Kind of result, offset and length in the buffer, width, height."""
KIND_JPEG, KIND_DECODED, KIND_UNREADABLE = range(3)
_ALIGNMENT = 64
ReadResult = JpegBytes | DecodedImage | Unreadable


@dataclass(frozen=True)
class DecodeSettings:
    """Settings for all files of a job, including the parent's Pillow settings."""

    crop: Crop
    keep_jpeg: bool
    """Return JPEG files that all decoders agree on as bytes, for a decoder on the GPU."""
    max_pixels: int | None
    load_truncated: bool

    def reader(self) -> Callable[[Source, Crop], ReadResult]:
        return read_jpeg_or_decode if self.keep_jpeg else try_decode


def serve() -> None:
    """Run the fork server: fork a worker for every (connection, working directory) pair of descriptors received."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes our socket
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap workers without wait()
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(2, 1)
    try:
        os.close(os.memfd_create("escalade"))
    except (AttributeError, OSError):  # no memfd: the parent sees the socket close and falls back to threads
        return
    Image.preinit()
    Image.init()
    gc.freeze()  # a collection would touch every object and so copy the pages shared with the workers
    while select.select([requests], [], [], IDLE_SECONDS)[0]:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 2)
        if not message:
            return
        with suppress(OSError):  # at the process limit: closing the connection tells the parent
            if len(descriptors) == 2 and not os.fork():
                _run_worker(requests, *descriptors)
        for each in descriptors:
            os.close(each)


def _run_worker(requests: socket.socket, connection: int, folder: int) -> None:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests.close()
        os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
        os.fchdir(folder)
        os.close(folder)
        with suppress(EOFError, pickle.UnpicklingError, ConnectionError):  # the parent is gone
            _Worker(socket.socket(fileno=connection)).run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # skip the exit handlers that belong to the fork server


class _Worker:
    """Worker side of a connection, with the buffers it has sent to the parent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffers: dict[int, _SharedBuffer] = {}
        self._hung_up = select.poll()
        self._hung_up.register(connection, 0)

    def run(self) -> None:
        source = self._connection.makefile("rb")
        self._connection.sendall(REPLY.pack(os.getpid(), 0, 0, 0))
        settings: DecodeSettings = pickle.load(source)
        Image.MAX_IMAGE_PIXELS = settings.max_pixels
        ImageFile.LOAD_TRUNCATED_IMAGES = settings.load_truncated
        while True:
            number, names = pickle.load(source)
            if number not in self._buffers:
                self._buffers[number] = _SharedBuffer()
            buffer = self._buffers[number]
            end, rows = self._fill(buffer, settings, names)
            descriptors = [buffer.descriptor] if buffer.grow() else []
            self._send(REPLY.pack(number, buffer.size, end, rows), descriptors)
            if buffer.size > MAX_REUSED_BYTES:
                os.close(self._buffers.pop(number).descriptor)

    def _fill(
        self, buffer: _SharedBuffer, settings: DecodeSettings, names: Sequence[bytes]
    ) -> tuple[int, int]:
        """Write images, then one row per file. Return the end of the images and the row count."""
        rows: list[bytes] = []
        buffer.end = 0
        read = settings.reader()
        for name in names:
            if self._hung_up.poll(0):
                raise EOFError
            result = read(pathlib.Path(os.fsdecode(name)), settings.crop)
            if isinstance(result, JpegBytes):
                row = (KIND_JPEG, *buffer.append(result.contents.data), result.width, result.height)
            elif isinstance(result, DecodedImage):
                height, width, _ = result.pixels.shape
                row = (KIND_DECODED, *buffer.append(result.pixels.data), width, height)
            else:
                row = (KIND_UNREADABLE, *buffer.append(result.reason.encode(errors="surrogatepass")), 0, 0)
            rows.append(ROW.pack(*row))
            if buffer.end >= FLUSH_BYTES:
                break
        end, _ = buffer.append(b"".join(rows))
        return end, len(rows)

    def _send(self, reply: bytes, descriptors: list[int]) -> None:
        while True:
            try:
                socket.send_fds(self._connection, [reply], descriptors)
                return
            except OSError as error:
                # The kernel limits descriptors in flight per user, so wait for others to be received.
                if error.errno != errno.ETOOMANYREFS:
                    raise
            time.sleep(0.01)


class _SharedBuffer:
    """Growable memfd. `size` is what the parent has mapped, `end` the next free byte."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("escalade-images", os.MFD_CLOEXEC)
        self.size = self.end = 0

    def append(self, contents: memoryview | bytes) -> tuple[int, int]:
        """Write `contents` at the next aligned offset. Return the offset and the length."""
        begin = -(-self.end // _ALIGNMENT) * _ALIGNMENT
        left = memoryview(contents).cast("B")
        self.end = begin + len(left)
        while left:
            left = left[os.pwrite(self.descriptor, left, self.end - len(left)) :]
        return begin, self.end - begin

    def grow(self) -> bool:
        """Enlarge a file that was outgrown, by a quarter more than needed. Return True if the parent must remap it."""
        if self.end <= self.size:
            return False
        self.size = self.end + self.end // 4
        os.ftruncate(self.descriptor, self.size)
        return True
