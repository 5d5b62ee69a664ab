"""Minimal ELF64 reader: the symbols and segment sizes that the twin needs."""

from __future__ import annotations

import pathlib
import struct
from dataclasses import dataclass

_PROGRAM_LOAD, _PROGRAM_TLS = 1, 7
_SECTION_SYMBOLS = 2
_CODE = ".text"
_KIND_OBJECT, _KIND_TLS, _KIND_UNIQUE = 1, 6, 10


@dataclass(frozen=True)
class Symbol:
    name: str
    value: int
    size: int
    is_thread_local: bool
    is_object: bool


@dataclass(frozen=True)
class Library:
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


def read(path: pathlib.Path) -> Library:
    data = path.read_bytes()
    programs, sections = struct.unpack_from("<QQ", data, 0x20)
    program_size, program_count, section_size, section_count, names_section = struct.unpack_from(
        "<HHHHH", data, 0x36
    )
    thread_local = loaded = 0
    for i in range(program_count):
        kind, _, _, address, _, _, memory, _ = struct.unpack_from(
            "<IIQQQQQQ", data, programs + i * program_size
        )
        if kind == _PROGRAM_TLS:
            thread_local = memory
        elif kind == _PROGRAM_LOAD:
            loaded = max(loaded, address + memory)
    symbols: list[Symbol] = []
    code = range(0)
    titles = _contents(data, sections + names_section * section_size)
    for i in range(section_count):
        at = sections + i * section_size
        name, kind, _, address, offset, size, link = struct.unpack_from("<IIQQQQI", data, at)
        if kind == _SECTION_SYMBOLS:
            symbols += _symbols(data, offset, size, _contents(data, sections + link * section_size))
        elif _text(data, titles + name) == _CODE:
            code = range(address, address + size)
    return Library(tuple(symbols), thread_local, loaded, code)


def _contents(data: bytes, section: int) -> int:
    """Return the file offset of a section's contents; `section` is the offset of its header."""
    start: int = struct.unpack_from("<Q", data, section + 24)[0]
    return start


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _symbols(data: bytes, offset: int, size: int, names: int) -> list[Symbol]:
    result = []
    for at in range(offset, offset + size, 24):
        name, info, _, section, value, length = struct.unpack_from("<IBBHQQ", data, at)
        if not section:  # undefined here
            continue
        kind = info & 15
        text = _text(data, names + name)
        result.append(Symbol(text, value, length, kind == _KIND_TLS, kind in (_KIND_OBJECT, _KIND_UNIQUE)))
    return result
