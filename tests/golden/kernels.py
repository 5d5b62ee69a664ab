"""Launches of all rungs: programs, geometry and arguments, for some configs of every named problem.

A program is stored as its constants and flattened source. If those differ from the current ones, both are compiled,
and only different machine code is a difference.
"""

from __future__ import annotations

import gzip
import json
import os
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from escalade.device import nvrtc
from escalade.device.elf import sass_digest
from escalade.device.nvrtc import compile_program
from escalade.device.recipe import Recipe
from escalade.errors import EscaladeError, UnsupportedError
from escalade.ops import OPERATIONS
from escalade.ops.base.card import H200
from escalade.ops.base.rung import Config, Rung
from escalade.ops.choose.choice import choose
from tests.golden.sources import described, digest, flattened, restored
from tests.golden.store import Line, Report

ARCHITECTURE = "sm_90a"
PROGRAMS, SOURCES = "programs.json.gz", "sources.json.gz"
_FEW = 4
"""Constants up to this value count as switches when programs are selected for compilation."""
Compiler = Callable[[Sequence[tuple[str, str]]], Iterator[str]]


def tasks() -> list[str]:
    return [f"{one.name}/{dtype}" for one in OPERATIONS.values() for dtype in one.dtypes]


def collect(task: str, known: Sequence[str] = ()) -> tuple[list[Line], dict[str, dict[str, Any]]]:
    """Return the lines of an operation in a dtype, and its programs by digest."""
    name, dtype = task.split("/")
    operation = OPERATIONS[name]
    programs: dict[str, dict[str, Any]] = {}
    lines: dict[str, Line] = {}
    named = (*operation.problems, *operation.small_problems, *operation.crossover)
    problems = [replace(one, dtype=dtype, layout=layout) for one in named for layout in operation.layouts]
    for problem in dict.fromkeys(problems):
        where = f"{problem.name}/{dtype}/{problem.layout}"
        lines[f"{name}/{where}"] = {"chosen": _chosen(operation, problem)}
        for rung in operation.ladder.on(H200):
            if rung.refusal(problem) is None:
                lines |= _of_rung(f"{name}/{rung.name}/{where}", rung, problem, programs)
    return [{"key": key, "task": task, **line} for key, line in lines.items()], programs


def options() -> Line:
    """Return the compiler and its options."""
    given = sorted(nvrtc._OPTIONS.items())
    return {
        "key": "compiler", "task": "compiler", "options": given, "version": nvrtc.compiler_version(),
        "architecture": ARCHITECTURE,
    }  # fmt: skip


def _chosen(operation: Any, problem: Any) -> Any:
    try:
        found = choose(operation, problem, H200)
    except UnsupportedError:
        return None
    us = None if found.us is None else f"{found.us:.6g}"
    return [found.rung.name, _config(found.config), found.problem.layout, us]


def _of_rung(key: str, rung: Rung[Any], problem: Any, programs: dict[str, dict[str, Any]]) -> dict[str, Line]:
    configs = rung.configs(problem)
    space = digest(json.dumps([list(config.as_dict().values()) for config in configs], default=str))
    found: dict[str, Line] = {key: {"configs": len(configs), "space": space}}
    if not configs:
        return found
    wanted = {"first": 0, "middle": len(configs) // 2, "last": len(configs) - 1}
    estimates = [rung.estimate(problem, config) for config in configs]
    known = [(us, number) for number, us in enumerate(estimates) if us is not None]
    if known:
        wanted = {"best": min(known)[1], **wanted}
    seen: set[int] = set()
    for name, number in wanted.items():
        if number not in seen:
            seen.add(number)
            found[f"{key}/{name}"] = _of_recipe(
                configs[number], rung.recipe(problem, configs[number]), programs
            )
    return found


def _of_recipe(config: Config, recipe: Recipe, programs: dict[str, dict[str, Any]]) -> Line:
    ids = []
    for step in recipe.steps:
        description = described(step.program)
        ids.append(digest(json.dumps({**description, "source": ""})))
        programs[ids[-1]] = description
    steps = [spelled(step, skipped="program") for step in recipe.steps]
    return {
        "config": _config(config),
        "programs": ids,
        "steps": steps,
        "workspaces": [spelled(one) for one in recipe.workspaces],
    }


def _config(config: Config) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int | str) else str(value)
        for name, value in config.as_dict().items()
    }


