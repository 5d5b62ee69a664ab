"""The documentation is executed, and compared with the sources it quotes and the records it tabulates."""

from __future__ import annotations

import pathlib
import re

import pytest

from escalade.commands.doctor import VARIABLES
from escalade.device.sources import GUARD
from escalade.ops import OPERATIONS
from escalade_bench.report import tables
from escalade_bench.report.pages import readme
from tests import fresh

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


RUN = [
    block
    for page in ("README.md", "docs/engine.md", "docs/twin.md")
    for block in blocks((ROOT / page).read_text(), "python")
]


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.splitlines()[1])
def test_snippets_run(block: str) -> None:
    done = fresh.python("-c", block)
    assert done.returncode == 0, done.stderr


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
RUN_PAGES = """
import os, pathlib, re, sys, tempfile, traceback

failed = 0
for name in sys.argv[1:]:
    page, names = pathlib.Path(name).read_text(), {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in re.finditer(r"^```python\\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
                before = "\\n" * page.count("\\n", 0, block.start(1))
                exec(compile(before + block[1], name, "exec"), names)
        except Exception:
            traceback.print_exc()
            failed += 1
        os.chdir("/")
sys.exit(failed)
"""
"""Run the blocks of each page in order, in one namespace per page and a separate folder; line numbers are the
page's."""


def test_the_tutorials_run() -> None:
    """In one process: importing takes longer than running them."""
    assert all(blocks(page.read_text(), "python") for page in TUTORIALS)
    done = fresh.python("-c", RUN_PAGES, *map(str, TUTORIALS), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr


def test_generated_tables_match_the_records() -> None:
    stale = tables.stale(ROOT / "results", ROOT)
    assert not stale, f"{[str(path) for path in stale]} are out of date; run: escalade report tables"


def test_every_environment_variable_is_documented() -> None:
    sources = [p for p in ROOT.glob("escalade*/**/*") if p.suffix in (".py", ".cpp", ".h", ".cuh", ".cu")]
    read = {name for path in sources for name in re.findall(r"\bESCALADE_[A-Z_]+\b", path.read_text())}
    assert read - {GUARD} == set(VARIABLES)
    reference = (ROOT / "docs" / "reference.md").read_text()
    table = dict(re.findall(r"^\| `(ESCALADE_\w+)` \| `([^`]*)` \|", reference, re.MULTILINE))
    assert table == {name: default for name, (default, _) in VARIABLES.items()}


def test_the_readme_is_one_page() -> None:
    rows = README.count("\n| ") - 2  # rows without a measurement may be added
    shown = [
        line for line in README.splitlines() if not re.match(r"\[.*\]: ", line)
    ]  # not addresses of links
    assert len(shown) + readme.MOST_ROWS - rows <= 120


def test_the_readme_has_one_table_and_two_plots() -> None:
    """The table is generated: a hand-written figure has no record."""
    begin, end = tables.markers(tables.NETWORKS)
    before, _, rest = README.partition(begin)
    block, _, after = rest.partition(end)
    assert "\n| --- |" not in before + after and "![" not in before + after
    rows = [line for line in block.splitlines() if line.startswith("| ")]
    assert block.count("\n| --- |") == 1 and len(rows) <= 2 + readme.MOST_ROWS and block.count("![") == 2


def test_the_readmes_ladder_is_the_ladders() -> None:
    (block,) = blocks(README, "text")
    shown = [line.split()[0] for line in block.splitlines()]
    order = [rung.name for rung in OPERATIONS["conv2d"].ladder]
    assert len(shown) == 10 and shown == sorted(shown, key=order.index)
