"""The command `ladder`: its output and records."""

from __future__ import annotations

import pathlib

from escalade_bench.measure import records as store
from tests.bench.fake import Scale
from tests.commands.support import run


def test_ladder_on_the_twin_writes_records_and_claims_no_speed(
    with_operation: Scale, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "records.jsonl"
    result = run("ladder", "scale", "--device", "twin", "--json", str(path))
    assert result.exit_code == 1, "one rung is wrong"
    assert "they are not speeds" in result.output and "GFLOP/s" not in result.output
    records = {record.rung: record for record in store.load(path)}
    assert records["right"].median_us and records["right"].tflops is None
    assert records["wrong"].failure and records["wrong"].median_us is None


def test_ladder_files_records_by_device(with_operation: Scale, tmp_path: pathlib.Path) -> None:
    result = run(
        "ladder", "scale", "--device", "twin", "-r", "right", "-p", "scale_50", "--results", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    (path,) = tmp_path.rglob("*.jsonl")
    assert path.name == "scale.jsonl" and store.load(path)[0].problem == "scale_50"
