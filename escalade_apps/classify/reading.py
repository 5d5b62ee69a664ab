"""Read and decode files ahead of the consumer, in order: in worker processes, or in threads of this process."""

from __future__ import annotations

import os
import pathlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import TypeVar, cast

from escalade_apps.classify import jpeg, workers
from escalade_apps.classify.decode_worker import ReadResult
from escalade_apps.classify.images import Crop, DecodedImage, Encoded, Source, Unreadable, try_decode

_DECODE_CHUNK, _READ_CHUNK = 4, 32
"""Files per chunk given to a worker that decodes them, or only reads them."""
_THREAD_CHUNK = 16
"""Most files per chunk given to a thread."""
_MIN_FOR_WORKERS = 64
"""With fewer files, threads finish before worker processes have started."""
_READERS = 2
"""Threads that read local files at a time. One suffices for files in the page cache; 16 waited so long for the GIL that
together they read a fifth of what one did."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def prestart(files: Sequence[Source]) -> None:
    """Start the fork server in the background if these files will be read by workers."""
    if _use_workers(files):
        workers.prestart()


def decode_all(
    files: Sequence[Source], crop: Crop, ahead: int
) -> Generator[DecodedImage | Unreadable, None, None]:
    """Decode files in order, about `ahead` of them before they are consumed."""
    work = partial(_decode_chunk, crop=crop)
    with closing(_read_chunks(files, crop, ahead, _DECODE_CHUNK, work, keep_jpeg=False)) as chunks:
        for chunk in chunks:
            for each in chunk:
                assert not isinstance(each, jpeg.JpegBytes)
                yield each


def open_all(files: Sequence[Source], crop: Crop, ahead: int) -> Generator[Sequence[ReadResult], None, None]:
    """Read JPEG files that all decoders agree on and decode all others, in order and in chunks."""
    # Remote files are waited for without the GIL, so every thread may read them.
    limit = threading.Semaphore(_READERS) if _are_local(files) else nullcontext()
    work = partial(_read_or_decode_chunk, crop=crop, limit=limit)
    return _read_chunks(files, crop, ahead, _READ_CHUNK, work, keep_jpeg=True)


def _read_chunks(
    files: Sequence[Source],
    crop: Crop,
    ahead: int,
    most: int,
    work: Callable[[Sequence[Source]], Sequence[ReadResult]],
    *,
    keep_jpeg: bool,
) -> Generator[Sequence[ReadResult], None, None]:
    """Read chunks of at most `most` files with workers, and what those leave with threads that run `work`."""
    done = 0
    if _use_workers(files):
        paths = chunks(cast(Sequence[pathlib.Path], files), most)
        count = min(cores(), len(files))
        with closing(
            workers.read_chunks(paths, crop, keep_jpeg=keep_jpeg, ahead=ahead // most, count=count)
        ) as from_workers:
            for chunk in from_workers:
                done += len(chunk)
                yield chunk
    if done < len(files):
        most = min(most, _THREAD_CHUNK)
        with closing(map_ordered(chunks(files[done:], most), work, ahead // most)) as from_threads:
            yield from from_threads


def _are_local(files: Sequence[Source]) -> bool:
    return not any(isinstance(file, Encoded) for file in files)


def _use_workers(files: Sequence[Source]) -> bool:
    return len(files) >= _MIN_FOR_WORKERS and _are_local(files)


def chunks(files: Sequence[Item], most: int) -> Iterator[Sequence[Item]]:
    """Split items into chunks of at most `most`, small enough that every core gets one."""
    size = max(1, min(most, len(files) // cores()))
    return (files[start : start + size] for start in range(0, len(files), size))


def cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def map_ordered(
    items: Iterable[Item], work: Callable[[Item], Result], ahead: int, threads: int | None = None
) -> Generator[Result, None, None]:
    """Yield `work(item)` in order, computed by `threads` threads (default: one per core) up to `ahead` items early."""
    threads = threads or cores()
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(threads, "escalade-decode")
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) >= max(ahead, threads):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_chunk(files: Sequence[Source], crop: Crop) -> list[DecodedImage | Unreadable]:
    return [try_decode(file, crop) for file in files]


def _read_or_decode_chunk(
    files: Sequence[Source], crop: Crop, limit: AbstractContextManager[object]
) -> list[ReadResult]:
    with limit:
        jpegs = [jpeg.read(file, crop) for file in files]
    return [each or try_decode(file, crop) for file, each in zip(files, jpegs, strict=True)]
