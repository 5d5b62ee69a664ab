"""The command `cache`: its output, and the entries it removes."""

from __future__ import annotations

import pathlib

import pytest

from escalade.device.cache import cache_key, default_cache
from tests.commands.support import run, said_by
from tests.device.cache.support import write_library


def test_the_cache_is_shown_and_cleared(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ESCALADE_CACHE_LIMIT", "1.5 GiB")
    cache = default_cache()
    for name in ("a", "b"):
        cache.get(cache_key(name), lambda: bytes(2000))
    said = run("cache").output
    assert str(cache.directory) in said.replace("\n", "")
    assert "kernels for a GPU" in said and "2 entries, 4.0 KiB of at most 1.5 GiB" in said
    assert "removed 1 entry, 2.0 KiB" in run("cache", "--limit", "3KB").output
    assert "removed 1 entry, 2.0 KiB" in run("cache", "--clear").output
    cache.file(cache_key("c"), ".so", write_library)
    said = run("cache", "--clear").output
    assert "removed 0 entries" in said and "1 stay for now" in said and cache.size()[0] == 1


@pytest.mark.parametrize("limit", ["much", "-1", "3 apples", ""])
def test_an_invalid_size_is_reported(
    limit: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = said_by("cache", "--limit", limit, monkeypatch=monkeypatch, capsys=capsys)
    assert f"{limit!r} is not a size; write 500MB" in said
    monkeypatch.setenv("ESCALADE_CACHE_LIMIT", "lots")
    said = said_by("cache", monkeypatch=monkeypatch, capsys=capsys)
    assert "ESCALADE_CACHE_LIMIT: 'lots' is not a size" in said
