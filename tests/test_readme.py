"""The documentation is executed, compared with the sources it quotes and with the records it tabulates."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from escalade.commands.doctor import VARIABLES
from escalade.report import tables

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks(README, "python"), ids=lambda block: block.splitlines()[0])
def test_the_readme_runs(block: str) -> None:
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_generated_tables_are_what_the_records_say() -> None:
    stale = tables.stale(ROOT / "results", ROOT)
    assert not stale, f"{[str(path) for path in stale]} are out of date; run: escalade tables"


def test_every_environment_variable_is_documented() -> None:
    sources = [p for p in (ROOT / "escalade").rglob("*") if p.suffix in (".py", ".cpp", ".h", ".cuh", ".cu")]
    read = {name for path in sources for name in re.findall(r"\bESCALADE_[A-Z_]+\b", path.read_text())}
    assert read == set(VARIABLES)
    table = dict(re.findall(r"^\| `(ESCALADE_\w+)` \| `([^`]*)` \|", README, re.MULTILINE))
    assert table == {name: default for name, (default, _) in VARIABLES.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_code_quoted_from_the_sources_is_in_the_sources() -> None:
    page = (ROOT / "docs" / "adding-a-rung.md").read_text()
    for language, source in (
        ("cuda", "escalade/kernels/conv2d/direct.cu"),
        ("python", "escalade/ops/conv2d/direct.py"),
    ):
        known = {line.strip() for line in (ROOT / source).read_text().splitlines()}
        for block in blocks(page, language):
            for line in filter(None, map(str.strip, block.splitlines())):
                assert line in known, f"docs/adding-a-rung.md quotes {line!r}, which {source} does not have"


def test_every_documented_command_exists() -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run(
        [sys.executable, "-m", "escalade", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    ).stdout
    pages = [page.read_text() for page in PAGES]
    quoted = [
        text for page in pages for text in (*blocks(page, "sh"), *re.findall(r"`(escalade [^`]+)`", page))
    ]
    commands = set(re.findall(r"^escalade ([a-z]+)\b", "\n".join(quoted), re.MULTILINE))
    assert commands >= {"doctor", "ladder", "verify", "precompile", "tables"}
    assert all(command in shown for command in commands)
