"""Files that several processes write: locked during a change and replaced atomically."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pathlib
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator

from escalade.errors import EscaladeError

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # follow no symlink; do not block on a FIFO


class FileError(EscaladeError, OSError):
    """A file that cannot be read or written."""


def read(path: pathlib.Path) -> bytes | None:
    """Return the contents of a file, or None if it does not exist."""
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
    """Replace a file's contents by `change(contents)` under a lock.

    For a file that does not exist yet, `contents` is None and its folder is created.
    """
    with _locked_target(path) as target:
        old = read(target)
        new = change(old)
        if new != old:
            _replace(target, new)


def replace(path: pathlib.Path, contents: bytes) -> None:
    """Replace a file's contents atomically, creating its folder if needed. Keeps symlinks and permissions."""
    with _as_file_error(path):
        target = pathlib.Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, contents)


def as_path(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return a caller's path; raises FileError if it is none."""
    try:
        return pathlib.Path(path)
    except TypeError as error:
        raise FileError(f"{path!r} is not a valid path: {error}") from error


def require_writable_file(path: pathlib.Path) -> None:
    """Raise FileError unless a file can be written at `path`. Call it before the work whose results go there."""
    with _as_file_error(path):
        target = pathlib.Path(os.path.realpath(path))
        if target.exists():
            _require_plain(path, target.stat())
        _try_to_write(target.parent)


def require_writable_folder(path: pathlib.Path) -> None:
    """Raise FileError unless files can be written to the folder, which need not exist yet."""
    with _as_file_error(path):
        _try_to_write(pathlib.Path(os.path.realpath(path)))


def _try_to_write(folder: pathlib.Path) -> None:
    """Write an anonymous temporary file to the folder, or to its nearest existing parent."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, f"{existing} is not a folder")
    with tempfile.TemporaryFile(dir=existing) as file:
        file.write(b"1")


@contextlib.contextmanager
def _as_file_error(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except EscaladeError:
        raise
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be written: {_why(error)}") from error


@contextlib.contextmanager
def _locked_target(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the path with symlinks resolved, locked by a lock file next to it."""
    with _as_file_error(path):
        target = pathlib.Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            _require_plain(path, target.stat())
        with exclusive_lock(target.with_name(f".{target.name}.lock")):
            yield target


@contextlib.contextmanager
def exclusive_lock(lock: pathlib.Path, mode: int = 0o666) -> Iterator[None]:
    """Hold an inter-process lock: a file with permissions `mode` (minus the umask), removed afterwards."""
    handle = _acquire(lock, mode)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # another user's lock file in a sticky folder
            os.unlink(lock)
        os.close(handle)


def _acquire(lock: pathlib.Path, mode: int) -> int:
    while True:
        handle = _open_lock(lock, mode)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise FileExistsError(errno.EEXIST, "a lock must be a regular file", str(lock))
            _wait(handle, lock)
            # The previous owner unlinks the file. Then this handle locks an orphan: try again with the new file.
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
        return os.open(lock, os.O_RDWR | os.O_CREAT | _SAFE_FLAGS, mode)
    except PermissionError:  # another user's lock file: on most file systems, read access is enough for flock
        try:
            return os.open(lock, os.O_RDONLY | _SAFE_FLAGS)
        except FileNotFoundError:  # removed meanwhile
            return os.open(lock, os.O_RDWR | os.O_CREAT | _SAFE_FLAGS, mode)


def _wait(handle: int, lock: pathlib.Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{lock.parent} is on a file system without locks ({_why(error)}); run one writing process at a time",
            stacklevel=2,
        )


def _replace(target: pathlib.Path, contents: bytes) -> None:
    before = target.stat() if target.exists() else None
    if before:
        _require_plain(target, before)
    temporary = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
    # 0666 minus the umask, as for any new file.
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFE_FLAGS, 0o666)
    try:
        with open(handle, "wb") as file:
            if before:
                with contextlib.suppress(OSError):  # only root may change the owner
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
        raise FileError(f"{path} is {what}; pass a regular file")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
