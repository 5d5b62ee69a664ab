"""A module is not named as what it defines: whoever imports the one would hide the other."""

from __future__ import annotations

import ast
import pathlib

import escalade

ROOT = pathlib.Path(escalade.__file__).parents[1]


def defined(source: str) -> set[str]:
    """The functions and classes at the top of a module."""
    return {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_no_module_is_named_as_what_it_defines() -> None:
    assert defined("def verify() -> None: ...\nclass Case:\n    def verified(self) -> None: ...\n") == {
        "verify",
        "Case",
    }
    operations = ROOT / "escalade" / "ops"  # named as their operators, which `escalade.ops` offers
    modules = (path for path in ROOT.glob("escalade*/**/*.py") if path.parent != operations)
    shared = [path for path in modules if path.stem in defined(path.read_text())]
    assert shared == []
