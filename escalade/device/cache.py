"""Finished build products (cubins, twin libraries) on disk.

An entry is a file and, beside it, a second one with its hash. Both are written under temporary names
and renamed, so that a reader sees all of a file or nothing of it, whichever process gets there first;
an entry whose hash does not fit (corrupt, truncated, half replaced) is a miss and is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator

SCHEMA = 2
DEFAULT_LIMIT_BYTES = 1 << 30
_HASH_SUFFIX = ".sha256"
_MAKING = "making-"
_ROOM = 16  # an eviction makes room for a sixteenth of the limit, so that not every new entry needs one
_WRITERS = 8  # how many processes may fill a folder together and keep to its limit
_ABANDONED_SECONDS = 24 * 3600  # no build takes a day: what is still unfinished then belongs to nobody


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
        return pathlib.Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "escalade"


class DiskCache:
    """A folder of hashed files, bounded in size: the entries unused for longest go first.

    An entry used in the last `grace_seconds` is not evicted, since whoever asked for its file may be
    about to open it; the bound can be exceeded for that long. Where the folder cannot be written to,
    what is in it still serves, and new entries last as long as the process.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        grace_seconds: float = 60.0,
    ) -> None:
        self.directory = directory
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
            made.append(make())
            path.write_bytes(made[0])

        path = self.file(key, ".bin", write)
        if made:
            return made[0]
        try:
            return path.read_bytes()
        except FileNotFoundError:  # another process evicted it in this very moment
            return make()

    def has(self, key: str) -> bool:
        """Whether `get` would find it."""
        return any((folder / f"{key}.bin").exists() for folder in self._folders())

    def file(self, key: str, suffix: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
        """The finished file of `key`; on a miss, `make` writes it to the path it is given."""
        name = f"{key}{suffix}"
        for folder in self._folders():
            if _is_whole(folder / name):
                self.hits += 1
                _touch(folder / name)
                return folder / name
        self.misses += 1
        with self._workshop() as workshop:
            made = workshop / name
            make(made)
            checksum = _checksum_path(made)
            checksum.write_text(_hash(made))
            # Payload first: a process that dies between the two leaves a mismatch, which is a miss.
            path = workshop.parent / name
            os.replace(made, path)
            os.replace(checksum, _checksum_path(path))
        self._evict(keep=path)
        return path

    def size(self) -> tuple[int, int]:
        """How many entries there are, and their bytes."""
        entries = self._entries()
        return len(entries), sum(size for _, size, _ in entries)

    def _folders(self) -> list[pathlib.Path]:
        return [self.directory] + ([pathlib.Path(self._substitute.name)] if self._substitute else [])

    @contextlib.contextmanager
    def _workshop(self) -> Iterator[pathlib.Path]:
        """A folder to make one entry in, inside the folder that the entry will stand in."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(prefix=_MAKING, dir=self.directory)
        except OSError as error:
            folder = tempfile.mkdtemp(prefix=_MAKING, dir=self._substitute_for(error))
        try:
            yield pathlib.Path(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _substitute_for(self, error: OSError) -> str:
        with self._lock:
            if self._substitute is None:
                warnings.warn(
                    f"the cache folder {self.directory} cannot be written to ({error}); what is built now is kept "
                    "until this process ends. Set ESCALADE_CACHE_DIR to a folder that can be written to",
                    stacklevel=5,
                )
                self._substitute = tempfile.TemporaryDirectory(prefix="escalade-")
            return self._substitute.name

    def _entries(self) -> list[tuple[float, int, pathlib.Path]]:
        """Last use, size and path of each; what another process removes meanwhile is left out."""
        entries = []
        with contextlib.suppress(OSError):
            for path in self.directory.iterdir():
                if path.suffix == _HASH_SUFFIX or path.is_dir():
                    continue
                with contextlib.suppress(OSError):
                    status = path.stat()
                    entries.append((status.st_mtime, status.st_size, path))
        return entries

    def _evict(self, keep: pathlib.Path) -> None:
        """Looks through the folder, which takes long where it has thousands of entries, when it may be full."""
        with self._lock:
            with contextlib.suppress(OSError):
                self._unwatched_bytes -= keep.stat().st_size
            if self._unwatched_bytes > 0:
                return
            entries = sorted(self._entries())
            total = sum(size for _, size, _ in entries)
            wanted = self.limit_bytes - (self.limit_bytes // _ROOM if total > self.limit_bytes else 0)
            recent = time.time() - self.grace_seconds
            for _, size, path in entries:
                if total <= wanted:
                    break
                if path == keep or _last_use(path) > recent:
                    continue
                path.unlink(missing_ok=True)
                _checksum_path(path).unlink(missing_ok=True)
                total -= size
            self._unwatched_bytes = (self.limit_bytes - total) // _WRITERS
            self._sweep()

    def _sweep(self) -> None:
        """Removes what processes that died have left: unfinished builds, and hashes without their payload."""
        long_ago = time.time() - _ABANDONED_SECONDS
        for path in [*self.directory.glob(f"{_MAKING}*"), *self.directory.glob(f"*{_HASH_SUFFIX}")]:
            if _last_use(path) > long_ago:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif not path.with_name(path.name.removesuffix(_HASH_SUFFIX)).exists():
                path.unlink(missing_ok=True)


def _checksum_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(path.name + _HASH_SUFFIX)


def _is_whole(path: pathlib.Path) -> bool:
    try:
        return _checksum_path(path).read_bytes() == _hash(path).encode()
    except OSError:
        return False


def _touch(path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # a read-only cache still serves
        os.utime(path)


def _last_use(path: pathlib.Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # another process removed it


def _hash(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_caches: dict[pathlib.Path, DiskCache] = {}


def default_cache() -> DiskCache:
    """The process's cache in the folder that the environment names now."""
    directory = default_directory()
    return _caches.setdefault(directory, DiskCache(directory))
