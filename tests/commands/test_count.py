"""The command `count`: its output and records."""

from __future__ import annotations

import pathlib

from escalade_bench.measure import records as store
from tests.bench.fake import Scale
from tests.commands.support import run


def test_count_shows_and_stores_the_requests_of_each_rung(
    with_operation: Scale, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "counts.jsonl"
    result = run("count", "scale", "--layout", "nchw", "--json", str(path), "--results", str(tmp_path))
    assert result.exit_code == 1, "one rung is wrong"
    assert "counted on the twin" in result.output and "bytes read" in result.output
    assert "conflicts" not in result.output, "a column in which nobody has a figure"
    records = {record.rung: record for record in store.load(path)}
    assert records["wrong"].failure and not records["wrong"].counts
    right = records["right"]
    assert right.workload == "scale_counts" and right.counts["unique_read_bytes"] >= 4 * 100
    (filed,) = tmp_path.glob("twin*/scale_counts.jsonl")
    assert right in store.load(filed)
