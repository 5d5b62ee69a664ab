"""Kernel sources: their text and headers, the parameters they declare, and the structs they take by value.

A source, or a header it includes, declares its parameters in one block:

    #ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
    using Element = float;           // problem.dtype
    constexpr bool NHWC = true;      // problem.layout == "nhwc"
    constexpr int VECTOR = 8;        // config.vector: filters per thread
    #endif

The comment is a Python expression over what the rung passes to `Program.of` (`problem`, `config`, …), then, behind a
colon, the meaning. The fields of a struct are declared likewise; a field without a comment has the name of a field of
`problem`, and an expression for several fields is a sequence:

    struct ConvShape {
        int batch, channels, height, width;
        int stride_h, stride_w;  // problem.stride
    };
"""

from __future__ import annotations

import builtins
import pathlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

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
C_TYPES = {
    "fp32": "float",
    "tf32": "float",
    "fp16": "__half",
    "bf16": "__nv_bfloat16",
    "fp8": "e4m3",
    "int8": "s8",
    "uint8": "unsigned char",
}
"""Type of an element in kernels, by the name of its dtype."""

GUARD = "ESCALADE_PARAMETERS"
BLOCK = re.compile(rf"^#ifndef {GUARD}\b[^\n]*\n(.*?)^#endif", re.DOTALL | re.MULTILINE)
_DECLARATION = re.compile(
    r"(?:using (?P<type>\w+) = [^;]+;|constexpr (?P<kind>bool|int|float) (?P<constant>\w+) = [^;]+;"
    r"|#define (?P<macro>\w+)(?: [^/]*)?)\s*//\s*(?P<comment>.+)"
)
_FIELDS = re.compile(
    r"^\s*(?:int|u32|unsigned)\s+(?P<names>[\w\s,]+);[ \t]*(?://[ \t]*(?P<comment>.+))?$", re.MULTILINE
)
_FUNCTIONS = {
    name: getattr(builtins, name) for name in ("all", "any", "bool", "int", "len", "max", "min", "sum")
}


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


def parameters(source: str, scope: Mapping[str, Any], given: Mapping[str, Constant]) -> dict[str, Constant]:
    """Return the values of all parameters that a source and its headers declare; `given` ones are taken as they are."""
    found: dict[str, Constant] = dict(given)
    for file in (source, *included(source)):
        declared = _declared(file)
        missing = [one for one in declared if one.name not in found]
        if not missing:
            continue
        evaluate = _compiled(file, tuple(one.expression for one in missing))
        for one, value in zip(missing, evaluate(scope), strict=True):
            found[one.name] = one.constant(value)
    return found


def declared_names(file: str) -> tuple[str, ...]:
    """Return the names of the parameters that a source or header declares itself."""
    return tuple(one.name for one in _declared(file))


def declares_parameters(source: str) -> bool:
    """Return True if a source or one of its headers has a block of parameters."""
    return any(map(_declared, (source, *included(source))))


def struct(header: str, name: str, scope: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the fields of a struct of 32-bit integers that a header declares, in order."""
    names, expressions = _struct(header, name)
    values: list[int] = []
    for fields, value in zip(names, _compiled(header, expressions)(scope), strict=True):
        several = (value,) if len(fields) == 1 else tuple(value)
        if len(several) != len(fields):
            raise CompileError(f"{header}: {name} has {len(fields)} fields {', '.join(fields)} for {several}")
        values += several
    return tuple(int(value) for value in values)


@dataclass(frozen=True)
class _Declaration:
    name: str
    kind: str
    """`type`, `macro`, `bool`, `int` or `float`."""
    expression: str

    def constant(self, value: Any) -> Constant:
        match self.kind:
            case "type":
                return value if isinstance(value, Type) else Type(C_TYPES[value])
            case "macro":
                return value if isinstance(value, Macro) else Macro(str(value))
            case "bool":
                return bool(value)
            case "int":
                return int(value)
            case _:
                return float(value)


@cache
def _declared(file: str) -> tuple[_Declaration, ...]:
    block = BLOCK.search(read(file))
    if block is None:
        return ()
    found = []
    for line in filter(None, map(str.strip, block[1].splitlines())):
        declaration = _DECLARATION.fullmatch(line)
        if declaration is None:
            raise CompileError(
                f"{file}: {line!r} in the block of parameters is no declaration such as "
                "`constexpr int VECTOR = 8;  // config.vector: filters per thread`"
            )
        name = declaration["type"] or declaration["constant"] or declaration["macro"]
        kind = "type" if declaration["type"] else declaration["kind"] or "macro"
        found.append(_Declaration(name, kind, _expression(declaration["comment"])))
    return tuple(found)


@cache
def _struct(header: str, name: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return the names that each line of a struct declares, and their expressions."""
    body = re.search(rf"^struct {name} {{[^\n]*\n(.*?)^}};", read(header), re.DOTALL | re.MULTILINE)
    if body is None:
        raise CompileError(f"{header} has no struct {name}")
    names, expressions = [], []
    for line in _FIELDS.finditer(body[1]):
        fields = tuple(field.strip() for field in line["names"].split(","))
        names.append(fields)
        expressions.append(
            _expression(line["comment"])
            if line["comment"]
            else f"({', '.join(f'problem.{field}' for field in fields)})"
        )
    return tuple(names), tuple(expressions)


def _expression(comment: str) -> str:
    return comment.split(": ", 1)[0].strip()


@cache
def _compiled(file: str, expressions: tuple[str, ...]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Return a function that evaluates the expressions of a file at once: recipes are made often."""
    try:
        code = compile(f"({''.join(f'({one}),' for one in expressions)})", str(KERNELS / file), "eval")
    except SyntaxError as error:
        raise CompileError(
            f"{file}: {error.text or error} among its parameters is no Python expression"
        ) from error

    def evaluate(scope: Mapping[str, Any]) -> tuple[Any, ...]:
        try:
            values: tuple[Any, ...] = eval(code, {"__builtins__": _FUNCTIONS}, scope)
        except (AttributeError, NameError) as error:
            raise CompileError(f"{file} declares a parameter that has no value here: {error}") from error
        return values

    return evaluate
