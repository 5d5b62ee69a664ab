"""What a kernel's source begins with, compiled once for all kernels: g++'s precompiled headers.

The headers of the twin and of NVIDIA's 16-bit types take g++ several times as long as a typical kernel. They
stand in a file of their own, which g++ is told to include first, and with it lies what g++ made of it before.
Where g++ does not take that, it reads the text.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from escalade.device.cache import cache_key, default_cache
from escalade.device.twin import toolchain
from escalade.errors import CompileError

FILE = "twin-prefix.h"
_BLANK = re.compile(r"\s*(?://.*|#\s*line\b.*)?")
_NVIDIA = re.compile(r"\s*#\s*include\s*<(cuda_fp16\.h|cuda_bf16\.h)>\s*")
_made: dict[str, pathlib.Path | None] = {}
"""Precompiled headers by key; None where g++ refused to make one, or to use it."""


def text(source: str) -> str:
    """The twin's headers, and those of NVIDIA's with which the source begins: only there they may be moved."""
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
    """One run of g++ over `source`, which it knows as `file`, and its warnings.

    `interface` stands for what the headers say; what is made once need not have them `precompiled`.
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
            pass  # The source is wrong, most likely: then the plain way says so too.
    warnings = toolchain.run(command, what, files)
    if compiled:  # g++ took the text and not what it made of it
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
