"""CUDA sources as one text each: includes resolved, comments and idle whitespace removed."""

from __future__ import annotations

import hashlib
import pathlib
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from escalade.device.program import Constant, Macro, Program, Type
from escalade.device.sources import BLOCK, read

_COMMENT_OR_TEXT = re.compile(r"""//[^\n]*|/[*].*?[*]/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'""", re.DOTALL)
_TEXT = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'""")
_INCLUDE = re.compile(r'#\s*include\s*"([^"]+)"')
_DIGITS = 16


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def flattened(source: str, reading: Callable[[str], str] = read) -> str:
    """Return a source with our headers inlined, normalized; it compiles to the same code."""
    return "\n".join(_joined(_inlined(source, reading, set(), [])))


def _inlined(name: str, reading: Callable[[str], str], included: set[str], depth: list[str]) -> Iterator[str]:
    """Yield the logical lines of a file and of its headers, each header once, like `#pragma once`.

    A header inside `#if` is inserted again at its next include, with a guard: the first may be inactive.
    """
    for line in _lines(BLOCK.sub("", reading(name))):
        if line.startswith(("#if", "# if")):
            depth.append(name)
        elif line.startswith(("#endif", "# endif")):
            depth.pop()
        found = _INCLUDE.match(line)
        if not found:
            if line != "#pragma once":
                yield line
            continue
        header = found[1]
        if header in included:
            continue
        if not depth:
            included.add(header)
        guard = f"INCLUDED_{re.sub(r'[^A-Za-z0-9]', '_', header)}"
        yield f"#ifndef {guard}"
        yield f"#define {guard}"
        yield from _inlined(header, reading, included, depth)
        yield "#endif"


@cache  # most sources include the same headers
def _lines(text: str) -> tuple[str, ...]:
    """Return lines without comments, with continued lines joined, and runs of whitespace outside strings as one
    space."""
    bare = _COMMENT_OR_TEXT.sub(
        lambda found: " " if found[0][0] == "/" else found[0], text.replace("\\\n", " ")
    )
    return tuple(stripped for line in bare.splitlines() if (stripped := _spaced(line).strip()))


@cache
def _spaced(line: str) -> str:
    """Collapse whitespace outside strings; next to brackets, commas and semicolons of code, remove it."""
    is_directive = line.lstrip().startswith("#")
    parts, end = [], 0
    for found in [*_TEXT.finditer(line), None]:
        code = re.sub(r"\s+", " ", line[end : found.start() if found else None])
        parts.append(code if is_directive else re.sub(r" ?([][(){};,]) ?", r"\1", code))
        if found:
            parts.append(found[0])
            end = found.end()
    return "".join(parts)


def _joined(lines: Iterator[str]) -> Iterator[str]:
    """Yield directives as lines, and the code between two of them as one line."""
    code: list[str] = []
    for line in lines:
        if not line.startswith("#"):
            code.append(line)
            continue
        if code:
            yield _spaced(" ".join(code))
        code = []
        yield line
    if code:
        yield _spaced(" ".join(code))


@cache
def source_digest(source: str) -> str:
    return digest(flattened(source))


def described(program: Program) -> dict[str, Any]:
    """Return a program as JSON, its source by digest."""
    constants = [[name, type(value).__name__, _plain(value)] for name, value in program.constants]
    return {
        "source": program.source,
        "text": source_digest(program.source),
        "entry": program.entry,
        "constants": constants,
    }


def _plain(value: Constant) -> Any:
    match value:
        case Type(name):
            return name
        case Macro(text):
            return text
        case _:
            return value


def restored(description: dict[str, Any], path: pathlib.Path) -> Program:
    """Return the program of a description, with its flattened source in a file."""
    kinds: dict[str, Callable[[Any], Constant]] = {"Type": Type, "Macro": Macro}
    constants = {
        name: kinds[kind](value) if kind in kinds else value for name, kind, value in description["constants"]
    }
    return Program.of(str(path), description["entry"], constants)
