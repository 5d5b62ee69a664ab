"""The disk cache under everything that happens to one: damage, races, full disks, other people's folders."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import pathlib
import random
import signal
import stat
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escalade.device import cache as cache_module
from escalade.device import trust
from escalade.device.cache import (
    FOLDER,
    SEAL_BYTES,
    DiskCache,
    cache_key,
    default_cache,
    default_directory,
)
from escalade.errors import CompileError


class Cache(DiskCache):
    """With keys that a test can read, and a short way to their files."""

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        return super().get(cache_key(key), make)

    def has(self, key: str) -> bool:
        return super().has(cache_key(key))

    def file(self, key: str, suffix: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        return super().file(key if len(key) == 40 else cache_key(key), suffix, make)

    def entry(self, key: str) -> pathlib.Path:
        return self.directory / f"{cache_key(key)}.bin"


def contents(folder: pathlib.Path) -> set[str]:
    """Everything that lies anywhere in a folder, but for the mark of a cache."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {FOLDER, f"{FOLDER}/CACHEDIR.TAG"}


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
    cache = Cache(tmp_path / "not" / "there" / "yet")
    assert cache.get("k", lambda: b"payload") == b"payload"
    assert cache.get("k", forbidden) == b"payload"
    assert (cache.hits, cache.misses) == (1, 1) and not cache.problem()
    assert Cache(tmp_path / "not" / "there" / "yet").get("k", forbidden) == b"payload"
    assert cache.size() == (1, len(b"payload") + SEAL_BYTES)


def test_an_empty_payload_is_a_payload(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)
    assert cache.get("k", lambda: b"") == b""
    assert cache.get("k", forbidden) == b""


def test_files_of_one_key_with_different_suffixes_are_different_entries(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)

    def write(path: pathlib.Path) -> None:
        path.write_bytes(b"library")

    library = cache.file("k", ".so", write)
    assert cache.get("k", lambda: b"payload") == b"payload"
    assert library.read_bytes().startswith(b"library")


def test_a_name_that_is_not_ours_is_no_entry(tmp_path: pathlib.Path) -> None:
    for key, suffix in (("../../etc/passwd", ".so"), (cache_key("k"), ".txt"), ("", ".bin")):
        with pytest.raises(ValueError, match="cache_key"):
            DiskCache(tmp_path).file(key, suffix, lambda path: path.touch())
    assert not contents(tmp_path)


def test_a_failed_build_leaves_nothing(tmp_path: pathlib.Path) -> None:
    def fail() -> bytes:
        raise RuntimeError("the compiler said no")

    cache = Cache(tmp_path)
    with pytest.raises(RuntimeError, match="the compiler said no"):
        cache.get("k", fail)
    assert not contents(tmp_path)
    assert cache.get("k", lambda: b"payload") == b"payload"


def test_an_error_of_the_build_is_not_taken_for_one_of_the_folder(tmp_path: pathlib.Path) -> None:
    def fail() -> bytes:
        raise FileNotFoundError("g++")

    with pytest.raises(FileNotFoundError, match=r"g\+\+"):
        Cache(tmp_path).get("k", fail)


# --- damage: every one of these is a miss that is said, and afterwards the entry is whole


def _corrupt(entry: pathlib.Path) -> None:
    entry.write_bytes(entry.read_bytes().replace(b"payload", b"pAyload"))


def _truncate(entry: pathlib.Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-1])


def _empty(entry: pathlib.Path) -> None:
    entry.write_bytes(b"")


def _extend(entry: pathlib.Path) -> None:
    entry.write_bytes(entry.read_bytes() + b"\0")


def _unseal(entry: pathlib.Path) -> None:
    entry.write_bytes(entry.read_bytes()[:-SEAL_BYTES])


def _noise(entry: pathlib.Path) -> None:
    entry.write_bytes(bytes(range(256)))


def _another(entry: pathlib.Path) -> None:
    """Whole, but what belongs under another name."""
    cache = Cache(entry.parent.parent)
    cache.get("another", lambda: b"another payload")
    os.replace(cache.entry("another"), entry)


DAMAGES = [_corrupt, _truncate, _empty, _extend, _unseal, _noise, _another]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_a_miss_and_is_repaired(
    tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None]
) -> None:
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    damage(cache.entry("k"))
    made = []
    with pytest.warns(UserWarning, match="was damaged .* and is made again"):
        assert cache.get("k", lambda: made.append(1) or b"payload") == b"payload"  # type: ignore[func-returns-value]
    assert made == [1]
    assert cache.get("k", forbidden) == b"payload"


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_not_there(tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None]) -> None:
    cache = Cache(tmp_path)
    assert not cache.has("k")
    cache.get("k", lambda: b"payload")
    assert cache.has("k")
    damage(cache.entry("k"))
    with pytest.warns(UserWarning, match="was damaged"):
        assert not cache.has("k")


