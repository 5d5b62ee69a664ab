"""Files that several processes change: locked meanwhile, and replaced whole, so that nothing of them is lost."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import secrets
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator

from escalade.errors import EscaladeError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_SAFELY = (
    os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
)  # through no link, and waiting for no other end of a pipe


class FileError(EscaladeError, OSError):
    """A file that cannot be read or written."""


def read(path: pathlib.Path) -> bytes | None:
    """What is in a file; None if there is no such file."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            _require_plain(path, os.fstat(file.fileno()))
            return file.read()
    except FileNotFoundError:
        return None
    except FileError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read: {_why(error)}") from error


def update(path: pathlib.Path, change: Callable[[bytes | None], bytes]) -> None:
    """Puts what `change` makes of a file's contents in their place, while no other process does the same.

    What stands for a file that is not there yet is None; its folder is made.
    """
    with _changing(path) as target:
        old = read(target)
        new = change(old)
        if new != old:
            _replace(target, new)


def replace(path: pathlib.Path, contents: bytes) -> None:
    """Puts the contents in the place of what a file held; the folder of one that is not there yet is made.

    A link stays one, and permissions stay what they were.
    """
    with _said_of(path):
        target = pathlib.Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, contents)


def require_place(path: pathlib.Path) -> None:
    """Refuses a place that no file can be written to: before the work is done whose results it is for."""
    with _said_of(path):
        target = pathlib.Path(os.path.realpath(path))
        if target.exists():
            _require_plain(path, target.stat())
        _try_to_write(target.parent)


def require_folder(path: pathlib.Path) -> None:
    """Refuses a folder that no files can be written to, or made if it is not there."""
    with _said_of(path):
        _try_to_write(pathlib.Path(os.path.realpath(path)))


def _try_to_write(folder: pathlib.Path) -> None:
    """Writes to the folder, or to the nearest above it that is there, what nobody sees."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{there} is no folder")
    with tempfile.TemporaryFile(dir=there) as file:
        file.write(b"1")


@contextlib.contextmanager
def _said_of(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except EscaladeError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be written: {_why(error)}") from error


@contextlib.contextmanager
def _changing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The file itself, behind links, locked by a file beside it."""
    with _said_of(path):
        target = pathlib.Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            _require_plain(path, target.stat())
        with alone(target.with_name(f".{target.name}.lock")):
            yield target


@contextlib.contextmanager
def alone(lock: pathlib.Path, mode: int = 0o666) -> Iterator[None]:
    """No other thread or process is in here with the same lock, a file that is gone afterwards.

    `mode` less the umask is who else may hold it.
    """
    handle = _locked(lock, mode)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # another user's, where only the owner of a file may remove it
            os.unlink(lock)
        os.close(handle)


def _locked(lock: pathlib.Path, mode: int) -> int:
    while True:
        handle = _open_lock(lock, mode)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FileExistsError(errno.EEXIST, "it is to be a lock, and is no regular file", str(lock))
            _wait(handle, lock)
            # Whoever had it before has removed it: then this handle locks a file that nobody finds any more.
            if os.path.samestat(os.fstat(handle), os.lstat(lock)):
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _open_lock(lock: pathlib.Path, mode: int) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | _SAFELY, mode)
    except PermissionError:  # a colleague's, which may be read: that is enough on most file systems
        try:
            return os.open(lock, os.O_RDONLY | _SAFELY)
        except FileNotFoundError:  # gone by now, or never there
            return os.open(lock, os.O_RDWR | os.O_CREAT | _SAFELY, mode)


def _wait(handle: int, lock: pathlib.Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{lock.parent} is on a file system without locks ({_why(error)}); let one process write there at a time",
            stacklevel=2,
        )


def _replace(target: pathlib.Path, contents: bytes) -> None:
    before = target.stat() if target.exists() else None
    if before:
        _require_plain(target, before)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    # 0666 less the umask, as for any new file.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666)
    try:
        with open(handle, "wb") as file:
            if before:
                with contextlib.suppress(OSError):  # only root may give files away
                    os.fchown(handle, before.st_uid, before.st_gid)
                os.fchmod(handle, stat.S_IMODE(before.st_mode))
            file.write(contents)
            file.flush()
            os.fsync(handle)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _require_plain(path: pathlib.Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or a pipe"
        raise FileError(f"{path} is {what}; a plain file is needed here")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
