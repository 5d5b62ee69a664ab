"""Finished build products (cubins, twin libraries) on disk.

An entry is one file: the product, and behind it a seal with the hash of its name and contents, which libraries and
precompiled headers carry without harm. It is made under another name and renamed, so that a reader sees all of it
or nothing, whichever process gets there first and wherever it is stopped. An entry whose seal does not fit
(corrupt, truncated, another's) is a miss and is made again.

The entries stand in a folder of their own below the one that was chosen. Whatever else lies there, in either of the
two, is never touched.
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
_MAGIC = b"\0escalade: sha256 of name, file:"  # 32 bytes, and as many of the hash
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = (
    "Signature: 8a477f597d28d172789f06886806bc55\n"  # by which backups know a cache: bford.info/cachedir
    "# Kernels compiled by Escalade. Everything here can be deleted: it is made again when it is needed.\n"
)
_ENTRY = re.compile(r"[0-9a-f]{40}\.(bin|so|gch|run)")
_LOCK = re.compile(_ENTRY.pattern + r"\.lock")
_MAKING = "making-"
_UNFINISHED = re.compile(_MAKING + r"[a-z0-9_]{8}")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM = 16  # an eviction makes room for a sixteenth of the limit, so that not every new entry needs one
_WRITERS = 8  # how many processes may fill a folder together and keep to its limit
_ABANDONED_SECONDS = 24 * 3600  # no build takes a day: what is still unfinished then belongs to nobody
_SKEW_SECONDS = 60  # by which the clocks of two machines that share a folder may differ


def cache_key(*parts: str | bytes) -> str:
    """A file name for everything that a product depends on. Parts cannot run into each other."""
    digest = hashlib.sha256(f"escalade-cache-{SCHEMA}".encode())
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:40]


def default_directory() -> pathlib.Path:
    """`ESCALADE_CACHE_DIR`, or the user's cache folder."""
    chosen = os.environ.get("ESCALADE_CACHE_DIR")
    if chosen:
        return _absolute(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # others are to be ignored, says its specification
        return pathlib.Path(base) / "escalade"
    try:
        return _absolute(str(pathlib.Path.home() / ".cache" / "escalade"))
    except RuntimeError:  # a user without a home
        return pathlib.Path(tempfile.gettempdir()) / f"escalade-{os.geteuid()}"


@cache
def _absolute(chosen: str) -> pathlib.Path:
    """The folder as an absolute path, taken once: it stays where it is when the process changes its working folder."""
    try:
        return pathlib.Path(os.path.abspath(chosen))
    except OSError:  # the folder that it is in is gone
        return pathlib.Path(chosen)


@dataclass(frozen=True)
class Entry:
    """A finished product in the folder, as its file's status says it."""

    path: pathlib.Path
    bytes: int
    last_use: float
    """Seconds since the epoch."""


class DiskCache:
    """A folder of sealed files, bounded in size: the entries unused for longest go first.

    An entry used in the last `grace_seconds` is not evicted, since whoever asked for its file may be
    about to open it; the bound can be exceeded for that long. Where the folder cannot be written to,
    what is in it still serves, and new entries last as long as the process. A folder that other users can
    write to does not serve: libraries are run.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        grace_seconds: float = 60.0,
    ) -> None:
        try:
            self.directory = pathlib.Path(os.path.realpath(directory / FOLDER))
        except OSError:  # relative, in a folder that is gone
            self.directory = directory / FOLDER
        self.limit_bytes = limit_bytes
        self.grace_seconds = grace_seconds
        self.hits = 0
        self.misses = 0
        self._lock = threading.Lock()
        self._unwatched_bytes = 0  # that may still be written before the folder is looked through again
        self._substitute: tempfile.TemporaryDirectory[str] | None = None

    def get(self, key: str, make: Callable[[], bytes]) -> bytes:
        """The payload of `key`, from disk or from `make`."""
        made: list[bytes] = []

        def write(path: pathlib.Path) -> None:
            if not made:
                made.append(make())
            path.write_bytes(made[0])

        try:
            path = self.file(key, ".bin", write)
        except _Unusable:
            if not made:
                raise
        if made:
            return made[0]
        with contextlib.suppress(OSError, _Damaged), _opened(path) as file:
            return file.read(os.fstat(file.fileno()).st_size - SEAL_BYTES)
        return make()  # another process evicted it in this very moment

    def has(self, key: str) -> bool:
        """Whether `get` would find it, whole."""
        return self._find(_name(key, ".bin")) is not None

    def is_persistent(self, key: str) -> bool:
        """Whether it is found when this process is gone, too."""
        found = self._find(_name(key, ".bin"))
        return found is not None and found.parent == self.directory

    def forget(self) -> None:
        """Removes what lasts as long as the process, for one that ends without ado."""
        if self._substitute:
            self._substitute.cleanup()
            self._substitute = None

    def file(self, key: str, suffix: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        """The finished file of `key`; on a miss, `make` writes it to the path it is given.

        One process makes it while others that miss it too wait.
        """
        name = _name(key, suffix)
        path = self._find(name)
        if path is None:
            with self._alone(name):
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
        """How many entries there are, and their bytes."""
        entries = self.entries()
        return len(entries), sum(entry.bytes for entry in entries)

    def trim(self, limit_bytes: int) -> list[Entry]:
        """Removes entries, those unused for longest first, until the others fit; gives those that are gone.

        A payload can go at any time: whoever has asked for it reads it, or makes it again. What others open by its
        name stays for `grace_seconds` after its last use.
        """
        with self._lock:
            return self._trim(limit_bytes, lambda entry: entry.path.suffix == ".bin" or self._is_idle(entry))

    def _trim(self, limit_bytes: int, may_go: Callable[[Entry], bool]) -> list[Entry]:
        entries = sorted(self.entries(), key=lambda entry: entry.last_use)
        total = sum(entry.bytes for entry in entries)
        gone: list[Entry] = []
        for entry in entries:
            if total <= limit_bytes:
                break
            if not may_go(entry):
                continue
            with contextlib.suppress(OSError):
                os.unlink(entry.path)
                gone.append(entry)
            total -= entry.bytes
        return gone

    def _is_idle(self, entry: Entry) -> bool:
        """Whether nobody has asked for an entry's file who may still be about to open it."""
        with contextlib.suppress(OSError):
            return time.time() - _last_use(os.lstat(entry.path)) >= self.grace_seconds
        return False

    def problem(self) -> str:
        """Why new entries would last no longer than this process; empty if they are kept."""
        try:
            with tempfile.TemporaryDirectory(prefix=_MAKING, dir=self._prepared()):
                return ""
        except (OSError, _Unusable) as error:
            return str(error)

    def _find(self, name: str) -> pathlib.Path | None:
        """The path of an entry that is whole, or None. A damaged one is said and removed."""
        for folder in self._folders():
            path = folder / name
            try:
                with _opened(path):
                    return path
            except OSError:
                continue
            except _Damaged as damage:
                warnings.warn(f"{path} was damaged ({damage}) and is made again", stacklevel=4)
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.lstat(path), damage.status):  # and not whole by now
                        os.unlink(path)
        return None

    def _folders(self) -> Iterator[pathlib.Path]:
        with contextlib.suppress(OSError):
            if not ownership.untrusted_reason(self.directory):
                yield self.directory
        if self._substitute:
            yield pathlib.Path(self._substitute.name)

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """Holds an entry's lock, as far as one can be had: without it the worst is that something is made twice.

        In a sticky folder another user could hold it for ever.
        """
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, _Unusable):
                folder = self._prepared()
                if not ownership.is_writable_by_others(os.stat(folder)):
                    held.enter_context(files.exclusive_lock(folder / f"{name}.lock", mode=0o600))
            yield

    def _make(self, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        try:
            return _made_in(self._prepared(), name, make)
        except _Unusable as problem:
            return _made_in(self._substitute_for(problem), name, make)

    def _prepared(self) -> pathlib.Path:
        """The folder, there and marked as what it is."""
        try:
            above = next(place for place in (self.directory, *self.directory.parents) if place.exists())
            objection = ownership.untrusted_reason(above)
            if not objection:
                _make_folder(self.directory)
                objection = ownership.untrusted_reason(self.directory)
            if not objection and not (self.directory / _TAG).exists():
                with contextlib.suppress(OSError):
                    (self.directory / _TAG).write_text(_TAG_TEXT)
        except (OSError, StopIteration) as error:
            raise _Unusable(f"{self.directory} cannot be written to: {error}") from error
        if objection:
            raise _Unusable(f"{self.directory} is not used: {objection}")
        return self.directory

    def _substitute_for(self, problem: _Unusable) -> pathlib.Path:
        with self._lock:
            if self._substitute is None:
                try:
                    self._substitute = tempfile.TemporaryDirectory(prefix="escalade-")
                except OSError as error:
                    raise _Unusable(
                        f"{problem}, and there is no folder for temporary files: {error}"
                    ) from error
                warnings.warn(
                    f"the cache folder {problem}; what is built now is kept until this process ends. "
                    "Set ESCALADE_CACHE_DIR to a folder of your own with room in it",
                    stacklevel=6,
                )
            return pathlib.Path(self._substitute.name)

    def entries(self) -> list[Entry]:
        """All that is there; what another process removes meanwhile is left out."""
        return [
            Entry(path, status.st_size, _last_use(status))
            for path, status in self._own_files(_ENTRY)
            if stat.S_ISREG(status.st_mode)
        ]

    def _own_files(self, names: re.Pattern[str]) -> list[tuple[pathlib.Path, os.stat_result]]:
        """Files in the folder whose names match; links are not followed."""
        found = []
        with contextlib.suppress(OSError), os.scandir(self.directory) as there:
            for entry in there:
                if names.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        found.append((pathlib.Path(entry.path), entry.stat(follow_symlinks=False)))
        return found

    def _evict(self, keep: pathlib.Path) -> None:
        """Looks through the folder, which takes long where it has thousands of entries, when it may be full."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._unwatched_bytes -= keep.stat().st_size
            if self._unwatched_bytes > 0:
                return
            _, total = self.size()
            if total > self.limit_bytes:
                wanted = self.limit_bytes - self.limit_bytes // _ROOM
                gone = self._trim(wanted, lambda entry: entry.path != keep and self._is_idle(entry))
                total -= sum(entry.bytes for entry in gone)
            self._unwatched_bytes = (self.limit_bytes - total) // _WRITERS
            self._sweep()

    def _sweep(self) -> None:
        """Removes what processes that died have left: unfinished builds, and locks."""
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
    """A folder that nothing can be built in."""


class _Damaged(Exception):
    def __init__(self, what: str, status: os.stat_result) -> None:
        super().__init__(what)
        self.status = status


def _name(key: str, suffix: str) -> str:
    name = f"{key}{suffix}"
    if not _ENTRY.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an entry: keys are made by cache_key")
    return name


@contextlib.contextmanager
def _opened(path: pathlib.Path) -> Iterator[BinaryIO]:
    """An entry that is whole, at its beginning; an OSError if there is none, or it is not this user's."""
    safely = os.O_NOFOLLOW | os.O_NONBLOCK  # through no link, and waiting for no other end of a pipe
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | safely)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
        if not ownership.has_trusted_owner(status) or ownership.is_writable_by_others(status):
            raise PermissionError(errno.EACCES, "other users could have written it", str(path))
        if status.st_size < SEAL_BYTES:
            raise _Damaged("its end is missing", status)
        expected = _hash(file, path.name, status.st_size - SEAL_BYTES)
        if file.read(SEAL_BYTES) != _MAGIC + expected:
            raise _Damaged("its hash does not fit", status)
        file.seek(0)
        yield file


