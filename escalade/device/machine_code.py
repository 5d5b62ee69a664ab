"""Digests of machine code: equal for two cubins that execute the same instructions.

NVRTC writes line tables, symbol names and build information beside the instructions. A comment, a renamed function or
another path changes those and not what the GPU executes, so a digest covers the instructions and constants alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator

_SECTION = struct.Struct("<2I4Q2I2Q")
_NO_BITS = 8
_EXECUTED = (".text.", ".nv.constant", ".nv.global", ".nv.shared")
_PARAMETERS = ".nv.constant0."
"""Bank 0 holds the arguments of a launch: its contents in the file are zeros."""


def sass_digest(cubin: bytes) -> str:
    """Return a digest of the instructions, constants and shared-memory sizes of a cubin."""
    parts = sorted(
        hashlib.sha256(kind.encode() + size.to_bytes(8, "little") + contents).digest()
        for kind, size, contents in _executed(cubin)
    )
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _executed(cubin: bytes) -> Iterator[tuple[str, int, bytes]]:
    for name, size, contents in _sections(cubin):
        kind = next((kind for kind in _EXECUTED if name.startswith(kind)), "")
        if kind and not name.startswith(_PARAMETERS):
            yield kind, size, contents


def _sections(cubin: bytes) -> Iterator[tuple[str, int, bytes]]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    table, count, names_index = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<2H", cubin, 60)
    headers = [_SECTION.unpack_from(cubin, table + number * _SECTION.size) for number in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, size, *_ in headers:
        start = names + name
        spelled = cubin[start : cubin.index(b"\0", start)].decode()
        yield spelled, size, b"" if kind == _NO_BITS else cubin[offset : offset + size]
