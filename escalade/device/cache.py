"""On-disk cache of build products: cubins and twin libraries.

An entry is one file: the product, followed by a seal with the hash of its name and contents. Loaders of libraries and
precompiled headers ignore such a trailer. An entry is written under a temporary name and renamed, so a reader sees all
of it or nothing. An entry whose seal does not match (corrupt, truncated, renamed) is a miss and is rebuilt.

Entries are stored in a subfolder of the configured folder. Other files in either are never touched.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import re
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO

from escalade import files, parsing
from escalade.device import ownership
from escalade.errors import ToolError, UnsupportedError

SCHEMA = 3
FOLDER = f"escalade-cache-v{SCHEMA}"
DEFAULT_LIMIT_BYTES = 1 << 30
SEAL_BYTES = 64
_MAGIC = b"\0escalade: sha256 of name, file:"  # 32 bytes, followed by the 32 of the hash
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"  # tells backup programs to skip it: bford.info/cachedir
    "# Kernels compiled by Escalade. Everything here can be deleted: it is rebuilt on demand.\n"
)
_ENTRY = re.compile(r"[0-9a-f]{40}\.(bin|so|gch|run)")
_LOCK = re.compile(_ENTRY.pattern + r"\.lock")
_BUILD_PREFIX = "making-"
_UNFINISHED = re.compile(_BUILD_PREFIX + r"[a-z0-9_]{8}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_EVICTED_SHARE = 16  # an eviction frees 1/16 of the limit, so that not every new entry triggers one
_WRITERS = 8  # processes that may fill a folder at the same time without exceeding its limit
_ABANDONED_SECONDS = 24 * 3600  # no build takes a day: older unfinished files are leftovers of dead processes
_SKEW_SECONDS = 60  # tolerated clock difference between machines that share a folder


def cache_key(*parts: str | bytes) -> str:
    """Hash everything that a product depends on. Lengths are hashed too, so parts cannot run into each other."""
    digest = hashlib.sha256(f"escalade-cache-{SCHEMA}".encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def default_directory() -> pathlib.Path:
    """Return `ESCALADE_CACHE_DIR`, or the user's cache folder."""
    chosen = os.environ.get("ESCALADE_CACHE_DIR")
    if chosen:
        return _absolute(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification says to ignore relative ones
        return pathlib.Path(base) / "escalade"
    try:
        return _absolute(str(pathlib.Path.home() / ".cache" / "escalade"))
    except RuntimeError:  # a user without a home folder
        return pathlib.Path(tempfile.gettempdir()) / f"escalade-{os.geteuid()}"


@cache
def _absolute(chosen: str) -> pathlib.Path:
    # Cached, so that the cache does not move when the process changes its working folder.
    try:
        return pathlib.Path(os.path.abspath(chosen))
    except OSError:  # the working folder was deleted
        return pathlib.Path(chosen)


@dataclass(frozen=True)
class Entry:
    """Finished product in the folder."""

    path: pathlib.Path
    bytes: int
    last_use: float
    """Seconds since the epoch."""


class DiskCache:
    """Size-bounded folder of sealed files with least-recently-used eviction.

    Entries used in the last `grace_seconds` are not evicted, because a process may be about to open them by name; the
    bound can be exceeded for that long. In a read-only folder, existing entries are still used and new ones go to a
    temporary folder until the process ends. A folder that other users can write to is not used: its libraries would be
    executed.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        grace_seconds: float = 60.0,
    ) -> None:
        try:
            self.directory = pathlib.Path(os.path.realpath(directory / FOLDER))
        except OSError:  # relative, and the working folder was deleted
            self.directory = directory / FOLDER
        self.limit_bytes = limit_bytes
        self.grace_seconds = grace_seconds
        self.hits = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._bytes_until_scan = 0  # bytes to write before the folder is scanned again
        self._fallback: tempfile.TemporaryDirectory[str] | None = None

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """Return the payload of `key`, from disk or from `make`."""
        built: list[bytes] = []

        def write(path: pathlib.Path) -> None:
            if not built:
                built.append(make())
            path.write_bytes(built[0])

        try:
            path = self.file(key, ".bin", write)
        except _Unusable:
            if not built:
                raise
        if built:
            return built[0]
        with contextlib.suppress(OSError, _Damaged), _opened(path) as file:
            return file.read(os.fstat(file.fileno()).st_size - SEAL_BYTES)
        return make()  # another process evicted it just now

    def has(self, key: str) -> bool:
        """Return True if `get` would find an intact entry."""
        return self._find(_name(key, ".bin")) is not None

    def has_file(self, key: str, suffix: str) -> bool:
        """Return True if there is a file of `key`; whether it is intact is not checked, which takes longer."""
        return any((folder / _name(key, suffix)).exists() for folder in self._folders())

    def is_persistent(self, key: str) -> bool:
        """Return True if the entry outlives this process."""
        found = self._find(_name(key, ".bin"))
        return found is not None and found.parent == self.directory

    def forget(self) -> None:
        """Remove the temporary folder. For processes that end by `os._exit`, which skips finalizers."""
        if self._fallback:
            self._fallback.cleanup()
            self._fallback = None

    def file(self, key: str, suffix: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        """Return the file of `key`; on a miss, `make` writes it to the path it gets, and other processes wait."""
        name = _name(key, suffix)
        path = self._find(name)
        if path is None:
            with self._entry_lock(name):
                path = self._find(name)
                if path is None:
                    self.misses += 1
                    path = self._make(name, make)
                    self._evict(keep=path)
                    return path
        self.hits += 1
        _touch(path)
        return path

    def size(self) -> tuple[int, int]:
        """Return the number of entries and their total bytes."""
        entries = self.entries()
        return len(entries), sum(entry.bytes for entry in entries)

    def trim(self, limit_bytes: int) -> list[Entry]:
        """Remove the least recently used entries until the rest fits; returns the removed ones.

        Payloads (.bin) can go at any time, because readers already hold them open or rebuild them. Files that others
        open by name stay for `grace_seconds` after their last use.
        """
        with self._lock:
            return self._trim(limit_bytes, lambda entry: entry.path.suffix == ".bin" or self._is_idle(entry))

    def _trim(self, limit_bytes: int, is_removable: Callable[[Entry], bool]) -> list[Entry]:
        entries = sorted(self.entries(), key=lambda entry: entry.last_use)
        total = sum(entry.bytes for entry in entries)
        removed: list[Entry] = []
        for entry in entries:
            if total <= limit_bytes:
                break
            if not is_removable(entry):
                continue
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
                removed.append(entry)
            total -= entry.bytes
        return removed

    def _is_idle(self, entry: Entry) -> bool:
        """Return True if no process is likely to be about to open the entry's file."""
        with contextlib.suppress(OSError):
            return time.time() - _last_use(os.lstat(entry.path)) >= self.grace_seconds
        return False

    def problem(self) -> str:
        """Return why new entries would not outlive this process; empty if they do."""
        try:
            with tempfile.TemporaryDirectory(prefix=_BUILD_PREFIX, dir=self._prepare_folder()):
                return ""
        except (OSError, _Unusable) as error:
            return str(error)

    def _find(self, name: str) -> pathlib.Path | None:
        """Return the path of an intact entry, or None. A damaged one is removed with a warning."""
        for folder in self._folders():
            path = folder / name
            try:
                with _opened(path):
                    return path
            except OSError:
                continue
            except _Damaged as damage:
                warnings.warn(f"{path} was damaged ({damage}) and is rebuilt", stacklevel=4)
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.lstat(path), damage.status):  # not replaced meanwhile
                        os.unlink(path)
        return None

    def _folders(self) -> Iterator[pathlib.Path]:
        with contextlib.suppress(OSError):
            if not ownership.untrusted_reason(self.directory):
                yield self.directory
        if self._fallback:
            yield pathlib.Path(self._fallback.name)

    @contextlib.contextmanager
    def _entry_lock(self, name: str) -> Iterator[None]:
        """Hold an entry's lock if possible. Without it, at worst two processes build the same entry.

        In a sticky folder it is skipped, because another user could hold it forever.
        """
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, _Unusable):
                folder = self._prepare_folder()
                if not ownership.is_writable_by_others(os.stat(folder)):
                    held.enter_context(files.exclusive_lock(folder / f"{name}.lock", mode=0o600))
            yield

    def _make(self, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        try:
            return _build_entry(self._prepare_folder(), name, make)
        except _Unusable as problem:
            return _build_entry(self._fallback_folder(problem), name, make)

    def _prepare_folder(self) -> pathlib.Path:
        """Create the folder with its CACHEDIR.TAG; raises `_Unusable` if it cannot be used."""
        try:
            above = next(place for place in (self.directory, *self.directory.parents) if place.exists())
            untrusted = ownership.untrusted_reason(above)
            if not untrusted:
                _make_folder(self.directory)
                untrusted = ownership.untrusted_reason(self.directory)
            if not untrusted and not (self.directory / _TAG).exists():
                with contextlib.suppress(OSError):
                    (self.directory / _TAG).write_text(_TAG_TEXT)
        except (OSError, StopIteration) as error:
            raise _Unusable(f"{self.directory} cannot be written to: {error}") from error
        if untrusted:
            raise _Unusable(f"{self.directory} is not used: {untrusted}")
        return self.directory

    def _fallback_folder(self, problem: _Unusable) -> pathlib.Path:
        with self._lock:
            if self._fallback is None:
                try:
                    self._fallback = tempfile.TemporaryDirectory(prefix="escalade-")
                except OSError as error:
                    raise _Unusable(
                        f"{problem}, and there is no folder for temporary files: {error}"
                    ) from error
                warnings.warn(
                    f"the cache folder {problem}; new entries are kept until this process ends. "
                    "Set ESCALADE_CACHE_DIR to a folder of your own with free space",
                    stacklevel=6,
                )
            return pathlib.Path(self._fallback.name)

    def entries(self) -> list[Entry]:
        """List all entries, without those that another process removes meanwhile."""
        return [
            Entry(path, status.st_size, _last_use(status))
            for path, status in self._own_files(_ENTRY)
            if stat.S_ISREG(status.st_mode)
        ]

    def _own_files(self, names: re.Pattern[str]) -> list[tuple[pathlib.Path, os.stat_result]]:
        """Return the files in the folder whose names match. Does not follow symlinks."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.directory) as there:
            for entry in there:
                if names.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        found.append((pathlib.Path(entry.path), entry.stat(follow_symlinks=False)))
        return found

    def _evict(self, keep: pathlib.Path) -> None:
        """Evict entries if the limit may be exceeded. Scanning thousands of entries is slow, so it is done rarely."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._bytes_until_scan -= keep.stat().st_size
            if self._bytes_until_scan > 0:
                return
            _, total = self.size()
            if total > self.limit_bytes:
                wanted = self.limit_bytes - self.limit_bytes // _EVICTED_SHARE
                removed = self._trim(wanted, lambda entry: entry.path != keep and self._is_idle(entry))
                total -= sum(entry.bytes for entry in removed)
            self._bytes_until_scan = (self.limit_bytes - total) // _WRITERS
            self._sweep()

    def _sweep(self) -> None:
        """Remove unfinished builds and locks of dead processes."""
        now = time.time()
        for path, status in [*self._own_files(_UNFINISHED), *self._own_files(_LOCK)]:
            if abs(now - status.st_mtime) < _ABANDONED_SECONDS:
                continue
            if stat.S_ISDIR(status.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            elif stat.S_ISREG(status.st_mode):
                with contextlib.suppress(OSError):
                    os.unlink(path)


class _Unusable(ToolError):
    """Folder that nothing can be built in."""


class _Damaged(Exception):
    def __init__(self, what: str, status: os.stat_result) -> None:
        super().__init__(what)
        self.status = status


def _name(key: str, suffix: str) -> str:
    name = f"{key}{suffix}"
    if not _ENTRY.fullmatch(name):
        raise ValueError(f"{name!r} is not an entry name; make keys with cache_key")
    return name


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open an intact entry. Raises OSError if it does not exist or others could have written it, else `_Damaged`."""
    safe_flags = os.O_NOFOLLOW | os.O_NONBLOCK  # follow no symlink; do not block on a FIFO
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | safe_flags)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
        if not ownership.has_trusted_owner(status) or ownership.is_writable_by_others(status):
            raise PermissionError(errno.EACCES, "other users could have written it", str(path))
        if status.st_size < SEAL_BYTES:
            raise _Damaged("truncated", status)
        expected = _hash(file, path.name, status.st_size - SEAL_BYTES)
        if file.read(SEAL_BYTES) != _MAGIC + expected:
            raise _Damaged("hash mismatch", status)
        file.seek(0)
        yield file


def _build_entry(folder: pathlib.Path, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Build an entry in a temporary subfolder, seal it and rename it into place."""
    try:
        scratch = pathlib.Path(tempfile.mkdtemp(prefix=_BUILD_PREFIX, dir=folder))
    except OSError as error:
        raise _Unusable(f"{folder} cannot be written to: {error}") from error
    try:
        built = scratch / name
        try:
            make(built)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise _Unusable(
                f"{folder} has no space for compiled kernels ({error.strerror}); set ESCALADE_CACHE_DIR or TMPDIR to "
                "another folder"
            ) from error
        try:
            _seal(built)
            os.replace(built, folder / name)
        except OSError as error:
            raise _Unusable(f"{folder} cannot be written to: {error}") from error
        return folder / name
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _seal(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        status = os.fstat(file.fileno())
        # The umask decides who may read; only the owner may write, because entries are executed.
        os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        digest = _hash(file, path.name, status.st_size)
        file.seek(0, os.SEEK_END)
        file.write(_MAGIC + digest)


def _hash(file: BinaryIO, name: str, size: int) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0")
    while size > 0:
        block = file.read(min(size, 1 << 20))
        if not block:  # truncated meanwhile
            break
        digest.update(block)
        size -= len(block)
    return digest.digest()


def _make_folder(path: pathlib.Path) -> None:
    """Create a folder and its parents, not writable by others whatever the umask."""
    if path.is_dir():
        return
    if path.parent == path:
        raise FileNotFoundError(errno.ENOENT, "the working folder was deleted", str(path))
    _make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o755)


def _touch(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # a read-only cache is fine
        os.utime(path)


def _last_use(status: os.stat_result) -> float:
    # A date in the future comes from a wrong clock: evict such an entry first.
    return status.st_mtime if status.st_mtime <= time.time() + _SKEW_SECONDS else 0.0


_caches: dict[tuple[pathlib.Path, int], DiskCache] = {}


def default_cache() -> DiskCache:
    """Return this process's cache for the folder and limit in the current environment."""
    named = default_directory(), default_limit()
    if named not in _caches:
        _caches.setdefault(named, DiskCache(*named))
    return _caches[named]


def default_limit() -> int:
    """Return `ESCALADE_CACHE_LIMIT`, or 1 GiB."""
    chosen = os.environ.get("ESCALADE_CACHE_LIMIT")
    if not chosen:
        return DEFAULT_LIMIT_BYTES
    try:
        return parsing.parse_size(chosen)
    except ValueError as error:
        raise UnsupportedError(f"ESCALADE_CACHE_LIMIT: {error}") from error
