"""Memory of a loaded program shared by all callers: writers declare it, are never chosen by default, and lock it."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device import twin
from escalade.device.program import Macro, Program
from escalade.device.recipe import ConstantCopy, Recipe
from escalade.device.run import Executable
from escalade.device.sources import KERNELS, included, read
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, Config, Operation, Rung, conv2d
from escalade.ops.base.card import H200, Card
from escalade.ops.base.cards import typical_card
from escalade.ops.choose.choice import choose, estimated
from escalade.ops.choose.table import Entry, Table, key_of
from escalade.ops.conv2d import Conv2dProblem
from escalade.tune import search
from escalade.tune.sweep import problems
from tests.support import all_rungs, in_threads, supported, variants

CPU = torch.device("cpu")
_SPACE = re.compile(r"\s+")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CONSTANT = re.compile(r"\b__constant__\s+[\w:<>\s]*?(\w+)\s*\[\s*(\w+)\s*\]\s*;")


@cache
def recipes() -> list[tuple[Operation[Any], Rung[Any], Any, Config, Recipe]]:
    """Every rung for its small problems, each in the first dtype and layout that it supports. All configs if the source
    has constant memory, else the first and the last, for one problem in four if the rung's first has none either.
    """
    found = []
    for operation, rung in all_rungs():
        problems = [problem for problem, *_ in supported(operation, rung, operation.small_problems)]
        for problem in problems if _has_arrays(rung, problems[0]) else problems[::4]:
            configs = rung.configs(problem)
            if not _has_arrays(rung, problem):
                configs = tuple(dict.fromkeys((configs[0], configs[-1])))
            found += [(operation, rung, problem, config, rung.recipe(problem, config)) for config in configs]
    return found


def _has_arrays(rung: Rung[Any], problem: Any) -> bool:
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    return any(declared_arrays(program.source) for program in recipe.programs)


@cache
def sharing() -> dict[str, tuple[Operation[Any], Rung[Any], Any, Config]]:
    """Each kind of recipe that fills memory of a program, by name."""
    found: dict[str, tuple[Operation[Any], Rung[Any], Any, Config]] = {}
    for operation, rung, problem, config, recipe in recipes():
        if recipe.shared_state:
            found.setdefault(f"{operation.name}/{rung.name}", (operation, rung, problem, config))
    return found


@cache
def declarations(source: str) -> str:
    return _COMMENT.sub("", read(source))


def test_kernels_have_no_variables_of_their_own_that_they_write() -> None:
    """Only `__constant__` arrays, which only a `ConstantCopy` fills; counters and scratch are workspaces."""
    sources = [path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".cuh")]
    assert len(sources) > 100
    for path in sources:
        text = declarations(str(path.relative_to(KERNELS)))
        for found in re.finditer(r"\b(__device__|__managed__|static)\s[^;{}()]*[;={\[]", text):
            statement = _SPACE.sub(" ", found[0])
            fixed = re.search(r"\b(constexpr|const)\b|\bextern __shared__|\b__constant__", statement)
            assert fixed or "__forceinline__" in statement, f"{path.name} has a variable: {statement}"


def arrays(program: Program) -> set[str]:
    """The `__constant__` arrays that a program uses, without placeholders of one element."""
    constants = dict(program.constants)
    found = set()
    for name, size in declared_arrays(program.source):
        value = constants.get(size, size)
        elements = int(value.text if isinstance(value, Macro) else value)  # type: ignore[arg-type]
        if elements > 1:
            found.add(name)
    return found


@cache
def declared_arrays(source: str) -> list[tuple[str, str]]:
    """Name and size of each."""
    return [found for one in (source, *included(source)) for found in _CONSTANT.findall(declarations(one))]


def test_who_uses_constant_memory_says_so() -> None:
    declared = {
        source.name for source in KERNELS.rglob("*.cu*") if "__constant__ " in declarations(str(source))
    }
    met = set()
    for operation, rung, problem, config, recipe in recipes():
        for program in recipe.programs:
            used = arrays(program)
            filled = {s.symbol for s in recipe.steps if isinstance(s, ConstantCopy) and s.program == program}
            case = f"{operation.name}/{rung.name} on {problem.name}, {config}"
            assert filled == used, f"{case}: {program} has {used or 'nothing'} to be filled, not {filled}"
            assert (program in recipe.shared_state) == bool(used), case
            met |= {program.source.rsplit("/", 1)[-1]} if used else set()
    assert declared == met, "every source with constant memory is met"


def test_constants_are_filled_at_every_call() -> None:
    """Another caller may have overwritten it since: a network cannot do it just once."""
    for operation, rung, problem, config in sharing().values():
        recipe = rung.recipe(problem, config)
        assert recipe.after_packing.shared_state == recipe.shared_state, f"{operation.name}/{rung.name}"
        assert not recipe.packing.shared_state


# --- never chosen by default

FEW = (
    "1to4_224_k3s1_b64",
    "1to4_86_k7s1p0_b10000",
    "3to8_64_k5s1_b32",
    "1to1_512_k3s1_b16",
    "2to16_40_k7s2_b8",
)


@pytest.mark.parametrize("architecture", [None, "sm_90a"])
def test_no_choice_shares_memory(architecture: str | None) -> None:
    asked: list[tuple[str, Any]] = [
        ("conv2d", Conv2dProblem.parse(name, dtype, layout))
        for name in FEW
        for dtype in ("fp32", "fp16")
        for layout in ("nchw", "nhwc")
    ]
    asked += [("conv2d", problem) for problem in problems(8, seed=3)]
    asked += [
        (operation.name, problem)
        for operation in OPERATIONS.values()
        for problem in variants(operation, operation.small_problems[0])
    ]
    for name, problem in asked:
        try:
            choice = estimated(OPERATIONS[name], problem, typical_card(architecture))
        except UnsupportedError:
            continue
        recipe = choice.rung.recipe(choice.problem, choice.config)
        assert not recipe.shared_state, f"{name} {problem.name} {problem.dtype} {problem.layout}: {choice}"


def test_nor_does_what_tuning_finds_or_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's table may hold old measurements."""
    for operation, rung, problem, config in sharing().values():
        offered = search.candidates(operation, problem, typical_card(None))
        for candidate in offered:
            assert not candidate.rung.recipe(problem, candidate.config).shared_state
        entry = Entry(rung.name, config.as_dict(), 0.001)
        table = Table("anything", {key_of(operation.name, problem): entry})
        choosing = import_module("escalade.ops.choose.choice")
        monkeypatch.setattr(choosing, "tables_for", lambda device, table=table: (table,))
        monkeypatch.setattr(Card, "of", lambda device: H200)
        assert table.find(operation.name, problem) is not None
        choice = choose(operation, problem, torch.device("cuda", 0))
        assert not choice.rung.recipe(choice.problem, choice.config).shared_state


