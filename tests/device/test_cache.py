"""The disk cache under everything that happens to one: damage, races, full disks, other people's folders."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escalade.device import cache as cache_module
from escalade.device.cache import DiskCache, cache_key, default_cache, default_directory


def forbidden() -> bytes:
    raise AssertionError("a hit was expected, but the product was made again")


def age(path: pathlib.Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))


# --- keys


@given(st.lists(st.binary(max_size=8), max_size=4), st.lists(st.binary(max_size=8), max_size=4))
def test_keys_differ_exactly_when_their_parts_do(first: list[bytes], second: list[bytes]) -> None:
    assert (cache_key(*first) == cache_key(*second)) == (first == second)


def test_parts_cannot_run_into_each_other() -> None:
    assert len({cache_key("ab", "c"), cache_key("a", "bc"), cache_key("abc"), cache_key("abc", "")}) == 4


def test_the_schema_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key("source")
    monkeypatch.setattr(cache_module, "SCHEMA", cache_module.SCHEMA + 1)
    assert cache_key("source") != before


def test_a_key_is_a_plain_file_name() -> None:
    assert cache_key("../../etc", "\0", "ü").isalnum()


# --- hits and misses


def test_the_second_time_is_a_hit(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path / "not" / "there" / "yet")
    assert cache.get("k", lambda: b"payload") == b"payload"
    assert cache.get("k", forbidden) == b"payload"
    assert (cache.hits, cache.misses) == (1, 1)
    assert DiskCache(cache.directory).get("k", forbidden) == b"payload"
    assert cache.size() == (1, len(b"payload"))


def test_an_empty_payload_is_a_payload(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path)
    assert cache.get("k", lambda: b"") == b""
    assert cache.get("k", forbidden) == b""


def test_files_of_one_key_with_different_suffixes_are_different_entries(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path)

    def write(path: pathlib.Path) -> None:
        path.write_bytes(b"library")

    library = cache.file("k", ".so", write)
    assert cache.get("k", lambda: b"payload") == b"payload"
    assert library.read_bytes() == b"library"


def test_a_failed_build_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("the compiler said no")

    cache = DiskCache(tmp_path)
    with pytest.raises(RuntimeError, match="the compiler said no"):
        cache.get("k", fail)
    assert list(tmp_path.iterdir()) == []
    assert cache.get("k", lambda: b"payload") == b"payload"


def test_an_error_of_the_build_is_not_taken_for_one_of_the_folder(tmp_path: pathlib.Path) -> None:
    def fail() -> bytes:
        raise FileNotFoundError("g++")

    with pytest.raises(FileNotFoundError, match=r"g\+\+"):
        DiskCache(tmp_path).get("k", fail)


# --- damage: every one of these is a miss, and afterwards the entry is whole


def _corrupt(payload: pathlib.Path, checksum: pathlib.Path) -> None:
    payload.write_bytes(b"pAyload")


def _truncate(payload: pathlib.Path, checksum: pathlib.Path) -> None:
    payload.write_bytes(b"pay")


def _empty(payload: pathlib.Path, checksum: pathlib.Path) -> None:
    payload.write_bytes(b"")


def _lose_payload(payload: pathlib.Path, checksum: pathlib.Path) -> None:
    payload.unlink()


def _lose_checksum(payload: pathlib.Path, checksum: pathlib.Path) -> None:
    checksum.unlink()


def _truncate_checksum(payload: pathlib.Path, checksum: pathlib.Path) -> None:
    checksum.write_bytes(checksum.read_bytes()[:10])


def _checksum_of_noise(payload: pathlib.Path, checksum: pathlib.Path) -> None:
    checksum.write_bytes(b"\xff\xfe\x00 no text at all")


@pytest.mark.parametrize(
    "damage",
    [_corrupt, _truncate, _empty, _lose_payload, _lose_checksum, _truncate_checksum, _checksum_of_noise],
)
def test_damage_is_a_miss_and_is_repaired(tmp_path: pathlib.Path, damage) -> None:  # type: ignore[no-untyped-def]
    cache = DiskCache(tmp_path)
    cache.get("k", lambda: b"payload")
    damage(tmp_path / "k.bin", tmp_path / "k.bin.sha256")
    made = []
    assert cache.get("k", lambda: made.append(1) or b"payload") == b"payload"  # type: ignore[func-returns-value]
    assert made == [1]
    assert cache.get("k", forbidden) == b"payload"


# --- size


def test_the_least_recently_used_goes_first(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path, limit_bytes=350, grace_seconds=0)
    for position, name in enumerate("abc"):
        cache.get(name, lambda: bytes(100))
        age(tmp_path / f"{name}.bin", 1000 - position)
    cache.get("a", forbidden)  # now the most recent
    cache.get("d", lambda: bytes(100))
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.bin{suffix}" for name in "acd" for suffix in ("", ".sha256")
    }


def test_the_size_stays_under_the_limit(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path, limit_bytes=1000, grace_seconds=0)
    for number in range(50):
        cache.get(f"k{number}", lambda: bytes(90))
        assert cache.size()[1] <= 1000


def test_the_folder_is_looked_through_now_and_then(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every entry: where there are thousands, that would take longer than a build."""
    cache = DiskCache(tmp_path, limit_bytes=10_000, grace_seconds=0)
    looks: list[int] = []
    real = cache._entries

    def entries() -> list[tuple[float, int, pathlib.Path]]:
        looks.append(len(looks))
        return real()

    monkeypatch.setattr(cache, "_entries", entries)
    for number in range(50):
        cache.get(f"k{number}", lambda: bytes(100))
    assert 1 <= len(looks) <= 10
    for number in range(4):  # what other processes write counts too
        DiskCache(tmp_path).get(f"other{number}", lambda: bytes(1500))
    for number in range(50, 70):
        cache.get(f"k{number}", lambda: bytes(100))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) <= 10_000


