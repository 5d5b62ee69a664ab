"""MkDocs hooks: links that leave docs/, and the list of operators in the API reference.

Pages link to files outside of docs/ by relative paths, which work on GitHub but not on the site.
"""

from __future__ import annotations

import ast
import pathlib
import posixpath
import re
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
_LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
OPERATORS = "<!-- operators -->"
"""Where a page lists all functions that `escalade.ops` exports."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links that leave docs/ to the repository, and list the operators."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if path.startswith("docs/") or not (ROOT / path).exists():
            return link[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config['repo_url'].rstrip('/')}/{kind}/main/{path}{link[2] or ''})"

    listed = "\n\n".join(f"::: {path}" for path in operators())
    return _LINK.sub(absolute, markdown).replace(OPERATORS, listed)


def operators() -> list[str]:
    """Return the full names of the functions that `escalade.ops` exports, sorted by their last part.

    Read from the source: modules have the names of their functions (`escalade.ops.relu.relu`), and hide them.
    """
    tree = ast.parse((ROOT / "escalade" / "ops" / "__init__.py").read_text())
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    paths = {name: f"escalade.ops.{name}" for name in found}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("escalade.ops."):
            paths |= {each.name: f"{node.module}.{each.name}" for each in node.names if each.name.islower()}
    return [paths[name] for name in sorted(paths)]
