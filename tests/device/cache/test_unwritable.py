"""Folders that cannot be written to, and full disks."""

from __future__ import annotations

import errno
import os
import pathlib

import pytest

from escalade.device import cache as cache_module
from escalade.errors import CompileError
from tests.device.cache.support import Cache, assert_serves_without_a_word, contents, forbidden


def test_a_folder_that_cannot_be_made_is_replaced_for_this_process(tmp_path: pathlib.Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    cache = Cache(blocked / "cache")
    with pytest.warns(UserWarning, match="ESCALADE_CACHE_DIR"):
        assert cache.get("k", lambda: b"payload") == b"payload"
    assert_serves_without_a_word(cache)
    assert cache.size() == (0, 0) and blocked.read_text() == "not a folder"
    assert "file" in cache.problem()


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
    """The test above, for those who run tests as root."""
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
    """In a sticky folder another user's entry cannot be removed."""
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
