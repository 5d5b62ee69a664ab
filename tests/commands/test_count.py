"""The command `count`: what it shows and files, and what the counts of a ladder teach."""

from __future__ import annotations

import pathlib

from escalade.measure import records as store
from tests.bench.fake import Scale
from tests.commands.support import run


def test_count_shows_and_files_what_each_rung_asks_for(with_operation: Scale, tmp_path: pathlib.Path) -> None:
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


PROBLEM = "32to32_8_k3s1_b1"
CLIMB = {
    ("fp32", "nchw"): ("direct", "input_tile", "padded_tile", "vector_loads"),
    ("fp16", "nhwc"): ("fused_epilogue", "overlapped_store"),
}


def test_what_the_ladder_of_conv2d_teaches(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "conv2d.jsonl"
    for (dtype, layout), rungs in CLIMB.items():
        chosen = [part for name in rungs for part in ("--rung", name)]
        result = run(
            "count", "conv2d", "-p", PROBLEM, "-t", dtype, "-l", layout, *chosen, "--json", str(path)
        )
        assert result.exit_code == 0, result.output
    counts = {record.rung: record.counts for record in store.load(path)}
    direct, tile, padded, vector, mma, wgmma = counts.values()

    inside, warps = (3 * 8 - 2) ** 2, 32 * 8 * 8 // 32
    assert direct["fma"] == inside * 32 * 32, "what lies in the padding is not multiplied"
    assert direct["global_load_requests"] == 2 * 9 * 32 * warps, (
        "an element of the image and one of the filter"
    )
    assert tile["read_bytes"] < direct["read_bytes"] / 3
    assert tile["shared_load_conflicts"] == tile["shared_load_requests"], "two turns for each load"
    assert padded["shared_load_requests"] and not padded["shared_load_conflicts"]
    assert vector["global_load_requests"] < padded["global_load_requests"] / 4
    for fast in (mma, wgmma):
        assert fast["tensor_multiplications"] >= 9 * 32 * 32 * 64 and not fast["fma"]
        assert fast["read_bytes"] < vector["read_bytes"]
        assert fast["unique_read_bytes"] == 2 * (32 * 64 + 32 * 32 * 9) == direct["unique_read_bytes"] / 2
        assert fast["unique_written_bytes"] == fast["written_bytes"] == 2 * 32 * 64
    assert mma["global_copy_requests"] and "global_load_requests" not in mma, "cp.async alone brings operands"
    assert (
        wgmma["tensor_instructions"] < mma["tensor_instructions"]
        and wgmma["bulk_loads"]
        and wgmma["bulk_stores"]
    )
