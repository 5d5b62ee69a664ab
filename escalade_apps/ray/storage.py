"""Find, read and atomically write files by path or URI, in any store that pyarrow supports."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import lru_cache
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.fs

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.classify import images
from escalade_apps.classify.images import SUFFIXES, Encoded, Unreadable

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_UNQUOTED = "fsspec+"
"""Prefix of the schemes whose URIs pyarrow does not percent-decode."""
_UNFINISHED = "_unfinished"
"""Folder for files being written. Parquet readers skip names that start with an underscore."""
_NOTE = ".note"
_TEMPORARY = re.compile(r"\.[0-9a-f]{16}$")
"""Suffix of temporary files."""
_CACHED_FOLDERS = 64
"""Folders whose file systems are cached. Few suffice, because files are sorted by folder."""


def is_uri(name: str) -> bool:
    """Return True for `scheme://...`, False for a path."""
    return _URI.match(name) is not None


def find(names: Sequence[str | os.PathLike[str]]) -> tuple[list[str], list[Unreadable]]:
    """Return the images of paths and URIs without duplicates, and the folders that cannot be read.

    Folders are expanded to the images below them, in order. Paths are returned as absolute paths, because workers run
    in another folder. Raises UnsupportedError if nothing exists; if something does, missing files are reported as
    unreadable later.
    """
    if isinstance(names, str | bytes | os.PathLike):
        raise UnsupportedError(
            f"{os.fspath(names)!r}: pass a list of paths and URIs, such as [{os.fspath(names)!r}]"
        )
    found: list[str] = []
    unreadable: list[Unreadable] = []
    any_exists = False
    for name in [os.fspath(each) for each in names]:
        if is_uri(name):
            files, exists = _list(name)
            found += files
        else:
            path = pathlib.Path(os.path.abspath(name))
            local, closed = images.find([path])
            exists = path.exists()
            found += map(str, local)
            unreadable += closed
        any_exists = any_exists or exists
    if not any_exists:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise UnsupportedError(
            f"no such file: {printable(found[0])}{more}" if found else "the list of images is empty"
        )
    return list(dict.fromkeys(found)), unreadable


def source(name: str, contents: bytes | None = None) -> pathlib.Path | Encoded:
    """Return an image as a source for decoders: a local file, or its contents, read from a URI if not given."""
    if contents is not None:
        return Encoded(name, lambda: contents)
    return Encoded(name, lambda: _read(name)) if is_uri(name) else pathlib.Path(name)


class Folder:
    """Folder of results, by path or URI. Its files are written atomically."""

    def __init__(self, name: str | os.PathLike[str]) -> None:
        text = os.fspath(name)
        self.name = text if is_uri(text) else os.path.abspath(text)
        self._filesystem, self._path = _resolve(self.name)

    def make(self) -> None:
        """Create the folder if needed. Raises UnsupportedError if it is not writable."""
        with self._errors("written"):
            self._filesystem.create_dir(f"{self._path}/{_UNFINISHED}", recursive=True)
        self._filesystem.delete_file(self._write_temporary("try", b""))

    def names(self) -> set[str]:
        """Return the names of its files that are not empty."""
        with self._errors("read"):
            inside = self._filesystem.get_file_info(pa.fs.FileSelector(self._path, allow_not_found=True))
        return {info.base_name for info in inside if info.type == pa.fs.FileType.File and info.size != 0}

    def read(self, name: str) -> bytes | None:
        """Return the contents of a file, or None if there is none."""
        with self._errors("read"):
            try:
                with self._filesystem.open_input_file(f"{self._path}/{name}") as file:
                    return bytes(file.read())
            except FileNotFoundError:
                return None

    def end(self, name: str, count: int) -> bytes:
        """Return the last `count` bytes of a file."""
        with self._errors("read"), self._filesystem.open_input_file(f"{self._path}/{name}") as file:
            file.seek(max(0, file.size() - count))
            return bytes(file.read())

    def write(self, name: str, contents: pa.Buffer | bytes) -> None:
        """Write a temporary file and move it into place, replacing any previous file.

        Retries if another driver's `clean` has deleted the temporary file.
        """
        for is_last in (False, False, True):
            try:
                temporary = self._write_temporary(name, contents)
                with self._errors("written"):
                    self._filesystem.move(temporary, f"{self._path}/{name}")
                return
            except UnsupportedError as error:
                if is_last or not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def note(self, name: str, contents: bytes) -> None:
        """Write or replace the note of that name, in the folder of unfinished files."""
        with (
            self._errors("written"),
            self._filesystem.open_output_stream(f"{self._path}/{_UNFINISHED}/{name}{_NOTE}") as file,
        ):
            file.write(contents)

    def unfinished(self, name: str) -> bytes | None:
        """Return the note of that name, or None."""
        return self.read(f"{_UNFINISHED}/{name}{_NOTE}")

    def forget(self, name: str) -> None:
        """Delete the note of that name."""
        self._delete(f"{self._path}/{_UNFINISHED}/{name}{_NOTE}")

    def clean(self, *, notes: bool) -> None:
        """Delete temporary files of killed writers, and with `notes` also notes. Active writers retry."""
        selector = pa.fs.FileSelector(f"{self._path}/{_UNFINISHED}", allow_not_found=True)
        with self._errors("read"):
            inside = self._filesystem.get_file_info(selector)
        for info in inside:
            ours = _TEMPORARY.search(info.base_name) or (notes and info.base_name.endswith(_NOTE))
            if info.type == pa.fs.FileType.File and ours:
                self._delete(info.path)

    def _delete(self, path: str) -> None:
        with self._errors("written"), contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_file(path)

    def write_once(self, name: str, contents: bytes) -> bytes:
        """Write a file unless it exists. Return its contents, which may be another writer's.

        In a store without exclusive creation the last writer wins, so the file is read back.
        """
        existing = self.read(name)
        if existing is not None:
            return existing
        temporary, target = self._write_temporary(name, contents), f"{self._path}/{name}"
        with self._errors("written"):
            if isinstance(self._filesystem, pa.fs.LocalFileSystem):
                try:
                    os.link(temporary, target)
                    os.unlink(temporary)
                except FileExistsError:
                    os.unlink(temporary)
                except OSError:  # on a file system without hard links
                    os.replace(temporary, target)
            else:
                self._filesystem.move(temporary, target)
        return self.read(name) or b""

    def _write_temporary(self, name: str, contents: pa.Buffer | bytes) -> str:
        """Write and sync a new file in the folder of unfinished files. Return its path."""
        path = f"{self._path}/{_UNFINISHED}/{name}.{secrets.token_hex(8)}"
        with self._errors("written"):
            try:
                with self._filesystem.open_output_stream(path) as file:
                    file.write(contents)
                if isinstance(self._filesystem, pa.fs.LocalFileSystem):
                    with open(path, "rb") as written:
                        os.fsync(written.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    self._filesystem.delete_file(path)
                raise
        return path

    @contextlib.contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise UnsupportedError(f"{printable(self.name)} cannot be {action}: {error}") from error


def _list(uri: str) -> tuple[list[str], bool]:
    """Return the URIs of the images below a URI, or the URI itself, and whether it exists."""
    filesystem, path = _resolve(uri)
    base, query = _split(uri)
    encode = str if uri.startswith(_UNQUOTED) else quote
    root = path.rstrip("/")
    try:
        kind = filesystem.get_file_info(path).type
        if kind != pa.fs.FileType.Directory:
            return [uri], kind != pa.fs.FileType.NotFound
        found = sorted(
            f"{base.rstrip('/')}{encode(info.path[len(root) :])}{query}"
            for info in filesystem.get_file_info(pa.fs.FileSelector(path, recursive=True))
            if info.type == pa.fs.FileType.File and info.path.lower().endswith(SUFFIXES)
        )
    except (OSError, pa.ArrowException) as error:
        raise UnsupportedError(f"{printable(uri)} cannot be listed: {error}") from error
    except UnicodeDecodeError as error:
        raise UnsupportedError(
            f"{printable(uri)} contains a name that is not UTF-8 ({error.object!r}), as URIs must be; pass a local "
            "folder by its path"
        ) from error
    if not found:
        raise UnsupportedError(f"no images in {printable(uri)}; supported suffixes are {' '.join(SUFFIXES)}")
    return found, True


def _read(uri: str) -> bytes:
    base, query = _split(uri)
    cut = base.rindex("/") + 1
    filesystem, folder = _resolve_cached(base[:cut] + query)
    name = base[cut:] if uri.startswith(_UNQUOTED) else unquote(base[cut:])
    with filesystem.open_input_file(f"{folder.rstrip('/')}/{name}") as file:
        return bytes(file.read())


def _split(uri: str) -> tuple[str, str]:
    """Split a URI into its base and its query, including the question mark."""
    base, mark, options = uri.partition("?")
    return base, mark + options


def _resolve(name: str) -> tuple[pa.fs.FileSystem, str]:
    """Return the file system of a URI or an absolute path, and the path in it."""
    if not is_uri(name):
        return pa.fs.LocalFileSystem(), name
    if urlsplit(name).username is not None:
        raise UnsupportedError(
            f"a URI of {urlsplit(name).scheme} contains a user name or password, which would be written to every row "
            "of the results; pass credentials in the environment"
        )
    try:
        filesystem, path = pa.fs.FileSystem.from_uri(name)
    except (pa.ArrowException, ImportError, ValueError, OSError) as error:
        raise UnsupportedError(
            f"{printable(name)} is not a URI that pyarrow supports ({error}); supported are file://, s3://, gs:// and "
            "abfs://, and fsspec+SCHEME:// with an fsspec package"
        ) from error
    return filesystem, path


_resolve_cached = lru_cache(_CACHED_FOLDERS)(_resolve)
