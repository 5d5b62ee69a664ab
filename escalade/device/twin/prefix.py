"""Precompiled header with everything that kernel sources include first.

The twin's headers and those of NVIDIA's 16-bit types take g++ several times as long as a typical kernel. They are in
one file, force-included and precompiled. If g++ rejects the precompiled header, it parses the text.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from escalade.device.cache import cache_key, default_cache
from escalade.device.sources import GUARD
from escalade.device.twin import toolchain
from escalade.errors import CompileError

FILE = "twin-prefix.h"
# NVIDIA's headers do not read our guard of a source's parameters.
_BLANK = re.compile(rf"\s*(?://.*|#\s*line\b.*|#define {GUARD})?")
_NVIDIA = re.compile(r"\s*#\s*include\s*<(cuda_fp16\.h|cuda_bf16\.h)>\s*")
_made: dict[str, pathlib.Path | None] = {}
"""Precompiled headers by key; None if g++ could not build or use one."""


def text(source: str) -> str:
    """Return the includes of the twin's headers and of NVIDIA's that start the source; later ones cannot be moved."""
    lines = ['#include "device.h"']
    for line in source.splitlines():
        if match := _NVIDIA.fullmatch(line):
            lines.append(f"#include <{match[1]}>")
        elif not _BLANK.fullmatch(line):
            break
    return "\n".join([*dict.fromkeys(lines), ""])


def compile_to_assembly(
    source: str,
    file: str,
    result: pathlib.Path,
    options: Sequence[str],
    interface: str,
    what: str,
    precompiled: bool = True,
) -> str:
    """Compile `source`, named `file`, to assembly; returns g++'s warnings.

    `interface` is a hash of the headers. For one-off builds, `precompiled=False` skips the precompiled header.
    """
    begin = text(source)
    files = {file: source, FILE: begin}
    command: list[str | pathlib.Path] = [*options, "-include", FILE, "-x", "c++", "-S", "-o", result, file]
    key = cache_key(interface, begin, repr(options))
    compiled = _compiled(key, begin, options) if precompiled else None
    if compiled:
        try:
            return toolchain.run(command, what, files, {f"{FILE}.gch": compiled})
        except CompileError:
            pass  # most likely an error in the source, which the plain compilation below reports too
    warnings = toolchain.run(command, what, files)
    if compiled:  # g++ accepts the text but not the precompiled header
        _made[key] = None
    return warnings


def _compiled(key: str, begin: str, options: Sequence[str]) -> pathlib.Path | None:
    def make(path: pathlib.Path) -> None:
        toolchain.run([*options, "-x", "c++-header", FILE, "-o", path], "the twin's headers", {FILE: begin})

    known = _made.get(key)
    if key not in _made or (known and not known.is_file()):
        try:
            _made[key] = default_cache().file(key, ".gch", make)
        except CompileError:
            _made[key] = None
    return _made[key]
