"""Entries that are damaged, truncated or of another kind: a reported miss, then a repaired entry."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial

import pytest

from escalade.device.cache import (
    SEAL_BYTES,
)
from tests.device.cache.support import Cache, forbidden

# --- damage: each is a reported miss, and the entry is repaired


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
    """An intact entry that belongs under another key."""
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
    with pytest.warns(UserWarning, match="was damaged .* and is rebuilt"):
        assert cache.get("k", lambda: made.append(1) or b"payload") == b"payload"  # type: ignore[func-returns-value]
    assert made == [1]
    assert cache.get("k", forbidden) == b"payload"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_misses(tmp_path: pathlib.Path, damage: Callable[[pathlib.Path], None]) -> None:
    cache = Cache(tmp_path)
    assert not cache.has("k")
    cache.get("k", lambda: b"payload")
    assert cache.has("k")
    damage(cache.entry("k"))
    with pytest.warns(UserWarning, match="was damaged"):
        assert not cache.has("k")
    assert not cache.entry("k").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # reported once
        assert not cache.has("k")


def test_an_entry_that_was_repaired_meanwhile_stays(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may replace a damaged entry after this one has read it."""
    cache, other = Cache(tmp_path), Cache(tmp_path / "other")
    cache.get("k", lambda: b"payload")
    other.get("k", lambda: b"payload")
    _corrupt(cache.entry("k"))
    replace = partial(os.replace, other.entry("k"), cache.entry("k"))
    monkeypatch.setattr(warnings, "warn", lambda *_, **__: replace())
    assert not cache.has("k")
    assert cache.get("k", forbidden) == b"payload"


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
            warnings.simplefilter("error")  # nothing is damaged
            there = Cache(folder).has("k")
            assert Cache(folder).get("k", forbidden if there else lambda: b"payload") == b"payload"
        outcomes.add(there)
    assert killed >= 4 and outcomes == {False, True}


# --- other things in place of an entry


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
def test_obstacles_do_no_harm(
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
