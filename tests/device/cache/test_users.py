"""Folders and files of other users, which are not used."""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Callable, Iterator

import pytest

from escalade.device import ownership
from tests.device.cache.support import Cache, assert_serves_without_a_word, forbidden


@pytest.fixture
def as_owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[pathlib.Path, int], None]]:
    """Give a file or folder to another user, as far as the cache can see."""
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
    """Another user's id; this process belongs to a regular user, in a group that others share."""
    monkeypatch.setattr(ownership, "_is_private", lambda group, user: False)
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
    """Also a parent folder of the cache: its owner could replace it."""
    cache = Cache(tmp_path / "a" / "b")
    cache.get("k", lambda: b"planted")
    place = (cache.directory, *cache.directory.parents)[above]
    place.chmod(mode)
    _not_served(tmp_path / "a" / "b", f"other users can write to {place}")
    place.chmod(mode | stat.S_ISVTX)  # its owner can still replace what is inside
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
    as_owner(place, 0)  # root is unrestricted anyway
    assert Cache(tmp_path / "a" / "b").get("k", forbidden) == b"planted"
    as_owner(place, someone)
    _not_served(tmp_path / "a" / "b", f"{place} belongs to another user")


def test_the_package_owner_is_trusted(
    tmp_path: pathlib.Path,
    someone: int,
    as_owner: Callable[[pathlib.Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As root in a container with a user's checkout."""
    cache = Cache(tmp_path)
    cache.get("k", lambda: b"payload")
    as_owner(tmp_path, someone)
    assert not Cache(tmp_path).has("k")
    with monkeypatch.context() as installed:
        installed.setattr(ownership, "_author", lambda: someone)
        assert Cache(tmp_path).has("k")
    with monkeypatch.context() as installed:
        installed.setattr(ownership, "_PACKAGE_PARENTS", frozenset({tmp_path}))
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
    monkeypatch.setattr(ownership.grp, "getgrgid", lambda number: type("Group", (), members))
    monkeypatch.setattr(ownership.pwd, "getpwuid", lambda number: type("User", (), {"pw_name": "ada"}))
    for changes, private in (({}, True), ({"gr_mem": ["ada"]}, True), ({"gr_mem": ["bob"]}, False),
                             ({"gr_name": "staff"}, False)):  # fmt: skip
        members |= {"gr_name": "ada", "gr_mem": []} | changes
        ownership._is_private.cache_clear()
        assert ownership._is_private(1000, 1000) == private
    ownership._is_private.cache_clear()


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600), (0o002, 0o644)])
def test_reading_follows_the_umask_and_only_the_owner_may_write(
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
