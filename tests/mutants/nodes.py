"""Mutants of graph operators, of what they become, and of capturing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

NODES = "escalade/engine/nodes/"
CAPTURE = "escalade/engine/capture/"
RANDOM = "tests/engine/plan/test_random_plans.py"
OPERATORS = "tests/engine/nodes/test_operators.py"
EXPORT = ("tests/engine/capture/test_export.py", "tests/engine/capture/test_trace.py")


def _of(file: str, name: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(f"nodes/{name}", NODES + file, old, new, tests or (RANDOM, OPERATORS))


MUTANTS: tuple[Mutant, ...] = (
    _of(
        "slice.py", "a-range-with-a-step-is-a-range", 'if call("step", 1) == 1 else None', "if True else None"
    ),
    _of("slice.py", "ranges-from-the-end-begin-at-it", "start + whole if start < 0 else start", "start"),
)
