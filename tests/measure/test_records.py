"""Records are written and read back; invalid records are refused by line."""

from __future__ import annotations

import json
import multiprocessing
import pathlib
from dataclasses import replace

import pytest
import torch

from escalade_bench.measure import records as store
from escalade_bench.measure.records import Record, StoreError

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
        ("3", "line 2 holds a number"),
        ("null", "line 2 holds null"),
        ("[" * 100_000, "line 2 is not JSON .*nested too deeply"),
        ("1" * 5000, "line 2 is not JSON"),
        ("\udcff", "line 2 is no text in UTF-8"),
        *(
            (
                json.dumps({**json.loads(store.to_line(RECORD)), name: value}),
                f"line 2 has {shown} as its {name},",
            )
            for name, value, shown in (
                ("batch", "many", "'many'"),
                ("batch", 1.5, "1.5"),
                ("median_us", "fast", "'fast'"),
                ("median_us", float("nan"), "nan"),
                ("median_us", float("-inf"), "-inf"),
                ("median_us", 10**400, "10*..."),
                ("samples", True, "True"),
                ("workload", None, "None"),
                ("config", ["threads"], ".*"),
                ("config", {"tile": [float("nan")]}, ".*"),
                ("versions", {"torch": 2}, ".*"),
                ("versions", "new", "'new'"),
            )
        ),
    ],
)
def test_a_corrupt_line_is_named(tmp_path: pathlib.Path, line: str, complaint: str) -> None:
    path = tmp_path / "conv2d.jsonl"
    path.write_bytes(f"{store.to_line(RECORD)}\n{line}\n".encode(errors="surrogateescape"))
    before = path.read_bytes()
    for use in (lambda: store.load(path), lambda: store.write(path, [RECORD])):
        with pytest.raises(StoreError, match=f"conv2d.jsonl, {complaint}"):
            use()
    assert path.read_bytes() == before, "nothing is overwritten"
    assert [entry.name for entry in tmp_path.iterdir()] == ["conv2d.jsonl"]


def test_records_of_a_later_version_are_read_and_kept(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "conv2d.jsonl"
    later = json.dumps({"watts": {"mean": 300}, **json.loads(store.to_line(RECORD)), "runs": [1, 2]})
    path.write_text(later + "\n")
    assert store.load(path) == [RECORD]
    other = replace(RECORD, dtype="fp16")
    store.write(path, [other])
    assert path.read_text() == f"{later}\n{store.to_line(other)}\n"


def test_a_key_that_was_there_twice_is_there_once_after_a_new_record(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "conv2d.jsonl"
    lines = [store.to_line(replace(RECORD, median_us=us, dtype=dtype)) for us, dtype in
             ((1.0, "fp32"), (2.0, "fp16"), (3.0, "fp32"))]  # fmt: skip
    path.write_text("\n\n".join(lines))
    store.write(path, [replace(RECORD, median_us=4.0)])
    assert [(record.dtype, record.median_us) for record in store.load(path)] == [("fp32", 4.0), ("fp16", 2.0)]


def _write_ten(path: pathlib.Path, writer: int) -> None:
    for number in range(10):
        store.write(path, [replace(RECORD, problem=f"{writer} {number}")])


def test_writers_at_once_lose_nothing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "conv2d.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_ten, args=(path, number)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 8
    assert len(store.load(path)) == 80
    assert [entry.name for entry in tmp_path.iterdir()] == ["conv2d.jsonl"]


@pytest.mark.parametrize(
    "workload",
    [
        "../../x",
        "/etc/x",
        "a/b",
        "a\\b",
        "",
        ".",
        "..",
        ".hidden",
        "a\0b",
        "a\nb",
        "-x",
        "a" * 300,
        "conv2d_sweep",
        "ü",
    ],
)
def test_a_workload_cannot_name_a_file_elsewhere(workload: str, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "deep" / "results"
    with pytest.raises(StoreError, match="no file can be named after the workload"):
        store.file_away(folder, [replace(RECORD, workload=workload)])
    assert not list(tmp_path.rglob("*.jsonl"))


def test_every_recorded_workload_can_name_its_file() -> None:
    for records in store.load_folder(pathlib.Path(__file__).parents[2] / "results").values():
        assert all(store.file_name(record.workload) for record in records)


def test_an_infinite_or_undefined_error_is_stored_as_none(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "conv2d.jsonl"
    store.write(path, [replace(RECORD, error=float("nan"), tolerance=float("inf"))])
    (loaded,) = store.load(path)
    assert loaded.error is None and loaded.tolerance is None


def test_provenance_names_place_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "escalade train autoencoder -o runs/one --results=there --epochs 2 --json all.jsonl"
    monkeypatch.setattr("sys.argv", given.split())
    stamped = RECORD.stamped(store.provenance(torch.device("cpu")))
    assert stamped.command == "escalade train autoencoder --epochs 2", "without where things went"
    assert stamped.is_on_twin and not replace(stamped, gpu="NVIDIA H200").is_on_twin
    assert stamped.versions["torch"] == torch.__version__
    assert stamped.commit and stamped.date.endswith("+00:00")


def test_a_commit_that_is_given_comes_before_the_checkout_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESCALADE_COMMIT", "given")
    assert store.commit.__wrapped__() == "given"
    monkeypatch.delenv("ESCALADE_COMMIT")
    assert store.commit.__wrapped__() != "given"


def test_a_failed_record_has_no_time() -> None:
    with pytest.raises(StoreError, match="its error is 3"):
        _ = replace(RECORD, median_us=None, failure="its error is 3").time
