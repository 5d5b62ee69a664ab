"""Imports between a package's modules, read from their sources."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Import:
    """One module named by an import statement of another."""

    importer: str
    imported: str
    inside_function: bool
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


@dataclass(frozen=True)
class Package:
    """Modules by dotted name, and every import in them, at any depth: in functions, and for type checkers too."""

    modules: Mapping[str, pathlib.Path]
    imports: tuple[Import, ...]

    @property
    def inner(self) -> tuple[Import, ...]:
        """The imports of the package's own modules."""
        return tuple(found for found in self.imports if found.imported in self.modules)

    def upward(self, layers: Sequence[Sequence[str]]) -> list[Import]:
        """Return the imports from a layer to a higher one. Layers are listed from the lowest to the highest."""
        rank = {name: _rank(name, layers) for name in self.modules}
        return [found for found in self.inner if rank[found.imported] > rank[found.importer]]

    def circles(self) -> list[list[str]]:
        """Return groups of modules that import each other, directly or indirectly, each sorted."""
        nearby: dict[str, set[str]] = {name: set() for name in self.modules}
        for found in self.inner:
            nearby[found.importer].add(found.imported)
        reached = {name: _reached(name, nearby) for name in self.modules}
        groups = {
            tuple(sorted(other for other in reached[name] if name in reached[other]))
            for name in self.modules
            if name in reached[name]
        }
        return [list(group) for group in sorted(groups)]


def _reached(name: str, nearby: Mapping[str, set[str]]) -> set[str]:
    """Return all modules reachable from a module by imports."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        new = nearby[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _rank(module: str, layers: Sequence[Sequence[str]]) -> int:
    """Return the layer that names the module, or the innermost folder that contains it."""
    found = [
        (len(name.split(".")), rank)
        for rank, names in enumerate(layers)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    if not found:
        raise LookupError(f"{module} is in no layer")
    return max(found)[1]


def read(*folders: pathlib.Path) -> Package:
    """Read the modules of one or several packages, each given by its folder."""
    modules = {_name(path, folder): path for folder in folders for path in sorted(folder.rglob("*.py"))}
    return Package(modules, tuple(found for name in modules for found in _imports(name, modules)))


def _name(path: pathlib.Path, folder: pathlib.Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(name: str, modules: Mapping[str, pathlib.Path]) -> Iterator[Import]:
    for node, inside in _statements(ast.parse(modules[name].read_text()), False):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(name, modules[name], node)
            paths = [f"{base}.{alias.name}" for alias in node.names]
            targets = [path if path in modules else base for path in paths]
        else:
            continue
        for target in dict.fromkeys(targets):
            yield Import(name, target, inside, node.lineno)


def _statements(parent: ast.AST, inside: bool) -> Iterator[tuple[ast.AST, bool]]:
    """Yield all statements at any depth, and whether they are in a function. Expressions contain none, and are
    skipped."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node, inside
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _statements(node, inside or function)


def _base(name: str, path: pathlib.Path, node: ast.ImportFrom) -> str:
    """Return the module that `from ... import` names; leading dots count folders upwards."""
    if not node.level:
        return node.module or ""
    up = node.level - (path.name == "__init__.py")
    parts = name.split(".")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])
