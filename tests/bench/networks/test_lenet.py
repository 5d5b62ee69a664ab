"""LeNet's benchmark: data it finds, data it can do without, and accuracy on Fashion-MNIST."""

from __future__ import annotations

import gzip
import os
import pathlib
import struct

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

from escalade import cli
from escalade.errors import UnsupportedError
from escalade.ops import operation
from escalade_bench.campaign.units import Session
from escalade_bench.measure import records as store
from escalade_bench.networks import data, op_times
from escalade_bench.networks.judging import Standard
from escalade_bench.networks.workload import Setting
from escalade_bench.networks.workloads import LENET, OnClothes

ROOT = pathlib.Path(__file__).parent.parent.parent.parent
CPU = torch.device("cpu")
DATA = pathlib.Path(os.environ.get("ESCALADE_DATA", ROOT.parent / "shared" / "data"))


def bench(*arguments: str) -> Result:
    command = ["bench", "lenet", *arguments, "--device", "cpu", "--seconds", "0"]
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli.app, command)


def write_clothes(folder: pathlib.Path, count: int, compressed: bool) -> np.ndarray:
    """Noise, with the labels 0, 1, 2, ..."""
    images = np.random.default_rng(3).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    headers = struct.pack(">4i", 2051, count, 28, 28), struct.pack(">2i", 2049, count)
    for name, header, each in zip((data.IMAGES, data.LABELS), headers, (images, labels), strict=True):
        content = header + each.tobytes()
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)
    return images


@pytest.fixture
def empty(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The only folder to search for data."""
    monkeypatch.setenv("ESCALADE_DATA", str(tmp_path))
    monkeypatch.setattr(data, "_PACKAGED", tmp_path / "packaged")
    return tmp_path


@pytest.mark.parametrize("compressed", [True, False])
def test_clothes_are_read_and_resized(
    empty: pathlib.Path, compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = write_clothes(empty, 5, compressed)
    found = data.clothes(4)
    assert found is not None and found.images.dtype == torch.uint8
    assert found.images.shape == (4, 1, 86, 86) and found.labels.tolist() == [0, 1, 2, 3]
    middle = torch.from_numpy(small[:4, 7:21, 7:21].astype(np.float32)).mean()
    assert float(found.images[:, :, 22:64, 22:64].float().mean()) == pytest.approx(float(middle), rel=0.02)
    monkeypatch.setattr(data, "COUNT", 4)
    x = LENET.inputs(6)
    assert x.shape == (6, 1, 86, 86) and x.dtype == torch.float32 and torch.equal(x[:2], x[4:])
    with pytest.raises(UnsupportedError, match="5 images of .28, 28., and 6 of"):
        data.clothes(6)


def test_broken_files_are_refused(empty: pathlib.Path) -> None:
    write_clothes(empty, 5, False)
    (empty / data.IMAGES).write_bytes(b"\0" * 6000)
    with pytest.raises(UnsupportedError, match="is not an IDX file"):
        data.clothes(5)


def test_without_data_it_says_what_is_missing_and_measures_noise(empty: pathlib.Path) -> None:
    records = empty / "r.jsonl"
    result = bench("--parts", "accuracy,batches", "-b", "2", "--json", str(records))
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert f"{data.WEIGHTS}, {data.IMAGES}" in said and empty.name in said
    accuracy, batch = store.load(records)
    assert accuracy.workload == "lenet_accuracy" and accuracy.accuracy is None and accuracy.error is not None
    assert (batch.workload, batch.batch, batch.problem) == ("lenet", 2, "86_b2") and batch.wall_us


def test_the_whole_command_on_the_cpu(tmp_path: pathlib.Path) -> None:
    """Run the convolutions on the twin: one image, one config of each rung."""
    path, plot = tmp_path / "r.jsonl", tmp_path / "p.png"
    result = bench("-b", "1", "--json", str(path), "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "Sum of Op-Times" in result.output and "no speeds" in result.output
    records = store.load(path)
    assert {r.workload for r in records} == {"lenet", "lenet_accuracy", op_times.OPERATION}
    convolutions = [r for r in records if r.workload == op_times.OPERATION]
    assert [r.problem for r in convolutions] == [name.format(batch=1) for name in op_times.FORMS[""]]
    assert not any(r.failure for r in records) and plot.read_bytes().startswith(b"\x89PNG")


def test_op_times_ask_for_every_rung_and_for_tf32_where_there_is_no_fp32() -> None:
    few_channels = operation(op_times.OPERATION)
    setting = Setting.of(LENET, Session(torch.device("cuda"), 0.3), peers={})
    problems = op_times._problems(few_channels, setting)
    assert [p.name for p in problems] == [p.name for p in few_channels.problems]
    asked = op_times._asked(few_channels, problems[1], setting)
    names = [rung.name for rung in few_channels.ladder]
    assert list(asked["fp32"]) == list(asked["fp16"]) == names
    assert "tensor_cores" in asked["tf32"] and "matrix_unroll" not in asked["tf32"]
    pooled = op_times._asked(few_channels, problems[3], setting)
    assert set(pooled["fp16"]) == set(few_channels.preferred(problems[3]))


@pytest.mark.parametrize(("count", "right"), [(100, 0.860), (1_000, 0.887)])
def test_it_knows_clothes(count: int, right: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESCALADE_DATA", str(DATA))
    if absent := data.missing(data.WEIGHTS, data.IMAGES, data.LABELS):
        pytest.skip(absent)
    found = data.clothes(count)
    assert found is not None
    setting = Setting.of(LENET, Session(CPU))
    judged = OnClothes(setting, setting.model, found.images.float())
    (record,) = judged.by_count(setting.engine("fp32"), found.labels, (count,))
    assert not record.failure and record.accuracy == pytest.approx(right, abs=1e-9)
    assert record.batch == count and record.note == f"float64: {right:.4f}"


def test_accuracy_is_the_share_of_right_answers_and_wrong_logits_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three of four right, and two of the first two; float64 has all."""
    labels = torch.tensor([0, 1, 2, 3])
    exact = torch.eye(4, dtype=torch.float64)
    logits = exact.clone()
    logits[3] = torch.tensor([1.0, 0.0, 0.0, 0.0])

    class Fake:
        dtype, device = "fp32", CPU

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return logits.float()

    judged = OnClothes(Setting.of(LENET, Session(CPU)), torch.nn.Identity(), torch.zeros(4))
    monkeypatch.setattr(judged, "standard", lambda dtype: Standard("fp32", (exact,), (1e-7,)))
    first, whole = judged.by_count(Fake(), labels, (2, 4))  # type: ignore[arg-type]
    assert (first.accuracy, first.failure, first.problem) == (1.0, "", "fashion_mnist_n2")
    assert whole.accuracy == 0.75 and whole.failure and whole.note == "float64: 1.0000"
    assert whole.tolerance == pytest.approx(4e-7)
