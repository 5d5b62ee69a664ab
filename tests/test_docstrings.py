"""A docstring can be read by itself, without the name or the line in front of it."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

import escalade

PACKAGE = pathlib.Path(escalade.__file__).parent
FRAGMENT = re.compile(r"(Of|That|Those|The same|Its|Such|Likewise|Also|As|Like|With|By)\b")
"""First words that go on where something else began: 'Of a tile.', 'The same in NHWC.'"""


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Texts that stand alone, with their lines; an attribute has its own behind it."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


@pytest.mark.parametrize("folder", sorted({path.parent for path in PACKAGE.rglob("*.py")}), ids=str)
def test_docstrings_stand_by_themselves(folder: pathlib.Path) -> None:
    fragments = [
        f"{path.relative_to(PACKAGE)}:{line}: {text.splitlines()[0]}"
        for path in sorted(folder.glob("*.py"))
        for line, text in docstrings(ast.parse(path.read_text()))
        if FRAGMENT.match(text)
    ]
    assert fragments == []


def test_fragments_are_found() -> None:
    source = '''"""Of a tile."""

class A:
    pixels: int
    """That multiply."""

    def f(self) -> None:
        """Officially whole."""
'''
    assert [line for line, text in docstrings(ast.parse(source)) if FRAGMENT.match(text)] == [1, 5]