def test_a_rung_by_name_shares_memory_only_if_it_has_nothing_else() -> None:
    for operation, rung, problem, _ in sharing().values():
        choice = choose(operation, problem, CPU, rung.name)
        alone = all(rung.recipe(problem, config).shared_state for config in rung.configs(problem))
        assert bool(rung.recipe(problem, choice.config).shared_state) == alone


# --- locking


@pytest.fixture
def all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch waits a little, so that the other threads also fill the shared memory."""
    launch = twin.TwinKernel.launch
    others = threading.Barrier(3)

    def late(self: twin.TwinKernel, *arguments: Any, **keywords: Any) -> None:
        try:
            others.wait(0.05)
        except threading.BrokenBarrierError:
            others.reset()
        launch(self, *arguments, **keywords)

    monkeypatch.setattr(twin.TwinKernel, "launch", late)


def test_the_rungs_that_share_memory_are_known() -> None:
    assert {"conv2d/constant_weights", "conv2d/tuned", "few_channels/direct"} <= set(sharing())


@pytest.mark.parametrize("name", ["conv2d/constant_weights", "conv2d/tuned", "few_channels/direct"])
def test_threads_take_turns(name: str, all_at_once: None, seed: int) -> None:
    operation, rung, problem, config = sharing()[name]
    recipe = rung.recipe(problem, config)

    def work(number: int) -> None:
        executable = Executable(recipe, CPU)
        for turn in range(2):
            inputs = operation.inputs(problem, CPU, seed + 10 * number + turn)
            y = operation.output(problem, CPU).fill_(float("nan"))
            absent = dict.fromkeys(("bias", "residual"))
            executable.bind({**absent, **inputs, "y": y})()
            expected = operation.reference(problem, inputs)
            assert float((y.double() - expected).norm() / expected.norm()) < 1e-2

    in_threads(work, 3)


def test_the_operator_by_name_in_threads(all_at_once: None) -> None:
    problem = replace(Conv2dProblem.square(1, 4, 12, 3, batch=2), layout="nchw")

    def work(number: int) -> None:
        torch.manual_seed(number)
        for _ in range(2):
            x, weight = torch.randn(problem.batch, 1, 12, 12), torch.randn(4, 1, 3, 3)
            y = conv2d(x, weight, padding=1, rung="constant_weights")
            torch.testing.assert_close(y, F.conv2d(x, weight, padding=1), rtol=1e-4, atol=1e-4)

    in_threads(work, 3)
