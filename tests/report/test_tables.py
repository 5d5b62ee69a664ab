"""The generated files: reproducible, complete, and built from records whose commits exist."""

from __future__ import annotations

import pathlib
import subprocess
from dataclasses import replace

import pytest

from escalade.errors import EscaladeError
from escalade_bench.measure import records as store
from escalade_bench.measure.records import Record
from escalade_bench.report import tables
from escalade_bench.report.cells import OLDER
from escalade_bench.report.table import Table
from tests.report.test_pages import NETWORK, ladder

ROOT = pathlib.Path(__file__).parent.parent.parent
EMPTY = "before\n{}\n{}\nafter\n".format(*tables.markers(tables.NETWORKS))
GRAPH = replace(NETWORK, system="torch-graph", median_us=400.0)
RECORDS = [*ladder(), NETWORK, GRAPH, replace(NETWORK, problem="224_b8", batch=8, commit="old")]


WITHOUT_FIGURES = ("peer", "operation")
"""First headings of the tables that describe peers and rungs."""


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "README.md").write_text(EMPTY)
    return tmp_path


def results(root: pathlib.Path, records: list[Record]) -> pathlib.Path:
    for record in records:
        store.write(root / "results" / "h200" / f"{record.workload}.jsonl", [record])
    return root / "results"


def test_without_records_the_block_is_empty_and_the_pages_report_it(root: pathlib.Path) -> None:
    tables.write(root / "results", root)
    assert (root / "README.md").read_text() == EMPTY
    assert "not been measured yet" in (root / "docs/ladder.md").read_text()
    assert tables.stale(root / "results", root) == []
    with pytest.raises(EscaladeError, match="there are no records"):
        tables.require_records(root / "results")
    (root / "README.md").write_text("no markers")
    with pytest.raises(EscaladeError, match="networks:begin"):
        tables.write(root / "results", root)


def test_the_same_records_give_the_same_files_and_a_changed_one_makes_them_stale(root: pathlib.Path) -> None:
    folder = results(root, RECORDS)
    first = {path: path.read_bytes() for path in tables.write(folder, root)}
    assert tables.stale(folder, root) == []
    assert {path.name for path in first if path.suffix == ".svg"} == {
        "climb.svg",
        "resnet18.svg",
        "speedups.svg",
    }
    assert {path: path.read_bytes() for path in tables.write(folder, root)} == first
    readme = (root / "README.md").read_text()
    assert (
        readme.startswith("before\n") and readme.endswith("after\n") and "/docs/images/climb.svg)" in readme
    )
    store.write(folder / "h200" / "resnet18.jsonl", [replace(GRAPH, median_us=300.0)])
    assert {path.name for path in tables.stale(folder, root)} == {"README.md", "networks.md"}


def test_every_row_of_every_page_is_marked_if_its_record_is_older() -> None:
    """With all records: a table that lost its records would mark nothing."""
    found = {
        gpu: [replace(record, older="changed") for record in own]
        for gpu, own in store.load_folder(ROOT / "results").items()
    }
    pages = {
        **tables.pages(found),
        **{k: i for parts in tables.blocks(found).values() for k, i in parts.items()},
    }
    checked = 0
    for name, items in pages.items():
        for table in items:
            if not isinstance(table, Table):
                continue
            if table.records is None:
                assert table.columns[0].heading in WITHOUT_FIGURES, f"{name}: {table.title} names no records"
                continue
            rows = [row for row in table.rows if list(table.records(row))]
            marked = [line for line in table.markdown().splitlines()[2:] if line.endswith(f" {OLDER} |")]
            assert len(marked) == len(rows) > 0 or not table.rows, f"{name}: {table.title}"
            checked += len(rows)
    assert checked > 500


def test_every_record_names_a_commit_of_the_history() -> None:
    """A figure of an unknown commit cannot be repeated. Not checked without a git history."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("there is no git history here")
    found = [record for own in store.load_folder(ROOT / "results").values() for record in own]
    history = git("rev-list", "HEAD").splitlines()
    commits = {record.commit.removesuffix("+changes") for record in found}
    missing = sorted(name for name in commits if not any(each.startswith(name) for each in history))
    assert not missing, f"records name commits that the history does not have: {', '.join(missing)}"
