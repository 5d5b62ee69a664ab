"""Files read and decoded ahead of whoever asks, in their order: by worker processes, or by threads of this one."""

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
from escalade_apps.classify.decode_worker import Opened
from escalade_apps.classify.images import Crop, Encoded, Picture, Source, Unreadable, attempt

_PICTURES, _PHOTOGRAPHS = 4, 32
"""Files that a worker has at a time: such as are decoded there, and such as are only read."""
_IN_A_ROW = 16
"""Files that a thread has at a time, at the most."""
_FEW = 64
"""Files that are not worth processes: threads are done with them in the time that those take to be there."""
_READERS = 2
"""Threads that read files at a time. One is enough for files that are in memory, and of 16 each waited so long for the
interpreter's lock that all of them together read a fifth of what one did."""
Given = TypeVar("Given")
Made = TypeVar("Made")


def begin(files: Sequence[Source]) -> None:
    """Makes ready for workers if there will be some, while the caller goes on."""
    if _are_for_workers(files):
        workers.begin()


def decode_all(
    files: Sequence[Source], crop: Crop, ahead: int
) -> Generator[Picture | Unreadable, None, None]:
    """Pictures in the order of the files, about `ahead` of them before they are asked for."""
    work = partial(_attempts, crop=crop)
    with closing(_in_shares(files, crop, ahead, _PICTURES, work, photographs=False)) as made:
        for some in made:
            for each in some:
                assert not isinstance(each, jpeg.Photograph)
                yield each


def open_all(files: Sequence[Source], crop: Crop, ahead: int) -> Generator[Sequence[Opened], None, None]:
    """JPEG files that all decoders read alike as they are, pictures of all others; a few at a time, as `decode_all`."""
    # What is elsewhere is waited for without the lock, so by as many threads as there are.
    limit = threading.Semaphore(_READERS) if _are_here(files) else nullcontext()
    work = partial(_opened, crop=crop, limit=limit)
    return _in_shares(files, crop, ahead, _PHOTOGRAPHS, work, photographs=True)


def _in_shares(
    files: Sequence[Source],
    crop: Crop,
    ahead: int,
    most: int,
    work: Callable[[Sequence[Source]], Sequence[Opened]],
    *,
    photographs: bool,
) -> Generator[Sequence[Opened], None, None]:
    """What is made by workers, and by threads that do `work` what those leave."""
    done = 0
    if _are_for_workers(files):
        given = shares(cast(Sequence[pathlib.Path], files), most)
        count = min(cores(), len(files))
        with closing(
            workers.opened(given, crop, photographs=photographs, ahead=ahead // most, count=count)
        ) as made:
            for some in made:
                done += len(some)
                yield some
    if done < len(files):
        most = min(most, _IN_A_ROW)
        with closing(in_order(shares(files[done:], most), work, ahead // most)) as also_made:
            yield from also_made


def _are_here(files: Sequence[Source]) -> bool:
    return not any(isinstance(file, Encoded) for file in files)


def _are_for_workers(files: Sequence[Source]) -> bool:
    return len(files) >= _FEW and _are_here(files)


def shares(files: Sequence[Given], most: int) -> Iterator[Sequence[Given]]:
    """The items a few at a time, so that work is seldom given out; not so many that a core would have none."""
    size = max(1, min(most, len(files) // cores()))
    return (files[place : place + size] for place in range(0, len(files), size))


def cores() -> int:
    """How many this process may run on."""
    return len(os.sched_getaffinity(0))


def in_order(
    items: Iterable[Given], work: Callable[[Given], Made], ahead: int, workers: int | None = None
) -> Generator[Made, None, None]:
    """What is made of each item, in their order, by so many threads, one for each core if it is not said; at most
    `ahead` items before they are asked for.
    """
    workers = workers or cores()
    waiting: deque[Future[Made]] = deque()
    pool = ThreadPoolExecutor(workers, "escalade-decode")
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= max(ahead, workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _attempts(files: Sequence[Source], crop: Crop) -> list[Picture | Unreadable]:
    return [attempt(file, crop) for file in files]


def _opened(files: Sequence[Source], crop: Crop, limit: AbstractContextManager[object]) -> list[Opened]:
    with limit:
        photographs = [jpeg.read(file, crop) for file in files]
    return [
        attempt(file, crop) if photograph is None else photograph
        for file, photograph in zip(files, photographs, strict=True)
    ]
