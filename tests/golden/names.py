"""Problem names and their parse, and the public interface: users, records and tables depend on them."""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import torch

import escalade
from escalade.engine import file
from escalade.errors import EscaladeError
from escalade.ops import OPERATIONS
from escalade.ops.base.card import H200
from escalade.ops.choose.table import shipped_path
from tests.golden.store import Line

ROOT = pathlib.Path(__file__).parent.parent.parent
_DOTTED = re.compile(r"\bescalade(?:_\w+)?(?:[.][A-Za-z]\w*)+")
_FROM = re.compile(r"\bfrom (escalade[\w.]*) import \(?([\w, \n]+)")


def problem_tasks() -> list[str]:
    return list(OPERATIONS)


def problems(task: str, known: Sequence[str] = ()) -> list[Line]:
    """Return each problem name of an operation in records, tables and the code, with its parse.

    Names in records that the operation does not support are skipped, unless they were `known` before.
    """
    operation = OPERATIONS[task]
    own = {one.name for one in (*operation.problems, *operation.small_problems, *operation.crossover)}
    own |= {key.split(" ")[1] for key in _table() if key.split(" ")[0] == task}
    own |= {key.removeprefix(f"{task} ") for key in known}
    found = []
    for name in sorted(own | _recorded()):
        line: Line = {"key": f"{task} {name}", "task": task}
        try:
            problem = operation.problem.parse(name)
        except (EscaladeError, ValueError) as error:
            if name in own:
                found.append({**line, "refused": type(error).__name__})
            continue
        values = {each.name: repr(getattr(problem, each.name)) for each in fields(problem)}
        found.append({**line, "fields": values, "name": problem.name})
    return found


@cache
def _table() -> list[str]:
    return list(json.loads(shipped_path(H200.name).read_text()))


@cache
def _recorded() -> frozenset[str]:
    """Return the names of problems in all records, except for networks, which belong to no operation."""
    lines = (line for path in ROOT.glob("results/*/*.jsonl") for line in path.read_text().splitlines())
    records = (json.loads(line) for line in lines if line)
    return frozenset(record["problem"] for record in records if isinstance(record.get("problem"), str))


def interface_tasks() -> list[str]:
    return ["interface"]


def interface(task: str, known: Sequence[str] = ()) -> list[Line]:
    """Return public names with their signatures: exported names, and names that the pages mention."""
    names = {f"escalade.{name}" for name in escalade.__all__} | set(mentioned())
    names |= {f"escalade.ops.{name}" for name in escalade.ops.__all__}
    names |= {key for key in known if _DOTTED.fullmatch(key)}
    found = [{"key": name, "task": task, "is": signature_of(name)} for name in sorted(names)]
    found += [
        {"key": str(schema.name), "task": task, "schema": str(schema)}
        for schema in sorted(torch._C._jit_get_all_schemas(), key=str)
        if schema.name.startswith("escalade::")
    ]
    return [line for line in found if "schema" in line or line["is"] != "missing" or line["key"] in known] + [
        {
            "key": "engine file",
            "task": task,
            "format": file.FORMAT,
            "version": file.VERSION,
            "reads": list(file.READ),
        }
    ]


def mentioned() -> Iterator[str]:
    """Yield dotted names from README and docs."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = page.read_text()
        yield from _DOTTED.findall(text)
        for module, names in _FROM.findall(text):
            yield from (f"{module}.{name.split()[0]}" for name in names.split(",") if name.strip())


def signature_of(name: str) -> Any:
    """Return the signature of a function, those of a class's public methods, or the kind of any other object."""
    value = _resolved(name.split("."))
    if inspect.isclass(value):
        own = (vars(base) for base in value.__mro__ if base.__module__.startswith("escalade"))
        members = {name: getattr(value, name) for names in own for name in names if not name.startswith("_")}
        return {"": _signature(value), **{each: _signature(member) for each, member in members.items()}}
    return _signature(value)


def _resolved(parts: Sequence[str]) -> Any:
    for split in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:split]))
            for part in parts[split:]:
                value = getattr(value, part)
            return value
        except (ImportError, AttributeError):
            continue
    return None


def _signature(value: Any) -> str:
    if value is None:
        return "missing"
    if inspect.ismodule(value):
        return "a module"
    if not callable(value):
        return f"a {type(value).__name__}"
    try:
        return str(inspect.signature(value))
    except (TypeError, ValueError):
        return f"a callable {type(value).__name__}"
