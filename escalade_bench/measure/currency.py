"""Decide whether a figure is current: compare the plan and machine code it was measured with to today's.

A record stores a digest of its plan (rung, config and problem of every step) and, per kernel source, two digests of the
programs that ran: one of their text without comments, one of their machine code. Equal texts need no compiler. Where
the texts differ, NVRTC compiles today's and the machine code decides, so renames, comments and refactorings leave a
figure current. Neither needs a GPU.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from escalade.device.elf import sass_digest
from escalade.device.nvrtc import compile_program, compiler_version
from escalade.device.program import Program, prelude
from escalade.device.recipe import KernelCall, Recipe
from escalade.device.sources import BLOCK, read
from escalade.engine.nodes import operator_of
from escalade.engine.plan.plan import Plan
from escalade.errors import EscaladeError
from escalade.ops.base.rung import Config, Rung
from escalade.ops.choose.pytorch import PYTORCH
from escalade_bench.measure.records import Record

GONE = "its rung or problem is gone"
PEER_VERSIONS = ("torch", "cuda", "cudnn")
"""Versions that a peer's figure depends on."""
_COMMENT_OR_TEXT = re.compile(r"""//[^\n]*|/[*].*?[*]/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'""", re.DOTALL)
_DIGITS = 12
_PACKAGES = ("escalade", "escalade_apps", "escalade_bench")
_SOURCES = (".py", ".cu", ".cuh", ".json")


@dataclass(frozen=True)
class Made:
    """Ingredients of a figure: a digest of the plan, and the programs that it launches."""

    plan: str
    programs: tuple[Program, ...]

    @staticmethod
    def of_rung(rung: Rung[Any], problem: Any, config: Config) -> Made:
        """Return what one rung launches for one problem, the packing of weights included."""
        step = ("", problem.name, problem.dtype, problem.layout, rung.name, config.as_dict())
        return Made(_digest([step]), rung.recipe(problem, config).programs)

    @staticmethod
    def of_plan(plan: Plan) -> Made:
        """Return what a plan launches; a step that PyTorch computes counts by its operator and shape."""
        steps: list[object] = []
        programs: dict[Program, None] = {}
        for step in plan.steps:
            title = operator_of(step.node).title(step.node)
            if step.lowered is not None and step.choice is not None:
                problem = step.lowered.problem
                chosen = step.choice.rung.name, step.choice.config.as_dict()
                steps.append((title, problem.name, problem.dtype, problem.layout, *chosen))
            elif step.in_pytorch:
                steps.append((title, str(plan.forms[step.node.name].shape), PYTORCH))
            if step.recipe is not None:
                programs.update(dict.fromkeys(_launched(step.recipe)))
        return Made(_digest(steps), tuple(programs))

    @staticmethod
    def together(parts: Iterable[Made]) -> Made:
        """Return what several plans launch, as one."""
        found = list(parts)
        programs = dict.fromkeys(program for part in found for program in part.programs)
        return Made(_digest([part.plan for part in found]), tuple(programs))


def stamped(record: Record, made: Made, architecture: str) -> Record:
    """Return the record with the digests of what ran."""
    code = {
        source: f"{_text(programs)}:{_machine_code(programs, architecture)}"
        for source, programs in _by_source(made).items()
    }
    return replace(record, plan=made.plan, code=code, older="", checked=package_digest())


def changed(record: Record, made: Made | None, architecture: str) -> str:
    """Return why the record is no longer current; empty if what ran for it is what would run today."""
    if made is None:
        return GONE
    if not record.plan:
        return "its machine code was not recorded"
    if record.plan != made.plan:
        return "the plan changed: another rung, config or problem"
    today = _by_source(made)
    for source, known in record.code.items():
        text, _, machine_code = known.partition(":")
        programs = today.pop(source, ())
        if _text(programs) == text:
            continue
        if not _same_compiler(record):
            return f"{source} changed, and NVRTC {record.versions.get('nvrtc')} is not here to compare machine code"
        try:
            if _machine_code(programs, architecture) != machine_code:
                return f"{source} changed"
        except EscaladeError as error:
            return f"{source} does not compile: {str(error).splitlines()[0]}"
    return f"{next(iter(today))} is launched too" if today else ""


@cache
def package_digest() -> str:
    """Return a digest of all sources and tables of our packages, which determine plans and kernels."""
    found, home = hashlib.sha256(), pathlib.Path(__file__).parents[2]
    for path in sorted(path for name in _PACKAGES for path in (home / name).rglob("*")):
        if path.suffix in _SOURCES:
            found.update(str(path.relative_to(home)).encode() + path.read_bytes())
    return found.hexdigest()[:_DIGITS]


def same_versions(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return True if peers' figures were measured with the same PyTorch, CUDA and cuDNN."""
    return all(one.get(name) == other.get(name) for name in PEER_VERSIONS)


def _same_compiler(record: Record) -> bool:
    return record.versions.get("nvrtc") == compiler_version().removeprefix("nvrtc ")


def _launched(recipe: Recipe) -> tuple[Program, ...]:
    """Return the programs of a call, without those that pack weights beforehand."""
    calls = (step for step in recipe.steps if isinstance(step, KernelCall) and not step.weights_only)
    return tuple(dict.fromkeys(call.program for call in calls))


def _by_source(made: Made) -> dict[str, tuple[Program, ...]]:
    found: dict[str, tuple[Program, ...]] = {}
    for program in made.programs:
        found[program.source] = (*found.get(program.source, ()), program)
    return found


def _text(programs: Iterable[Program]) -> str:
    """Return a digest of the compiler's input: constants, sources and headers without comments."""
    each = sorted(
        _digest(
            [program.entry, prelude(program.constants), *map(_code, (program.source, *program.headers()))]
        )
        for program in programs
    )
    return _digest(each)


def _machine_code(programs: Iterable[Program], architecture: str) -> str:
    return _digest(sorted(sass_digest(compile_program(one, architecture).code) for one in programs))


@cache
def _code(name: str) -> str:
    bare = _COMMENT_OR_TEXT.sub(
        lambda found: " " if found[0][0] == "/" else found[0], BLOCK.sub("", read(name))
    )
    return "\n".join(stripped for line in bare.splitlines() if (stripped := line.strip()))


def _digest(parts: Iterable[object]) -> str:
    text = json.dumps(list(parts), default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
