"""Replaced files: by several writers, through links, with their permissions kept."""

from __future__ import annotations

import os
import pathlib
import stat
from collections.abc import Callable

import pytest

from escalade import files
from escalade.files import FileError


def added(text: bytes) -> Callable[[bytes | None], bytes]:
    return lambda contents: (contents or b"") + text


def test_a_file_and_its_folder_are_made(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "er" / "x"
    files.update(path, added(b"1"))
    files.update(path, added(b"2"))
    assert files.read(path) == b"12" and files.read(tmp_path / "none") is None
    assert [each.name for each in path.parent.iterdir()] == ["x"]


def test_a_failed_write_leaves_the_file_unchanged(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x"
    path.write_text("before")

    def fail(contents: bytes | None) -> bytes:
        raise KeyError("no")

    with pytest.raises(KeyError):
        files.update(path, fail)
    assert path.read_text() == "before" and [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("write", [files.replace, lambda path, text: files.update(path, lambda _: text)])
class TestWriting:
    @pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
    def test_a_new_file_follows_the_umask(
        self, write: Callable[..., None], tmp_path: pathlib.Path, umask: int, mode: int
    ) -> None:
        before = os.umask(umask)
        try:
            write(tmp_path / "x", b"new")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == mode

    def test_an_old_file_keeps_its_permissions(
        self, write: Callable[..., None], tmp_path: pathlib.Path
    ) -> None:
        (tmp_path / "x").touch()
        (tmp_path / "x").chmod(0o640)
        write(tmp_path / "x", b"new")
        assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640

    def test_a_link_stays_one(self, write: Callable[..., None], tmp_path: pathlib.Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "there" / "file").write_text("old")
        for name, target in (("link", "there/file"), ("dangling", "there/new")):
            (tmp_path / name).symlink_to(target)
            write(tmp_path / name, b"new")
            assert (tmp_path / name).is_symlink() and (tmp_path / target).read_bytes() == b"new"

    def test_special_files_are_left_alone(self, write: Callable[..., None], tmp_path: pathlib.Path) -> None:
        """Replacing a device would break all programs, and opening a pipe without a reader would block."""
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "null").symlink_to("/dev/null")
        (tmp_path / "folder").mkdir()
        for name in ("pipe", "null", "folder"):
            with pytest.raises(FileError, match=f"{name} is a|/dev/null is a"):
                write(tmp_path / name, b"new")
        assert stat.S_ISCHR(os.stat("/dev/null").st_mode) and stat.S_ISFIFO(
            os.stat(tmp_path / "pipe").st_mode
        )

    def test_unwritable_files_are_a_sentence(
        self, write: Callable[..., None], tmp_path: pathlib.Path
    ) -> None:
        (tmp_path / "file").touch()
        for name in ("file/x", "a" * 300, "a\0b"):
            with pytest.raises(FileError, match="cannot be written"):
                write(tmp_path / name, b"new")


def test_a_lock_is_not_reached_through_a_link(tmp_path: pathlib.Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / ".x.lock").symlink_to(victim)
    with pytest.raises(FileError, match="x cannot be written"):
        files.update(tmp_path / "x", added(b"new"))
    assert victim.read_text() == "kept" and not (tmp_path / "x").exists()


def test_a_pipe_is_not_waited_for(tmp_path: pathlib.Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="a device or a pipe"):
        files.read(tmp_path / "pipe")
    with pytest.raises(FileError, match="cannot be read"):
        files.read(tmp_path / "a\0b")
