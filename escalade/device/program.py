"""Kernel sources with their compile-time constants.

A `.cu` file under `escalade/kernels` is plain CUDA C++. The names it leaves open (`TILE_ROWS`, `Element`, …) are
defined by a prelude generated from the rung's config.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from escalade.errors import CompileError

KERNELS = pathlib.Path(__file__).parent.parent / "kernels"
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Type:
    """Type constant: `Element=Type("__half")` becomes `using Element = __half;`."""

    name: str


@dataclass(frozen=True)
class Macro:
    """Preprocessor constant: `Macro("__restrict__")` becomes `#define NAME __restrict__`."""

    text: str


Constant = bool | int | float | Type | Macro


@dataclass(frozen=True)
class Program:
    """Unit of compilation: a source, one entry point and its constants.

    The source path is relative to `escalade/kernels`, or absolute for your own kernels. Both may include the headers
    of `escalade/kernels`.
    """

    source: str
    entry: str
    constants: tuple[tuple[str, Constant], ...] = ()

    @staticmethod
    def of(source: str, entry: str, constants: Mapping[str, Constant] | None = None) -> Program:
        return Program(source, entry, tuple(sorted((constants or {}).items())))

    def text(self) -> str:
        """Return prelude and source; a `#line` directive keeps the source's line numbers."""
        return f'{prelude(self.constants)}#line 1 "{self.source}"\n{read(self.source)}'

    def headers(self) -> tuple[str, ...]:
        """List the headers of `escalade/kernels` that the source includes, directly or indirectly."""
        return included(self.source)

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}={_spell(value)}" for name, value in self.constants)
        return f"{self.entry} of {self.source} ({chosen})"


def prelude(constants: tuple[tuple[str, Constant], ...]) -> str:
    """Return the constants as C++ definitions, with the headers that define their types."""
    lines = []
    types = {value.name for _, value in constants if isinstance(value, Type)}
    if any(name.startswith("__half") for name in types):
        lines.append("#include <cuda_fp16.h>")
    if any(name.startswith("__nv_bfloat16") for name in types):
        lines.append("#include <cuda_bf16.h>")
    if "e4m3" in types:
        lines.append("struct e4m3;  // common/e4m3.cuh")
    for name, value in constants:
        match value:
            case Type():
                lines.append(f"using {name} = {value.name};")
            case Macro():
                lines.append(f"#define {name} {value.text}".rstrip())
            case bool():
                lines.append(f"constexpr bool {name} = {str(value).lower()};")
            case int():
                lines.append(f"constexpr {'int' if abs(value) < 2**31 else 'long long'} {name} = {value};")
            case float():
                lines.append(f"constexpr float {name} = {value!r}f;")
    return "".join(f"{line}\n" for line in lines)


def _spell(value: Constant) -> str:
    match value:
        case Type(name):
            return name
        case Macro(text):
            return text or "(nothing)"
        case bool():
            return str(value).lower()
        case _:
            return str(value)


@cache
def read(path: str) -> str:
    """Read a file under `escalade/kernels`, or at an absolute path."""
    try:
        return (KERNELS / path).read_text()
    except FileNotFoundError as error:
        raise CompileError(
            f"there is no kernel source {path!r}; write include paths relative to escalade/kernels, as in "
            '"common/name.cuh"'
        ) from error


@cache
def included(path: str) -> tuple[str, ...]:
    """List the headers of `escalade/kernels` that a file includes, directly or indirectly."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        new = set(_INCLUDE.findall(read(waiting.pop()))) - found
        found |= new
        waiting += new
    return tuple(sorted(found))