def spelled(value: Any, skipped: str = "") -> str:
    """Return a value as text: dataclasses by the fields that differ from their defaults."""
    if is_dataclass(value) and not isinstance(value, type):
        given = [
            f"{each.name}={spelled(getattr(value, each.name))}"
            for each in fields(value)
            if each.name != skipped and (each.default is MISSING or getattr(value, each.name) != each.default)
        ]
        return f"{type(value).__name__}({', '.join(given)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(spelled, value))})"
    return repr(value)


def save_programs(folder: pathlib.Path, programs: dict[str, dict[str, Any]]) -> None:
    """Store programs, and their flattened sources by digest."""
    texts = {one["text"]: one["source"] for one in programs.values()}
    for name, value in (
        (PROGRAMS, dict(sorted(programs.items()))),
        (SOURCES, {text: flattened(source) for text, source in sorted(texts.items())}),
    ):
        (folder / name).write_bytes(gzip.compress(json.dumps(value).encode(), 6, mtime=0))


def load(path: pathlib.Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return loaded


def compare_programs(
    old: Sequence[Line],
    new: Sequence[Line],
    then: dict[str, dict[str, Any]],
    today: dict[str, dict[str, Any]],
    most: int | None,
    compiled: Compiler,
) -> Report:
    """Compare programs of equal keys: by text, then `most` per source (None: all) by machine code.

    `compiled` takes pairs of digests, stored and current, and yields for each the reason why it differs, or nothing.
    """
    report = Report()
    found = {line["key"]: line["programs"] for line in new if "programs" in line}
    pairs: dict[tuple[str, str], str] = {}
    for line in old:
        ours, theirs = line.get("programs"), found.get(line["key"])
        if ours is None or theirs is None:
            continue
        if len(ours) != len(theirs):
            report.differences.append(f"{line['key']}: {len(ours)} launches -> {len(theirs)}")
            continue
        for pair in zip(ours, theirs, strict=True):
            if pair[0] != pair[1]:
                pairs.setdefault(pair, line["key"])
    by_source = defaultdict(list)
    for pair in pairs:
        by_source[then[pair[0]]["source"], today[pair[1]]["source"]].append(pair)
    chosen = [pair for group in by_source.values() for pair in spread(group, then, most)]
    for pair, reason in zip(chosen, compiled(chosen), strict=True):
        report.compared += 1
        if reason:
            report.differences.append(f"{pairs[pair]}: {reason}")
    if pairs:
        report.notes.append(
            f"{len(pairs)} programs of {len(by_source)} sources have another text; {len(chosen)} of them were compiled"
        )
    return report


def spread(
    pairs: Sequence[tuple[str, str]], described: dict[str, dict[str, Any]], most: int | None
) -> list[tuple[str, str]]:
    """Return at most `most` pairs that cover as many values of switches as possible."""
    if most is None or len(pairs) <= most:
        return list(pairs)
    values = {pair: set(_switches(described[pair[0]])) for pair in pairs}
    chosen: list[tuple[str, str]] = []
    covered: set[Any] = set()
    for _ in range(most):
        best = max(values, key=lambda pair: len(values[pair] - covered))
        covered |= values.pop(best)
        chosen.append(best)
    return chosen


def _switches(program: dict[str, Any]) -> Iterator[Any]:
    for name, kind, value in program["constants"]:
        if kind != "int" or abs(value) <= _FEW:
            yield program["entry"], name, value


def reason_to_differ(
    folder: str, then: dict[str, Any], today: dict[str, Any], text: str, current: str
) -> str:
    """Compile a stored and a current program; return why they differ, or nothing."""
    place = pathlib.Path(folder)
    try:
        ours = _machine_code(place, then, text)
        theirs = _machine_code(place, today, current)
    except EscaladeError as error:
        return f"{today['source']} does not compile: {str(error).splitlines()[0]}"
    if ours == theirs:
        return ""
    return f"machine code of {today['source']} ({today['entry']}) differs"


def _machine_code(folder: pathlib.Path, description: dict[str, Any], text: str) -> str:
    path = folder / f"{digest(text)}.cu"
    if not path.exists():  # two processes may write it at once
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(path)
    return sass_digest(compile_program(restored(description, path), ARCHITECTURE).code)
