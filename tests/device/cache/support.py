"""A cache whose keys a test can read, and queries about its folder."""

from __future__ import annotations

import os
import pathlib
import time
import warnings
from collections.abc import Callable

from escalade.device.cache import (
    FOLDER,
    DiskCache,
    cache_key,
)


class Cache(DiskCache):
    """A cache with readable keys, and a short way to their files."""

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        return super().get(cache_key(key), make)

    def has(self, key: str) -> bool:
        return super().has(cache_key(key))

    def file(self, key: str, suffix: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        return super().file(key if len(key) == 40 else cache_key(key), suffix, make)

    def entry(self, key: str) -> pathlib.Path:
        return self.directory / f"{cache_key(key)}.bin"


def contents(folder: pathlib.Path) -> set[str]:
    """Every file below a folder, except for the marker of a cache."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {FOLDER, f"{FOLDER}/CACHEDIR.TAG"}


def forbidden() -> bytes:
    raise AssertionError("a hit was expected, but the product was made again")


def write_library(path: pathlib.Path) -> None:
    path.write_bytes(bytes(100))


def age(path: pathlib.Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


def assert_serves_without_a_word(cache: Cache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get("k", forbidden) == b"payload"
        assert cache.get("l", lambda: b"another") == b"another"
        assert cache.get("l", forbidden) == b"another"