def test_what_was_just_made_stays_even_if_it_alone_is_too_large(tmp_path: pathlib.Path) -> None:
    cache = DiskCache(tmp_path, limit_bytes=10, grace_seconds=0)
    assert cache.get("large", lambda: bytes(100)) == bytes(100)
    assert cache.get("large", forbidden) == bytes(100)


def test_what_was_used_a_moment_ago_stays(tmp_path: pathlib.Path) -> None:
    """Its file may have been handed to a process that has not opened it yet."""
    cache = DiskCache(tmp_path, limit_bytes=150)
    cache.get("recent", lambda: bytes(100))
    cache.get("old", lambda: bytes(100))
    age(tmp_path / "old.bin", 3600)
    cache.get("new", lambda: bytes(100))
    assert (tmp_path / "recent.bin").exists()
    assert not (tmp_path / "old.bin").exists()


# --- other processes


def _make_slowly(directory: pathlib.Path, start, results) -> None:  # type: ignore[no-untyped-def]
    def make() -> bytes:
        time.sleep(0.05)
        return b"payload" * 10_000

    start.wait()
    results.put(DiskCache(directory).get("k", make) == b"payload" * 10_000)


def test_two_processes_make_the_same_key_at_once(tmp_path: pathlib.Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=_make_slowly, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    right = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert right == [True] * 4
    assert DiskCache(tmp_path).get("k", forbidden) == b"payload" * 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.bin", "k.bin.sha256"]


def _churn(directory: pathlib.Path, seed: int, start, results) -> None:  # type: ignore[no-untyped-def]
    draw = random.Random(seed)
    cache = DiskCache(directory, limit_bytes=2_000)  # five entries or so: eviction at every miss
    start.wait()
    wrong = 0
    for _ in range(300):
        number = draw.randrange(20)
        expected = bytes([number]) * (100 + 30 * number)
        wrong += cache.get(f"k{number}", lambda payload=expected: payload) != expected  # type: ignore[misc]
        if draw.random() < 0.3:
            with contextlib.suppress(FileNotFoundError):  # another process evicted it
                age(directory / f"k{number}.bin", 120)
    results.put(wrong)


def test_eviction_in_one_process_harms_no_other(tmp_path: pathlib.Path, seed: int) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_churn, args=(tmp_path, seed + n, start, results)) for n in range(3)]
    for process in processes:
        process.start()
    wrong = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert wrong == [0, 0, 0]
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: pathlib.Path) -> None:
    abandoned, current = tmp_path / "making-abandoned", tmp_path / "making-current"
    for folder in (abandoned, current):
        folder.mkdir()
        (folder / "half.bin").write_bytes(b"half a pay")
    orphan = tmp_path / "gone.bin.sha256"
    orphan.write_text("0" * 64)
    for path in (abandoned, orphan):
        age(path, 2 * 24 * 3600)
    cache = DiskCache(tmp_path)
    assert cache.size() == (0, 0)
    cache.get("k", lambda: b"payload")
    age(tmp_path / "k.bin.sha256", 2 * 24 * 3600)
    DiskCache(tmp_path).get("l", lambda: b"payload")
    assert not abandoned.exists() and not orphan.exists()
    assert current.exists()
    assert cache.get("k", forbidden) == b"payload"


# --- folders that cannot be written to


def test_a_folder_that_cannot_be_made_is_replaced_for_this_process(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = DiskCache(blocked / "cache")
    with pytest.warns(UserWarning, match="ESCALADE_CACHE_DIR"):
        assert cache.get("k", lambda: b"payload") == b"payload"
    assert cache.get("k", forbidden) == b"payload"
    assert cache.get("l", lambda: b"another") == b"another"  # and warns no second time
    assert cache.size() == (0, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_read_only_folder_still_serves(tmp_path: pathlib.Path) -> None:
    DiskCache(tmp_path).get("k", lambda: b"payload")
    tmp_path.chmod(0o555)
    try:
        cache = DiskCache(tmp_path)
        assert cache.get("k", forbidden) == b"payload"
        with pytest.warns(UserWarning, match="cannot be written to"):
            assert cache.get("l", lambda: b"another") == b"another"
        assert cache.get("l", forbidden) == b"another"
    finally:
        tmp_path.chmod(0o755)


def test_an_unwritable_folder_still_serves(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the test above, for those who run tests as root."""
    cache = DiskCache(tmp_path)
    cache.get("k", lambda: b"payload")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    make_folder = cache_module.tempfile.mkdtemp
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(
        cache_module.tempfile,
        "mkdtemp",
        lambda *a, **k: refuse() if k.get("dir") == tmp_path else make_folder(*a, **k),
    )
    assert cache.get("k", forbidden) == b"payload"
    with pytest.warns(UserWarning, match="Permission denied"):
        assert cache.get("l", lambda: b"another") == b"another"
    assert cache.get("l", forbidden) == b"another"


# --- where it is


def test_the_environment_names_the_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_directory() == tmp_path / "chosen"
    assert default_cache().directory == tmp_path / "chosen"
    assert default_cache() is default_cache()
    monkeypatch.delenv("ESCALADE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "escalade"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == pathlib.Path.home() / ".cache" / "escalade"
