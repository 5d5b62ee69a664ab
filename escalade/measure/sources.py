"""What a figure is made of: the kernel sources that ran for it and the tables it was chosen by, each with a hash.

Python is not among them: a rung that launches the same kernel otherwise, or a pass that plans a network otherwise,
is measured again by name. Hashes are of what compilers see of a file, without comments and empty lines, so a commit
that changes no code overtakes no figure.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping

from escalade import files
from escalade.device.program import Program, included, read
from escalade.errors import CompileError
from escalade.ops.choose.table import SHIPPED, shipped_path

DECLARED = "declared"
"""The name under which a hash of how it was asked for stands among the sources: rungs, peers, the way of measuring."""
COMPARED_VERSIONS = ("torch", "cuda", "cudnn", "nvrtc")
"""Versions that make a figure another one."""
_DIGITS = 12
_COMMENT_OR_TEXT = re.compile(r"""//[^\n]*|/[*].*?[*]/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'""", re.DOTALL)


def of_programs(programs: Iterable[Program]) -> dict[str, str]:
    """The hash of every program's source, by its name."""
    return hashes(program.source for program in programs)


def hashes(names: Iterable[str]) -> dict[str, str]:
    """The hash of every source, by its name from `escalade/kernels` on; a source's headers are part of its hash."""
    return {name: hash_of_source(name) for name in sorted(set(names))}


def table_of(gpu: str) -> dict[str, str]:
    """The hash of the table of measured choices that Escalade ships for a card, by its file's name."""
    path = shipped_path(gpu)
    return {path.name: _hash_of_table(path.name)}


def declared(*parts: object) -> dict[str, str]:
    """The hash of how a figure was asked for."""
    return {DECLARED: _hashed([json.dumps(parts, default=str)])}


def overtaken(sources: Mapping[str, str]) -> list[str]:
    """The names among the sources whose files are not what they were; how a figure was asked for is no file."""
    return [name for name, known in sources.items() if name != DECLARED and _now(name) != known]


def agree(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether all that both were made of is the same."""
    return all(other.get(name, known) == known for name, known in one.items() if name != DECLARED)


def same_versions(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether figures were made with the same PyTorch, CUDA and compiler."""
    return all(one.get(name) == other.get(name) for name in COMPARED_VERSIONS)


def hash_of_source(name: str) -> str:
    """The hash of a kernel source and of every header of ours that it includes; empty if there is no such file."""
    try:
        return _hashed(map(_code, [name, *included(name)]))
    except CompileError:
        return ""


def _code(name: str) -> str:
    """A source as its compiler sees it: without comments, and without the space around lines."""
    bare = _COMMENT_OR_TEXT.sub(lambda found: " " if found[0][0] == "/" else found[0], read(name))
    return "\n".join(stripped for line in bare.splitlines() if (stripped := line.strip()))


def _now(name: str) -> str:
    return _hash_of_table(name) if name.endswith(".json") else hash_of_source(name)


def _hash_of_table(name: str) -> str:
    return _hashed([(files.read(SHIPPED / name) or b"").decode()])


def _hashed(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode() + b"\0")
    return found.hexdigest()[:_DIGITS]
