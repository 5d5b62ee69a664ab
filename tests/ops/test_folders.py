"""Every operation's folder has one shape: see docs/adding-an-operation.md."""

from __future__ import annotations

import importlib
import inspect
import pathlib

import pytest

from escalade import ops
from escalade.ops import OPERATIONS, Operation, Rung

OPS = pathlib.Path(ops.__file__).parent
NOT_OPERATIONS = {"base", "choose", "calling", "expressions", "shared"}
FOLDERS = sorted(
    folder.name
    for folder in OPS.iterdir()
    if (folder / "__init__.py").exists() and folder.name not in NOT_OPERATIONS
)
SHAPE = {"__init__.py", "problem.py", "problems.py", "operation.py", "op.py", "reference.py", "rungs"}
WITHOUT_OPERATOR = {"convert", "copy", "filter_sums", "stem"}
"""Operations that only a plan has: what they take and give are tensors as kernels lay them out, not PyTorch's."""
FURTHER = {"optimizer_step": {"rules.py"}}
"""What else a folder has: the optimisers as expressions."""


def test_folders_and_operations_are_the_same() -> None:
    assert set(FOLDERS) == set(OPERATIONS)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_the_shape(name: str) -> None:
    found = {entry.name for entry in (OPS / name).iterdir() if entry.name != "__pycache__"}
    wanted = SHAPE - ({"op.py"} if name in WITHOUT_OPERATOR else set()) | FURTHER.get(name, set())
    assert found == wanted


@pytest.mark.parametrize("name", FOLDERS)
def test_its_modules_hold_what_they_are_named_for(name: str) -> None:
    operation = OPERATIONS[name]
    held = importlib.import_module(f"escalade.ops.{name}.operation")
    assert getattr(held, name.upper()) is operation
    assert type(operation).__module__ == held.__name__
    assert [v for v in vars(held).values() if isinstance(v, Operation)] == [operation]
    problem = importlib.import_module(f"escalade.ops.{name}.problem")
    assert operation.problem.__module__ == problem.__name__
    problems = importlib.import_module(f"escalade.ops.{name}.problems")
    assert operation.problems is problems.PROBLEMS and operation.small_problems is problems.SMALL_PROBLEMS
    assert operation.in_pytorch is importlib.import_module(f"escalade.ops.{name}.reference")


@pytest.mark.parametrize("name", sorted(set(FOLDERS) - WITHOUT_OPERATOR))
def test_op_defines_the_operator_of_its_name(name: str) -> None:
    operator = getattr(ops, name)
    assert operator.__module__ == f"escalade.ops.{name}.op"
    assert "rung" in inspect.signature(operator).parameters


@pytest.mark.parametrize("name", FOLDERS)
def test_every_rung_is_made_in_rungs(name: str) -> None:
    """A module a family: each rung of the ladder is found in one of them."""
    made: list[Rung] = []
    for path in sorted((OPS / name / "rungs").glob("*.py")):
        module = importlib.import_module(f"escalade.ops.{name}.rungs.{path.stem}".removesuffix(".__init__"))
        for value in vars(module).values():
            made += [
                rung for rung in (value if isinstance(value, tuple) else (value,)) if isinstance(rung, Rung)
            ]
    assert all(any(rung is one for one in made) for rung in OPERATIONS[name].ladder)
