"""Several processes that use one folder at once, and leftovers of a killed one."""

from __future__ import annotations

import contextlib
import multiprocessing
import pathlib
import random
import time
import warnings

import pytest

from escalade.device.cache import (
    FOLDER,
)
from tests.device.cache.support import Cache, age, contents, forbidden


def _make_slowly(directory: pathlib.Path, start, results) -> None:  # type: ignore[no-untyped-def]
    made = []

    def make() -> bytes:
        made.append(1)
        time.sleep(0.05)
        return b"payload" * 10_000

    start.wait()
    right = Cache(directory).get("k", make) == b"payload" * 10_000
    results.put((right, len(made)))


def test_processes_that_miss_the_same_key_at_once_make_it_once(tmp_path: pathlib.Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_make_slowly, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = sorted(results.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    assert found == [(True, 0)] * 3 + [(True, 1)]
    cache = Cache(tmp_path)
    assert cache.get("k", forbidden) == b"payload" * 10_000
    assert contents(tmp_path) == {f"{FOLDER}/{cache.entry('k').name}"}, "no lock and no workshop stays"


def test_a_hit_takes_no_lock(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    monkeypatch.setattr(cache, "_entry_lock", lambda name: forbidden())
    assert cache.get("k", forbidden) == b"payload"


def _churn(directory: pathlib.Path, seed: int, start, results) -> None:  # type: ignore[no-untyped-def]
    draw = random.Random(seed)
    cache = Cache(directory, limit_bytes=2_000)  # about five entries: every miss evicts
    start.wait()
    wrong = 0
    warnings.simplefilter("error")  # no entry is ever partially visible
    for _ in range(300):
        number = draw.randrange(20)
        expected = bytes([number]) * (100 + 30 * number)
        wrong += cache.get(f"k{number}", lambda payload=expected: payload) != expected  # type: ignore[misc]
        if draw.random() < 0.3:
            with contextlib.suppress(FileNotFoundError):  # another process evicted it
                age(cache.entry(f"k{number}"), 120)
    results.put(wrong)


def test_eviction_in_one_process_harms_no_other(tmp_path: pathlib.Path, seed: int) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_churn, args=(tmp_path, seed + n, start, results)) for n in range(3)]
    for process in processes:
        process.start()
    wrong = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert wrong == [0, 0, 0]
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_leftovers_of_a_killed_process_are_removed_after_a_day(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)
    abandoned, current = cache.directory / "making-abandone", cache.directory / "making-current_"
    for folder in (abandoned, current):
        folder.mkdir(parents=True)
        (folder / "half.bin").write_bytes(b"half a pay")
    lock, future = (cache.directory / f"{cache.entry(name).name}.lock" for name in ("gone", "future"))
    for path, days in ((abandoned, 2), (lock, 2), (future, -2)):  # a clock may be wrong
        path.touch()
        age(path, days * 24 * 3600)
    assert cache.size() == (0, 0)
    cache.get("k", lambda: b"payload")
    assert not any(path.exists() for path in (abandoned, lock, future))
    assert current.exists()
    assert cache.get("k", forbidden) == b"payload"
