"""Records go to disk and come back; what is not a record is refused by line."""

from __future__ import annotations

import json
import pathlib
from dataclasses import replace

import pytest
import torch

from escalade.bench import store
from escalade.bench.store import Record, StoreError

RECORD = Record(
    "conv2d", "64to64_56_k3s1_b256", "fp32", "nchw", 256, "escalade", "direct",
    config={"threads": 256, "padded": True}, timing="graph", samples=40, median_us=1234.5, p20_us=1230.0, p80_us=1240.0,
    tflops=48.2, gbps=100.0, error=1e-7, registers=40, gpu="NVIDIA H200",
)  # fmt: skip


def test_round_trip(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "deep" / "conv2d.jsonl"
    peer = replace(RECORD, system="torch-nchw", rung="", config={})
    store.write(path, [RECORD, peer])
    assert store.load(path) == [RECORD, peer]


def test_a_newer_record_takes_the_place_of_the_older_one(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "conv2d.jsonl"
    other = replace(RECORD, dtype="fp16")
    store.write(path, [RECORD, other])
    newer = replace(RECORD, median_us=1000.0, config={"threads": 128})
    added = replace(RECORD, rung="tuned")
    store.write(path, [newer, added])
    assert store.load(path) == [newer, other, added]
    assert [p.name for p in tmp_path.iterdir()] == ["conv2d.jsonl"], "no temporary file stays behind"


def test_records_are_filed_by_gpu_and_workload(tmp_path: pathlib.Path) -> None:
    store.file_away(tmp_path, [RECORD, replace(RECORD, workload="conv2d_ablation")])
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.jsonl")) == [
        "h200/conv2d.jsonl",
        "h200/conv2d_ablation.jsonl",
    ]
    (tmp_path / "h200" / "conv2d_sweep.jsonl").write_text('{"us": 1.0}\n')
    assert len(store.load_folder(tmp_path)["h200"]) == 2, "sweeps are no records"


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
    ],
)
def test_gpu_folders(gpu: str, folder: str) -> None:
    assert store.gpu_folder(gpu) == folder


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"workload": "conv2d"', "line 2 is not JSON"),
        ("[1, 2]", "line 2 holds a list"),
        ('{"workload": "conv2d"}', "line 2 lacks problem"),
        (json.dumps({**json.loads(store.to_line(RECORD)), "speed": 3}), "no record has: speed"),
        (json.dumps({**json.loads(store.to_line(RECORD)), "batch": "many"}), "batch is 'many'"),
        (json.dumps({**json.loads(store.to_line(RECORD)), "median_us": "fast"}), "median_us is 'fast'"),
        (json.dumps({**json.loads(store.to_line(RECORD)), "samples": True}), "samples is True"),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: pathlib.Path, line: str, complaint: str) -> None:
    path = tmp_path / "conv2d.jsonl"
    path.write_text(f"{store.to_line(RECORD)}\n{line}\n")
    with pytest.raises(StoreError, match=complaint.replace("[", r"\[")):
        store.load(path)
    with pytest.raises(StoreError):  # and nothing is overwritten
        store.write(path, [RECORD])
    assert path.read_text().endswith(f"{line}\n")


def test_an_infinite_or_undefined_error_is_stored_as_none(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "conv2d.jsonl"
    store.write(path, [replace(RECORD, error=float("nan"), tolerance=float("inf"))])
    (loaded,) = store.load(path)
    assert loaded.error is None and loaded.tolerance is None


def test_provenance_says_where_and_how() -> None:
    origin = store.provenance(torch.device("cpu"), "escalade ladder conv2d")
    stamped = RECORD.stamped(origin)
    assert stamped.command == "escalade ladder conv2d" and stamped.gpu.startswith("twin")
    assert stamped.versions["torch"] == torch.__version__
    assert stamped.commit and stamped.date.endswith("+00:00")


def test_a_failed_record_has_no_time() -> None:
    with pytest.raises(StoreError, match="its error is 3"):
        _ = replace(RECORD, median_us=None, failure="its error is 3").time
