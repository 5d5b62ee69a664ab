"""Tables compare figures of one commit, and say so where records do not."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from escalade import cli
from escalade.errors import EscaladeError
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report import tables
from escalade.report.commits import mixed, newest

OURS = Record(
    "resnet18", "224_b8", "fp16", "nhwc", 8, "escalade", "", timing="graph", median_us=200.0, wall_us=240.0,
    images_per_s=40000.0, gpu="NVIDIA H200", driver="580.1", commit="new", date="2026-01-03T03:04:05+00:00",
    command="escalade bench resnet18", versions={"torch": "2.11"},
)  # fmt: skip
OLD = replace(OURS, system="torch-graph", median_us=777.0, commit="old", date="2026-01-02T03:04:05+00:00")


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "README.md").write_text("\n".join(tables.markers(tables.NETWORKS)))
    return tmp_path


def results(root: pathlib.Path, *records: Record) -> pathlib.Path:
    """As a merge of two branches may leave them."""
    for record in records:
        store.write(root / "results" / "h200" / f"{record.workload}.jsonl", [record])
    return root / "results"


def test_a_peer_of_another_commit_fails_the_check(root: pathlib.Path) -> None:
    folder = results(root, OURS, OLD)
    with pytest.raises(EscaladeError, match=r"resnet18 224_b8 fp16 mixes commits: new \(escalade\); old"):
        tables.require_records(folder)
    for arguments in ([], ["--check"]):
        ran = CliRunner().invoke(
            cli.app, ["tables", *arguments, "--results", str(folder), "--root", str(root)]
        )
        assert ran.exit_code != 0


def test_one_commit_passes(root: pathlib.Path) -> None:
    folder = results(root, OURS, replace(OLD, commit="new"), replace(OURS, dtype="fp32", commit="old"))
    tables.require_records(folder)
    assert not mixed([OURS, replace(OLD, commit="new")])


def test_tests_and_ceilings_are_no_comparison() -> None:
    assert not mixed([replace(OURS, workload="ceilings"), replace(OLD, workload="ceilings")])


def test_only_the_newest_commit_of_a_network_is_shown(root: pathlib.Path) -> None:
    stream = replace(OLD, workload="resnet18_stream", problem="x", system="escalade", rung="stream, pinned")
    other = replace(OLD, problem="224_b64", batch=64, system="escalade", median_us=555.0)
    tables.write(results(root, OURS, stream, other), root)
    page = (root / "docs/networks.md").read_text()
    assert "**200.0**" in page and "555" not in page and "777" not in page
    assert newest([OURS, OLD]) == [OURS] and newest([]) == []


def test_filing_a_run_takes_the_place_of_another_commit_s_comparison(tmp_path: pathlib.Path) -> None:
    """Otherwise the next partial run would leave a mixture behind."""
    fp32 = replace(OLD, dtype="fp32")
    store.file_away(tmp_path, [OLD, fp32, replace(OLD, system="jax")])
    (path,) = store.file_away(tmp_path, [OURS])
    assert [(r.system, r.dtype) for r in store.load(path)] == [("torch-graph", "fp32"), ("escalade", "fp16")]
    same = replace(OLD, commit="new")
    store.file_away(tmp_path, [same])
    assert len(store.load(path)) == 3


def test_other_commits_are_shown_where_what_they_were_made_of_is_the_same() -> None:
    last = replace(OURS, sources={"a.cu": "1", "b.cu": "1", "declared": "x"})
    peer = replace(last, system="torch-graph", sources={})
    same = replace(last, dtype="fp32", commit="old", date=OLD.date, sources={"b.cu": "1", "declared": "y"})
    its_peer = replace(peer, dtype="fp32", commit="old", date=OLD.date)
    changed = replace(same, dtype="bf16", sources={"a.cu": "0"})
    elsewhere = replace(same, dtype="tf32", versions={"torch": "2.10"})
    unknown = replace(same, problem="224_b9", sources={})
    assert newest([changed, its_peer, same, elsewhere, unknown, last, peer]) == [its_peer, same, last, peer]