def test_a_lost_entry_is_a_miss(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    cache.entry("k").unlink()
    assert not cache.has("k") and cache.get("k", lambda: b"again") == b"again"


KILLED = """
import os, pathlib, signal, sys
from escalade.device.cache import DiskCache, cache_key
step = int(sys.argv[2])

def killed(real):
    def call(*given, **named):
        global step
        if step == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        step -= 1
        return real(*given, **named)
    return call

for name in ("open", "mkdir", "replace", "unlink", "rmdir", "fchmod"):
    setattr(os, name, killed(getattr(os, name)))
DiskCache(pathlib.Path(sys.argv[1])).get(cache_key("k"), lambda: b"payload")
"""


def test_a_process_that_is_killed_anywhere_leaves_an_entry_or_none(tmp_path: pathlib.Path) -> None:
    """Before each of its calls that change the folder, one after another."""
    killed, outcomes = 0, set()
    while True:
        folder = tmp_path / str(killed)
        done = subprocess.run([sys.executable, "-c", KILLED, str(folder), str(killed)], check=False)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        killed += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing of it is damaged
            there = Cache(folder).has("k")
            assert Cache(folder).get("k", forbidden if there else lambda: b"payload") == b"payload"
        outcomes.add(there)
    assert killed >= 4 and outcomes == {False, True}


# --- what else can stand in an entry's place


def _folder(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "of the user").touch()


def _dangling_link(path: pathlib.Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def _link(path: pathlib.Path) -> None:
    path.with_name("elsewhere").write_bytes(b"of the user")
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("put", [_folder, os.mkfifo, _dangling_link, _link])
@pytest.mark.parametrize("suffix", ["", ".lock"], ids=["entry", "lock"])
def test_what_is_in_the_way_does_no_harm(
    tmp_path: pathlib.Path, put: Callable[[pathlib.Path], None], suffix: str
) -> None:
    cache = Cache(tmp_path)
    cache.directory.mkdir()
    put(cache.directory / f"{cache.entry('k').name}{suffix}")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert not cache.has("k")
        assert cache.get("k", lambda: b"payload") == b"payload"
        assert cache.get("k", forbidden) == b"payload"
        open_files = len(os.listdir("/proc/self/fd"))
        cache.has("k")
        assert len(os.listdir("/proc/self/fd")) == open_files
    expected = 1 if put is _folder and not suffix else 0
    assert len(said) == expected, [str(each.message) for each in said]
    if put is _link:
        assert (cache.directory / "elsewhere").read_bytes() == b"of the user"
    if put is _folder:
        assert len(list(cache.directory.rglob("of the user"))) == 1


# --- what is not ours


def test_nothing_that_is_not_ours_is_ever_removed(tmp_path: pathlib.Path) -> None:
    """A folder that was chosen with other things in it, much larger and older than what the cache may hold."""
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
    (tmp_path / old).write_bytes(bytes(1000))  # of our kind of name, but not in our folder
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


def test_the_least_recently_used_goes_first(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path, limit_bytes=3 * (100 + SEAL_BYTES) + 50, grace_seconds=0)
    for position, name in enumerate("abc"):
        cache.get(name, lambda: bytes(100))
        age(cache.entry(name), 1000 - position)
    cache.get("a", forbidden)  # now the most recent
    cache.get("d", lambda: bytes(100))
    assert contents(cache.directory.parent) == {f"{FOLDER}/{cache.entry(name).name}" for name in "acd"}


def test_an_entry_of_the_future_goes_before_all_others(tmp_path: pathlib.Path) -> None:
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


def test_the_folder_is_looked_through_now_and_then(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every entry: where there are thousands, that would take longer than a build."""
    cache = Cache(tmp_path, limit_bytes=100 * (100 + SEAL_BYTES), grace_seconds=0)
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
        Cache(tmp_path).get(f"other{number}", lambda: bytes(2500))
    for number in range(50, 70):
        cache.get(f"k{number}", lambda: bytes(100))
    assert real() and cache.size()[1] <= cache.limit_bytes


def test_what_was_just_made_stays_even_if_it_alone_is_too_large(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path, limit_bytes=10, grace_seconds=0)
    assert cache.get("large", lambda: bytes(100)) == bytes(100)
    assert cache.get("large", forbidden) == bytes(100)


def test_what_was_used_a_moment_ago_stays(tmp_path: pathlib.Path) -> None:
    """Its file may have been handed to a process that has not opened it yet."""
    cache = Cache(tmp_path, limit_bytes=150 + SEAL_BYTES)
    cache.get("recent", lambda: bytes(100))
    cache.get("old", lambda: bytes(100))
    age(cache.entry("old"), 3600)
    cache.get("new", lambda: bytes(100))
    assert cache.entry("recent").exists()
    assert not cache.entry("old").exists()


# --- other processes


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
    found = sorted(results.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found == [(True, 0)] * 3 + [(True, 1)]
    cache = Cache(tmp_path)
    assert cache.get("k", forbidden) == b"payload" * 10_000
    assert contents(tmp_path) == {f"{FOLDER}/{cache.entry('k').name}"}, "no lock and no workshop stays"


def test_a_hit_takes_no_lock(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    monkeypatch.setattr(cache, "_alone", lambda name: forbidden())
    assert cache.get("k", forbidden) == b"payload"


def _churn(directory: pathlib.Path, seed: int, start, results) -> None:  # type: ignore[no-untyped-def]
    draw = random.Random(seed)
    cache = Cache(directory, limit_bytes=2_000)  # five entries or so: eviction at every miss
    start.wait()
    wrong = 0
    warnings.simplefilter("error")  # nothing is ever half there
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
    wrong = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert wrong == [0, 0, 0]
    assert [process.exitcode for process in processes] == [0, 0, 0]


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)
    abandoned, current = cache.directory / "making-abandone", cache.directory / "making-current_"
    for folder in (abandoned, current):
        folder.mkdir(parents=True)
        (folder / "half.bin").write_bytes(b"half a pay")
    lock = cache.directory / f"{cache.entry('gone').name}.lock"
    lock.touch()
    for path in (abandoned, lock):
        age(path, 2 * 24 * 3600)
    assert cache.size() == (0, 0)
    cache.get("k", lambda: b"payload")
    assert not abandoned.exists() and not lock.exists()
    assert current.exists()
    assert cache.get("k", forbidden) == b"payload"


# --- folders that cannot be written to


def test_a_folder_that_cannot_be_made_is_replaced_for_this_process(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = Cache(blocked / "cache")
    with pytest.warns(UserWarning, match="ESCALADE_CACHE_DIR"):
        assert cache.get("k", lambda: b"payload") == b"payload"
    assert_serves_without_a_word(cache)
    assert cache.size() == (0, 0) and blocked.read_text() == "not a folder"
    assert "file" in cache.problem()


def assert_serves_without_a_word(cache: Cache) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get("k", forbidden) == b"payload"
        assert cache.get("l", lambda: b"another") == b"another"
        assert cache.get("l", forbidden) == b"another"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_a_read_only_folder_still_serves(tmp_path: pathlib.Path) -> None:
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    cache.directory.chmod(0o555)
    try:
        cache = Cache(tmp_path)
        assert cache.get("k", forbidden) == b"payload"
        with pytest.warns(UserWarning, match="cannot be written to"):
            assert cache.get("l", lambda: b"another") == b"another"
        assert cache.get("l", forbidden) == b"another"
    finally:
        cache.directory.chmod(0o755)


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_an_unwritable_folder_still_serves(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the test above, for those who run tests as root."""
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    make_folder = cache_module.tempfile.mkdtemp
    monkeypatch.setattr(os, "utime", _refuse)
    monkeypatch.setattr(
        cache_module.tempfile,
        "mkdtemp",
        lambda *a, **k: _refuse() if k.get("dir") == cache.directory else make_folder(*a, **k),
    )
    assert cache.get("k", forbidden) == b"payload"
    with pytest.warns(UserWarning, match="Permission denied"):
        assert cache.get("l", lambda: b"another") == b"another"
    assert cache.get("l", forbidden) == b"another"


def test_a_file_that_may_not_be_replaced_is_passed_by(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a sticky folder another user's entry stays where it is."""
    cache = Cache(tmp_path)
    real = os.replace
    monkeypatch.setattr(
        os, "replace", lambda old, new: _refuse() if cache.directory == new.parent else real(old, new)
    )
    with pytest.warns(UserWarning, match="Permission denied"):
        assert cache.get("k", lambda: b"payload") == b"payload"
    assert_serves_without_a_word(cache)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("when", ["making", "sealing"])
def test_a_full_disk_costs_nothing_but_a_warning(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, when: str, code: int
) -> None:
    cache = Cache(tmp_path)
    tries: list[pathlib.Path] = []

    def refuse_in_the_cache(path: pathlib.Path) -> None:
        tries.append(path)
        if cache.directory in path.parents:
            raise OSError(code, os.strerror(code))

    seal = cache_module._seal

    def refuse_or_seal(path: pathlib.Path) -> None:
        refuse_in_the_cache(path)
        seal(path)

    if when == "sealing":
        monkeypatch.setattr(cache_module, "_seal", refuse_or_seal)

    def make(path: pathlib.Path) -> None:
        if when == "making":
            refuse_in_the_cache(path)
        path.write_bytes(b"library")

    with pytest.warns(UserWarning, match=os.strerror(code)):
        library = cache.file("k", ".so", make)
    assert library.read_bytes().startswith(b"library") and len(tries) == 2
    assert cache.file("k", ".so", lambda path: _refuse()) == library
    assert not contents(tmp_path)


def test_where_nothing_can_be_written_a_payload_still_arrives(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def full(path: pathlib.Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module, "_seal", full)
    cache = Cache(tmp_path)
    with pytest.warns(UserWarning, match="No space left"):
        assert cache.get("k", lambda: made.append(1) or b"payload") == b"payload"  # type: ignore[func-returns-value]
    assert made == [1], "what takes seconds to make is not made twice"
    with pytest.raises(CompileError, match="No space left"):
        cache.file("k", ".so", pathlib.Path.touch)


# --- other users


@pytest.fixture
def as_owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[pathlib.Path, int], None]]:
    """Gives a file or folder to another user, as far as the cache can see."""
    owners: dict[tuple[int, int], int] = {}
    real = {name: getattr(os, name) for name in ("stat", "fstat", "lstat")}

    def changed(status: os.stat_result) -> os.stat_result:
        owner = owners.get((status.st_dev, status.st_ino))
        return status if owner is None else os.stat_result((*status[:4], owner, *status[5:10]))

    for name, call in real.items():
        monkeypatch.setattr(os, name, lambda *a, _call=call, **k: changed(_call(*a, **k)))

    def give(path: pathlib.Path, owner: int) -> None:
        status = real["stat"](path)
        owners[status.st_dev, status.st_ino] = owner

    yield give
    monkeypatch.undo()


@pytest.fixture
def someone(monkeypatch: pytest.MonkeyPatch) -> int:
    """Another user's number; this process is a plain user's with a group that others are in too."""
    monkeypatch.setattr(trust, "_is_private", lambda group, user: False)
    return os.geteuid() + 12345


def _not_served(directory: pathlib.Path, why: str) -> None:
    cache = Cache(directory)
    with pytest.warns(UserWarning, match=why) as said:
        assert not cache.has("k")
        assert cache.get("k", lambda: b"payload") == b"payload"
    assert len(said) == 1
    assert_serves_without_a_word(cache)
    assert cache.entry("k").read_bytes().startswith(b"planted")
    assert why in cache.problem()


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_that_others_can_write_to_does_not_serve(
    tmp_path: pathlib.Path, someone: int, mode: int, above: int
) -> None:
    """Also where it is one that the cache is in: it can be put aside for another one."""
    cache = Cache(tmp_path / "a" / "b")
    cache.get("k", lambda: b"planted")
    place = (cache.directory, *cache.directory.parents)[above]
    place.chmod(mode)
    _not_served(tmp_path / "a" / "b", f"other users can write to {place}")
    place.chmod(mode | stat.S_ISVTX)  # what lies there can only be replaced by its owner
    assert Cache(tmp_path / "a" / "b").get("k", forbidden) == b"planted"


def test_nothing_is_left_in_a_folder_that_is_not_used(tmp_path: pathlib.Path, someone: int) -> None:
    tmp_path.chmod(0o777)
    with pytest.warns(UserWarning, match="other users can write to"):
        Cache(tmp_path / "new").get("k", lambda: b"payload")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("above", [0, 1, 2])
def test_a_folder_of_another_user_does_not_serve(
    tmp_path: pathlib.Path, someone: int, above: int, as_owner: Callable[[pathlib.Path, int], None]
) -> None:
    cache = Cache(tmp_path / "a" / "b")
    cache.get("k", lambda: b"planted")
    place = (cache.directory, *cache.directory.parents)[above]
    as_owner(place, 0)  # root may do anything anyway
    assert Cache(tmp_path / "a" / "b").get("k", forbidden) == b"planted"
    as_owner(place, someone)
    _not_served(tmp_path / "a" / "b", f"{place} belongs to another user")


def test_who_installed_the_package_could_do_anything_anyway(
    tmp_path: pathlib.Path,
    someone: int,
    as_owner: Callable[[pathlib.Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As root in a container that has a user's checkout in it."""
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    as_owner(tmp_path, someone)
    assert not Cache(tmp_path).has("k")
    with monkeypatch.context() as installed:
        installed.setattr(trust, "_author", lambda: someone)
        assert Cache(tmp_path).has("k")
    with monkeypatch.context() as installed:
        installed.setattr(trust, "_AROUND", frozenset({tmp_path}))
        assert Cache(tmp_path).has("k")


@pytest.mark.parametrize("mode", [0o777 | stat.S_ISVTX, 0o755])
def test_no_other_user_can_make_this_one_wait(
    tmp_path: pathlib.Path, someone: int, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that others can open is theirs to hold."""
    cache = Cache(tmp_path)
    cache.directory.mkdir()
    cache.directory.chmod(mode)

    def make() -> bytes:
        locks = list(cache.directory.glob("*.lock"))
        assert bool(locks) == (mode == 0o755)
        assert all(stat.S_IMODE(lock.stat().st_mode) == 0o600 for lock in locks)
        return b"payload"

    assert cache.get("k", make) == b"payload"


def test_a_file_of_another_user_does_not_serve(
    tmp_path: pathlib.Path, someone: int, as_owner: Callable[[pathlib.Path, int], None]
) -> None:
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"planted")
    as_owner(cache.entry("k"), someone)
    assert not cache.has("k") and cache.get("k", lambda: b"payload") == b"payload"
    for mode in (0o664, 0o646):
        cache.entry("k").chmod(mode)
        assert not cache.has("k")
    cache.entry("k").chmod(0o640)
    assert cache.get("k", forbidden) == b"payload"


def test_a_group_of_one_is_the_user(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"gr_name": "ada", "gr_mem": []}
    monkeypatch.setattr(trust.grp, "getgrgid", lambda number: type("Group", (), members))
    monkeypatch.setattr(trust.pwd, "getpwuid", lambda number: type("User", (), {"pw_name": "ada"}))
    for changes, private in (({}, True), ({"gr_mem": ["ada"]}, True), ({"gr_mem": ["bob"]}, False),
                             ({"gr_name": "staff"}, False)):  # fmt: skip
        members |= {"gr_name": "ada", "gr_mem": []} | changes
        trust._is_private.cache_clear()
        assert trust._is_private(1000, 1000) == private
    trust._is_private.cache_clear()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o644)])
def test_who_may_read_is_as_the_umask_says_and_nobody_else_may_write(
    tmp_path: pathlib.Path, umask: int, mode: int, someone: int
) -> None:
    before = os.umask(umask)
    try:
        cache = Cache(tmp_path / "new" / "cache")
        cache.get("k", lambda: b"payload")
        assert cache.get("k", forbidden) == b"payload"
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache.entry("k").stat().st_mode) == mode
    for folder in (cache.directory, *list(cache.directory.parents)[:2]):
        assert not folder.stat().st_mode & 0o022


# --- where it is


def test_the_environment_names_the_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path / "chosen"))
    assert default_directory() == tmp_path / "chosen"
    assert default_cache().directory == tmp_path / "chosen" / FOLDER
    assert default_cache() is default_cache()
    monkeypatch.delenv("ESCALADE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "escalade"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_directory() == pathlib.Path.home() / ".cache" / "escalade"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_directory() == pathlib.Path.home() / ".cache" / "escalade"


def test_a_relative_folder_stays_where_it_was(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", f"cache of {tmp_path.name}")
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path)
    key = cache_key("k")
    default_cache().get(key, lambda: b"payload")
    monkeypatch.chdir(tmp_path / "later")
    assert default_cache().get(key, forbidden) == b"payload"
    assert default_directory() == tmp_path / f"cache of {tmp_path.name}"
    assert not list((tmp_path / "later").iterdir())


def test_a_process_whose_folder_is_gone_or_that_has_no_home_still_compiles(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("ESCALADE_CACHE_DIR", f"not seen before, {tmp_path.name}")
    with pytest.warns(UserWarning, match="ESCALADE_CACHE_DIR"):
        assert default_cache().get(cache_key("k"), lambda: b"payload") == b"payload"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ESCALADE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> pathlib.Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", no_home)
    assert default_directory().is_absolute()