def _made_in(folder: pathlib.Path, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Made in a folder inside the one that the entry will stand in, sealed, and moved to its place."""
    try:
        workshop = pathlib.Path(tempfile.mkdtemp(prefix=_MAKING, dir=folder))
    except OSError as error:
        raise _Unusable(f"{folder} cannot be written to: {error}") from error
    try:
        made = workshop / name
        try:
            make(made)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise _Unusable(
                f"{folder} has no room for compiled kernels ({error.strerror}); ESCALADE_CACHE_DIR and TMPDIR name "
                "other folders"
            ) from error
        try:
            _seal(made)
            os.replace(made, folder / name)
        except OSError as error:
            raise _Unusable(f"{folder} cannot be written to: {error}") from error
        return folder / name
    finally:
        shutil.rmtree(workshop, ignore_errors=True)


def _seal(path: pathlib.Path) -> None:
    with path.open("r+b") as file:
        status = os.fstat(file.fileno())
        # Others may read it as far as the umask lets them; to write it would be to write what is run.
        os.fchmod(file.fileno(), stat.S_IMODE(status.st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        digest = _hash(file, path.name, status.st_size)
        file.seek(0, os.SEEK_END)
        file.write(_MAGIC + digest)


def _hash(file: BinaryIO, name: str, size: int) -> bytes:
    digest = hashlib.sha256(name.encode() + b"\0")
    while size > 0:
        block = file.read(min(size, 1 << 20))
        if not block:  # shorter by now
            break
        digest.update(block)
        size -= len(block)
    return digest.digest()


def _make_folder(path: pathlib.Path) -> None:
    """Makes a folder with all above it, none of them for others to write to, whatever the umask says."""
    if path.is_dir():
        return
    if path.parent == path:
        raise FileNotFoundError(errno.ENOENT, "the folder that it is relative to is gone", str(path))
    _make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o755)


def _touch(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # a read-only cache still serves
        os.utime(path)


def _last_use(status: os.stat_result) -> float:
    """A date in the future, of a clock that was wrong, says nothing: such an entry is the first to go."""
    return status.st_mtime if status.st_mtime <= time.time() + _SKEW_SECONDS else 0.0


_caches: dict[tuple[pathlib.Path, int], DiskCache] = {}


def default_cache() -> DiskCache:
    """The process's cache in the folder, and with the limit, that the environment names now."""
    named = default_directory(), default_limit()
    if named not in _caches:
        _caches.setdefault(named, DiskCache(*named))
    return _caches[named]


def default_limit() -> int:
    """`ESCALADE_CACHE_LIMIT`, or 1 GiB."""
    chosen = os.environ.get("ESCALADE_CACHE_LIMIT")
    if not chosen:
        return DEFAULT_LIMIT_BYTES
    try:
        return parsing.parse_size(chosen)
    except ValueError as error:
        raise UnsupportedError(f"ESCALADE_CACHE_LIMIT: {error}") from error
