"""Eviction down to the size limit, and the files that are never removed."""

from __future__ import annotations

import pathlib

import pytest

from escalade.device.cache import (
    FOLDER,
    SEAL_BYTES,
    Entry,
)
from tests.device.cache.support import Cache, age, contents, forbidden, write_library

# --- files of others


def test_nothing_that_is_not_ours_is_ever_removed(tmp_path: pathlib.Path) -> None:
    """A given folder with unrelated files, much larger and older than the cache may hold."""
    cache = Cache(tmp_path, limit_bytes=500, grace_seconds=0)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "target.bin").write_bytes(bytes(1000))
    old = f"{'0123456789' * 4}.bin"
    for folder in (tmp_path, cache.directory):
        (folder / "making-of").mkdir(parents=True)
        (folder / "making-of" / "film.txt").write_bytes(bytes(1000))
        for name in (
            "archive.tar",
            "data.bin",
            "data.bin.sha256",
            "lib.so",
            "notes.txt",
            f"x{old}",
            f"{old}.sha256",
        ):
            (folder / name).write_bytes(bytes(1000))
    (tmp_path / old).write_bytes(bytes(1000))  # named like an entry, but not in our folder
    (cache.directory / old).symlink_to(outside / "target.bin")
    (cache.directory / "making-abcdefgh").symlink_to(outside)
    (cache.directory / f"{old}.lock").symlink_to(outside / "target.bin")
    (cache.directory / f"{old.replace('bin', 'so')}").mkdir()
    before = contents(tmp_path)
    for name in before:
        age(tmp_path / name, 30 * 24 * 3600)
    for number in range(20):
        cache.get(f"k{number}", lambda: bytes(100))
    assert before <= contents(tmp_path)
    assert cache.size()[1] <= 500


def test_the_folder_is_marked_as_a_cache(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    assert (
        (cache.directory / "CACHEDIR.TAG")
        .read_text()
        .startswith("Signature: 8a477f597d28d172789f06886806bc55\n")
    )


# --- size


def test_the_least_recently_used_is_evicted_first(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path, limit_bytes=3 * (100 + SEAL_BYTES) + 50, grace_seconds=0)
    for position, name in enumerate("abc"):
        cache.get(name, lambda: bytes(100))
        age(cache.entry(name), 1000 - position)
    cache.get("a", forbidden)  # now the most recent
    cache.get("d", lambda: bytes(100))
    assert contents(cache.directory.parent) == {f"{FOLDER}/{cache.entry(name).name}" for name in "acd"}


def test_an_entry_from_the_future_is_evicted_first(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path, limit_bytes=3 * (100 + SEAL_BYTES) + 50)
    for name, seconds in (("a", 1000), ("future", -3600), ("b", 2000)):
        cache.get(name, lambda: bytes(100))
        age(cache.entry(name), seconds)
    cache.get("d", lambda: bytes(100))
    assert [cache.has(name) for name in ("a", "future", "b", "d")] == [True, False, True, True]


def test_the_size_stays_under_the_limit(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path, limit_bytes=1000, grace_seconds=0)
    for number in range(50):
        cache.get(f"k{number}", lambda: bytes(90))
        assert cache.size()[1] <= 1000


def test_an_eviction_makes_room_for_several_entries(tmp_path: pathlib.Path) -> None:
    """Scanning the folder for every new entry would be slow."""
    cache = Cache(tmp_path, limit_bytes=20 * (100 + SEAL_BYTES), grace_seconds=0)
    for number in range(21):
        cache.get(f"k{number}", lambda: bytes(100))
    assert cache.size()[1] <= cache.limit_bytes * 15 / 16


def test_the_folder_is_looked_through_now_and_then(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every entry: with thousands of them, that would take longer than a build."""
    cache = Cache(tmp_path, limit_bytes=100 * (100 + SEAL_BYTES), grace_seconds=0)
    looks: list[int] = []
    real = cache.entries

    def entries() -> list[Entry]:
        looks.append(len(looks))
        return real()

    monkeypatch.setattr(cache, "entries", entries)
    for number in range(50):
        cache.get(f"k{number}", lambda: bytes(100))
    assert 1 <= len(looks) <= 10
    for number in range(4):  # other processes' entries count too
        Cache(tmp_path).get(f"other{number}", lambda: bytes(2500))
    for number in range(50, 70):
        cache.get(f"k{number}", lambda: bytes(100))
    assert real() and cache.size()[1] <= cache.limit_bytes


def test_a_new_entry_stays_even_if_it_alone_is_too_large(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path, limit_bytes=10, grace_seconds=0)
    assert cache.get("large", lambda: bytes(100)) == bytes(100)
    assert cache.get("large", forbidden) == bytes(100)


def test_recently_used_entries_stay(tmp_path: pathlib.Path) -> None:
    """Its file may have been passed to a process that has not opened it yet."""
    cache = Cache(tmp_path, limit_bytes=150 + SEAL_BYTES)
    cache.get("recent", lambda: bytes(100))
    cache.get("old", lambda: bytes(100))
    age(cache.entry("old"), 3600)
    cache.get("new", lambda: bytes(100))
    assert cache.entry("recent").exists()
    assert not cache.entry("old").exists()


# --- entries in use


def test_trimming_removes_the_least_recently_used_and_keeps_entries_about_to_be_opened(
    tmp_path: pathlib.Path,
) -> None:
    cache = Cache(tmp_path)
    for position, name in enumerate("abc"):
        cache.get(name, lambda: bytes(100))
        age(cache.entry(name), 1000 - position)
    library = cache.file("library", ".so", write_library)
    gone = cache.trim(2 * (100 + SEAL_BYTES))
    assert [entry.path for entry in gone] == [cache.entry("a"), cache.entry("b")]
    cache.get("c", forbidden)  # its payload was already read, so it may be evicted
    assert [entry.path for entry in cache.trim(0)] == [cache.entry("c")] and library.exists()
    age(library, 1000)
    assert [entry.path for entry in cache.trim(0)] == [library] and not cache.entries()
