"""Files by path or URI, on this machine or in any store that pyarrow reads: found, read, and written whole."""

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
"""How schemes begin whose URIs pyarrow takes as they are; in all others it decodes %20 and the like."""
_UNFINISHED = "_unfinished"
"""The folder of files that are being written; readers of Parquet pass over names that begin so."""
_NOTE = ".note"
_LEFT = re.compile(r"\.[0-9a-f]{16}$")
"""How the names of files end that are being written."""
_FOLDERS = 64
"""Folders whose file systems are kept: files come in the order of their names, a folder after the other."""


def is_uri(name: str) -> bool:
    """Whether it is `scheme://...` rather than a path."""
    return _URI.match(name) is not None


def find(names: Sequence[str | os.PathLike[str]]) -> tuple[list[str], list[Unreadable]]:
    """The images that paths and URIs stand for, each once; and the folders that cannot be looked through.

    Files are taken as they are, and of folders the images under them, in order. Paths come back absolute: whoever reads
    them works in another folder. Names of which not one is there are refused; where some are, the others are said to be
    unreadable in their turn.
    """
    if isinstance(names, str | bytes | os.PathLike):
        raise UnsupportedError(f"the images are a list of paths and URIs, such as [{os.fspath(names)!r}]")
    found: list[str] = []
    closed: list[Unreadable] = []
    is_there = False
    for name in [os.fspath(each) for each in names]:
        if is_uri(name):
            files, exists = _listed(name)
            found += files
        else:
            path = pathlib.Path(os.path.abspath(name))
            local, unread = images.find([path])
            exists = path.exists()
            found += map(str, local)
            closed += unread
        is_there = is_there or exists
    if not is_there:
        more = f", nor any of {len(found) - 1} more" if len(found) > 1 else ""
        first = f"{printable(found[0])}: there is no such file{more}" if found else "no images are named"
        raise UnsupportedError(first)
    return list(dict.fromkeys(found)), closed


def source(name: str, contents: bytes | None = None) -> pathlib.Path | Encoded:
    """The image of that name as decoders take it: a file here, or one whose contents are at hand or read by URI."""
    if contents is not None:
        return Encoded(name, lambda: contents)
    return Encoded(name, lambda: _read(name)) if is_uri(name) else pathlib.Path(name)


class Folder:
    """Where results go, by path or URI: files in it are whole or not there."""

    def __init__(self, name: str | os.PathLike[str]) -> None:
        given = os.fspath(name)
        self.name = given if is_uri(given) else os.path.abspath(given)
        self._filesystem, self._path = _place(self.name)

    def make(self) -> None:
        """Makes it if it is not there, and refuses one that cannot be written to."""
        with self._said("written"):
            self._filesystem.create_dir(f"{self._path}/{_UNFINISHED}", recursive=True)
        self._filesystem.delete_file(self._beside("try", b""))

    def names(self) -> set[str]:
        """The files that are in it, but for empty ones."""
        with self._said("read"):
            inside = self._filesystem.get_file_info(pa.fs.FileSelector(self._path, allow_not_found=True))
        return {info.base_name for info in inside if info.type == pa.fs.FileType.File and info.size != 0}

    def read(self, name: str) -> bytes | None:
        """What is in a file; None if there is no such file."""
        with self._said("read"):
            try:
                with self._filesystem.open_input_file(f"{self._path}/{name}") as file:
                    return bytes(file.read())
            except FileNotFoundError:
                return None

    def end(self, name: str, count: int) -> bytes:
        """The last bytes of a file, so many of them."""
        with self._said("read"), self._filesystem.open_input_file(f"{self._path}/{name}") as file:
            file.seek(max(0, file.size() - count))
            return bytes(file.read())

    def write(self, name: str, contents: pa.Buffer | bytes) -> None:
        """Writes a file beside its place and moves it there, over what was there before. Where another driver has
        cleaned it away meanwhile, it is written again."""
        for is_last in (False, False, True):
            try:
                beside = self._beside(name, contents)
                with self._said("written"):
                    self._filesystem.move(beside, f"{self._path}/{name}")
                return
            except UnsupportedError as error:
                if is_last or not isinstance(error.__cause__, FileNotFoundError):
                    raise

    def note(self, name: str, contents: bytes) -> None:
        """Writes a note, where nobody looks for results, over the one of that name."""
        with (
            self._said("written"),
            self._filesystem.open_output_stream(f"{self._path}/{_UNFINISHED}/{name}{_NOTE}") as file,
        ):
            file.write(contents)

    def unfinished(self, name: str) -> bytes | None:
        """What is in the note of that name; None if there is none."""
        return self.read(f"{_UNFINISHED}/{name}{_NOTE}")

    def forget(self, name: str) -> None:
        """Takes a note away."""
        self._delete(f"{self._path}/{_UNFINISHED}/{name}{_NOTE}")

    def clean(self, *, notes: bool) -> None:
        """Deletes what writers that were killed have left, and if so asked the notes too; whoever is writing one of
        these files now writes it again."""
        selector = pa.fs.FileSelector(f"{self._path}/{_UNFINISHED}", allow_not_found=True)
        with self._said("read"):
            inside = self._filesystem.get_file_info(selector)
        for info in inside:
            ours = _LEFT.search(info.base_name) or (notes and info.base_name.endswith(_NOTE))
            if info.type == pa.fs.FileType.File and ours:
                self._delete(info.path)

    def _delete(self, path: str) -> None:
        with self._said("written"), contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_file(path)

    def write_once(self, name: str, contents: bytes) -> bytes:
        """Writes a file unless there is one of that name, and gives what is in it: this, or what another wrote.

        A store that cannot tell who was first keeps what came last, and is asked for it.
        """
        there = self.read(name)
        if there is not None:
            return there
        beside, place = self._beside(name, contents), f"{self._path}/{name}"
        with self._said("written"):
            if isinstance(self._filesystem, pa.fs.LocalFileSystem):
                try:
                    os.link(beside, place)
                    os.unlink(beside)
                except FileExistsError:
                    os.unlink(beside)
                except OSError:  # on a file system without links
                    os.replace(beside, place)
            else:
                self._filesystem.move(beside, place)
        return self.read(name) or b""

    def _beside(self, name: str, contents: pa.Buffer | bytes) -> str:
        """A new file with these contents, all of them on the disk, where nobody looks for results."""
        beside = f"{self._path}/{_UNFINISHED}/{name}.{secrets.token_hex(8)}"
        with self._said("written"):
            try:
                with self._filesystem.open_output_stream(beside) as file:
                    file.write(contents)
                if isinstance(self._filesystem, pa.fs.LocalFileSystem):
                    with open(beside, "rb") as written:
                        os.fsync(written.fileno())
            except BaseException:
                with contextlib.suppress(OSError):
                    self._filesystem.delete_file(beside)
                raise
        return beside

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise UnsupportedError(f"{printable(self.name)} cannot be {what}: {error}") from error


