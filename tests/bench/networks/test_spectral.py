"""The spectral autoencoder's bench: reconstructions, scores and training on the CPU."""

from __future__ import annotations

import copy
import pathlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from escalade import cli, models
from escalade.engine import training_step
from escalade_bench.measure import records as store
from escalade_bench.networks import data
from escalade_bench.networks.measurement import Case, compare
from escalade_bench.networks.training_step import Training, escalade, exact, standard
from escalade_bench.networks.workloads import SPECTRAL, fused
from escalade_bench.peers import torch_training_step as peers
from escalade_bench.peers.network import Task
from escalade_bench.peers.torch_training_step import Lesson


def test_frames_look_like_logarithmic_spectra() -> None:
    x = SPECTRAL.inputs(2_000, seed=4).view(-1, data.FRAMES, data.BANDS)
    assert torch.equal(x.view(2_000, 320), SPECTRAL.inputs(2_000, seed=4))
    level, spread = x.mean((0, 1)), x.std((0, 1))
    assert float(level[0] - level[-1]) == pytest.approx(4, abs=0.2)
    assert float(spread[0]) == pytest.approx(0.6, rel=0.1) and float(spread[-1]) == pytest.approx(
        1.4, rel=0.1
    )


def test_the_command_measures_reconstructions_and_scores(tmp_path: pathlib.Path) -> None:
    path, plot = tmp_path / "r.jsonl", tmp_path / "p.png"
    result = CliRunner(env={"COLUMNS": "160"}).invoke(
        cli.app,
        [
            "bench", "spectral_autoencoder", "--device", "cpu", "--seconds", "1e-6", "-b", "8,4", "-t", "fp32,fp16",
            "--json", str(path), "--plot", str(plot), "--results", str(tmp_path),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "rows/s" in result.output
    records = store.load(path)
    batches = [(r.batch, r.dtype, r.layout) for r in records if r.workload == "spectral_autoencoder"]
    assert sorted(batches) == [(b, d, "flat") for b in (4, 8) for d in ("fp16", "fp32")]
    scores = [r for r in records if r.workload == "spectral_autoencoder_score"]
    assert [r.batch for r in scores] == [8, 8], "at the largest batch, as 512 is not among them"
    assert {r.workload for r in records} >= {"spectral_autoencoder_accuracy"}
    assert not any(r.failure for r in records) and plot.read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.glob("cpu-*/spectral_autoencoder*.jsonl"))) == 3


def test_steps_of_training_are_those_of_the_fused_network() -> None:
    """All systems take the same steps; a different starting point is wrong; graphs are refused without a GPU."""
    training: Training = SPECTRAL.parts["training-step"].measure.args[0]  # type: ignore[attr-defined]
    x = SPECTRAL.inputs(8, seed=2)
    lesson = Lesson(
        SPECTRAL.model().train(),
        training.loss,
        x,
        training.target(x, 0),
        "fp16",
        training.rate,
        training.scale,
    )
    own = replace(lesson, model=training.ours(lesson.model), _models={})
    assert isinstance(own.model, models.FusedSpectralAutoencoder) and own.model.training
    wrong = replace(own, model=copy.deepcopy(own.model), _models={})
    with torch.no_grad():
        wrong.model.frame_decoder.weight.mul_(1.05)  # type: ignore[operator, union-attr]
    known = standard(lesson, exact(lesson), training.most)
    case = Case("steps", Task(lesson.model, x, "fp16"), known, 1e-6)
    mine = {"escalade": lambda _: [escalade(own)], "wrong": lambda _: [escalade(wrong, system="wrong")]}
    found = {r.system: r for r in compare(case, {**mine, **peers.makers(lesson)}, lambda _: None)}
    assert "its error is" in found.pop("wrong").failure
    for system, record in found.items():
        if system in ("escalade", "torch-eager"):
            assert not record.failure and record.wall_us and record.error and record.layout == "flat"
        else:
            assert "needs a GPU" in record.failure
    assert len(found) == 5 and {"mlp", "mlp_backward"} <= set(found["escalade"].config["pytorch"])


def test_steps_are_planned_for_all_batches_and_fit_a_gpu() -> None:
    """A step at the largest batch holds x, its target, the result and its gradient, and little else."""
    part = SPECTRAL.parts["training-step"]
    assert {32, 64, 128, 256, 512, 2**20} <= set(part.batches)
    assert set(part.batches) <= set(SPECTRAL.batches)
    model, batch = fused(SPECTRAL.model().train()), 512
    x = SPECTRAL.inputs(batch)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    for dtype, itemsize in (("fp32", 4), ("fp16", 2)):
        plan = training_step(model, F.mse_loss, optimizer, (x, x), dtype=dtype, device="twin").plan
        # The partial sums of the backward kernel's CTAs do not grow with the batch.
        grows = plan.arena_bytes - (16 << 20)
        assert grows <= 2 * itemsize * x.numel()
