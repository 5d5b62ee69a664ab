"""Keys, hits and misses, and where the folder is."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escalade.device import cache as cache_module
from escalade.device.cache import (
    FOLDER,
    SEAL_BYTES,
    DiskCache,
    cache_key,
    default_cache,
    default_directory,
)
from tests.device.cache.support import Cache, contents, forbidden

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