def _listed(uri: str) -> tuple[list[str], bool]:
    """The URIs of the images under one, or that one; and whether there is anything."""
    filesystem, path = _place(uri)
    base, query = _split(uri)
    spelled = str if uri.startswith(_UNQUOTED) else quote
    root = path.rstrip("/")
    try:
        kind = filesystem.get_file_info(path).type
        if kind != pa.fs.FileType.Directory:
            return [uri], kind != pa.fs.FileType.NotFound
        found = sorted(
            f"{base.rstrip('/')}{spelled(info.path[len(root) :])}{query}"
            for info in filesystem.get_file_info(pa.fs.FileSelector(path, recursive=True))
            if info.type == pa.fs.FileType.File and info.path.lower().endswith(SUFFIXES)
        )
    except (OSError, pa.ArrowException) as error:
        raise UnsupportedError(f"{printable(uri)} cannot be looked through: {error}") from error
    except UnicodeDecodeError as error:
        raise UnsupportedError(
            f"{printable(uri)} has a name in it that is no UTF-8 ({error.object!r}), which URIs are; a folder of this "
            "machine is read by its path"
        ) from error
    if not found:
        raise UnsupportedError(
            f"there are no images in {printable(uri)}; files that end in {' '.join(SUFFIXES)} are taken"
        )
    return found, True


def _read(uri: str) -> bytes:
    base, query = _split(uri)
    cut = base.rindex("/") + 1
    filesystem, folder = _kept_place(base[:cut] + query)
    name = base[cut:] if uri.startswith(_UNQUOTED) else unquote(base[cut:])
    with filesystem.open_input_file(f"{folder.rstrip('/')}/{name}") as file:
        return bytes(file.read())


def _split(uri: str) -> tuple[str, str]:
    """A URI without its options, and those with their question mark."""
    base, mark, options = uri.partition("?")
    return base, mark + options


def _place(name: str) -> tuple[pa.fs.FileSystem, str]:
    """The file system and the path in it that a URI or an absolute path means."""
    if not is_uri(name):
        return pa.fs.LocalFileSystem(), name
    if urlsplit(name).username is not None:
        raise UnsupportedError(
            f"a URI of {urlsplit(name).scheme} has a name or password in it, which would be in every row of the "
            "results; credentials are taken from the environment"
        )
    try:
        filesystem, path = pa.fs.FileSystem.from_uri(name)
    except (pa.ArrowException, ImportError, ValueError, OSError) as error:
        raise UnsupportedError(
            f"{printable(name)} is no URI that pyarrow reads ({error}); file://, s3://, gs:// and abfs:// are, and "
            "fsspec+SCHEME:// with a package of fsspec's"
        ) from error
    return filesystem, path


_kept_place = lru_cache(_FOLDERS)(_place)
