"""MkDocs hooks: the start page, links that leave docs/, and the list of operators in the API reference.

Pages link to files outside of docs/ by relative paths, which work on GitHub but not on the site. README.md links to
docs/ by addresses, which work on a package index but lead away from the site.
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
START = "README.md"
"""The index of docs/, which the site shows below the text of the README."""
INDEX = "\n## Where to read on\n"
"""The section of the README that the index of docs/ replaces."""
REPOSITORY_FACTS = ' data-md-component="source"'
"""Makes the theme ask GitHub for stars and releases on every visit."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links that leave docs/ to the repository, list the operators, and begin with the README."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def absolute(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link[1]))
        if path.startswith("docs/") or not (ROOT / path).exists():
            return link[0]
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({config['repo_url'].rstrip('/')}/{kind}/main/{path}{link[2] or ''})"

    listed = "\n\n".join(f"::: {path}" for path in operators())
    markdown = _LINK.sub(absolute, markdown).replace(OPERATORS, listed)
    return start(markdown, config["repo_url"]) if page.file.src_uri == START else markdown


def on_post_page(output: str, **_: Any) -> str:
    """Send no requests to other hosts."""
    return output.replace(REPOSITORY_FACTS, "")


def start(index: str, repository: str) -> str:
    """Return the README with the index of docs/ in place of its list of links, and with links that stay on the site."""
    text, _, further = (ROOT / "README.md").read_text().partition(INDEX)
    definitions = [line for line in further.splitlines() if re.match(r"\[[^\]]+\]: ", line)]
    _, _, pages = index.partition("\n")
    joined = "\n".join((text, pages, *definitions))
    return re.sub(rf"{re.escape(repository.rstrip('/'))}/(?:blob|raw)/main/docs/", "", joined)


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
