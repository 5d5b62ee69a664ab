"""Minimal ELF64 reader: symbols and segment sizes of the twin's libraries, and digests of machine code.

Digests are equal for two cubins that execute the same instructions. NVRTC writes line tables, symbol names and build
information beside the instructions. A comment, a renamed function or another path changes those but not what the GPU
executes, so a digest covers the instructions and constants alone.
"""

from __future__ import annotations

import hashlib
import pathlib
import struct
from collections.abc import Iterator
from typing import NamedTuple

_SECTION = struct.Struct("<2I4Q2I2Q")
_PROGRAM_LOAD, _PROGRAM_TLS = 1, 7
_SECTION_SYMBOLS, _SECTION_NO_BITS = 2, 8
_CODE = ".text"
_KIND_OBJECT, _KIND_TLS, _KIND_UNIQUE = 1, 6, 10
_EXECUTED = (".text.", ".nv.constant", ".nv.global", ".nv.shared")
_PARAMETERS = ".nv.constant0."
"""Bank 0 holds the arguments of a launch: its contents in the file are zeros."""


class Symbol(NamedTuple):
    name: str
    value: int
    size: int
    is_thread_local: bool
    is_object: bool


class Library(NamedTuple):
    symbols: tuple[Symbol, ...]
    thread_local_bytes: int
    loaded_bytes: int
    """Bytes from address 0 to the end of the mapped segments."""
    code: range
    """Addresses of the library's own functions, without the linker's PLT stubs."""

    def symbol(self, name: str) -> Symbol | None:
        return next((symbol for symbol in self.symbols if symbol.name == name), None)

    @property
    def shared_variables(self) -> list[Symbol]:
        found = [symbol for symbol in self.symbols if symbol.is_thread_local and symbol.size]
        return sorted(found, key=lambda symbol: symbol.value)


class _Section(NamedTuple):
    name: str
    kind: int
    address: int
    offset: int
    """File offset of its contents."""
    size: int
    link: int
    """For a symbol table: index of the section with the names."""


def read(path: pathlib.Path) -> Library:
    """Read a shared library."""
    data = path.read_bytes()
    (programs,) = struct.unpack_from("<Q", data, 0x20)
    program_size, program_count = struct.unpack_from("<HH", data, 0x36)
    thread_local = loaded = 0
    for number in range(program_count):
        kind, _, _, address, _, _, memory, _ = struct.unpack_from(
            "<IIQQQQQQ", data, programs + number * program_size
        )
        if kind == _PROGRAM_TLS:
            thread_local = memory
        elif kind == _PROGRAM_LOAD:
            loaded = max(loaded, address + memory)
    sections = _sections(data)
    symbols: list[Symbol] = []
    code = range(0)
    for section in sections:
        if section.kind == _SECTION_SYMBOLS:
            symbols += _symbols(data, section, sections[section.link].offset)
        elif section.name == _CODE:
            code = range(section.address, section.address + section.size)
    return Library(tuple(symbols), thread_local, loaded, code)


def sass_digest(cubin: bytes) -> str:
    """Return a digest of the instructions, constants and shared-memory sizes of a cubin."""
    parts = []
    for section in _sections(cubin):
        kind = next((kind for kind in _EXECUTED if section.name.startswith(kind)), "")
        if kind and not section.name.startswith(_PARAMETERS):
            end = section.offset if section.kind == _SECTION_NO_BITS else section.offset + section.size
            contents = cubin[section.offset : end]
            parts.append(
                hashlib.sha256(kind.encode() + section.size.to_bytes(8, "little") + contents).digest()
            )
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()[:16]


def _sections(data: bytes) -> list[_Section]:
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    count, names_section = struct.unpack_from("<2H", data, 0x3C)
    headers = [_SECTION.unpack_from(data, table + number * _SECTION.size) for number in range(count)]
    names = headers[names_section][4]
    return [
        _Section(_text(data, names + name), kind, address, offset, size, link)
        for name, kind, _, address, offset, size, link, *_ in headers
    ]


def _symbols(data: bytes, section: _Section, names: int) -> Iterator[Symbol]:
    for at in range(section.offset, section.offset + section.size, 24):
        name, info, _, where, value, length = struct.unpack_from("<IBBHQQ", data, at)
        if where:  # 0 is a symbol of another library
            kind = info & 15
            yield Symbol(
                _text(data, names + name),
                value,
                length,
                kind == _KIND_TLS,
                kind in (_KIND_OBJECT, _KIND_UNIQUE),
            )


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
