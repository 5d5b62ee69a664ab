"""The spectral autoencoder's bench: reconstructions, scores and training on the CPU."""

from __future__ import annotations

import pathlib

import pytest
import torch
from typer.testing import CliRunner

from escalade import cli, models
from escalade.bench.networks import spectral, training
from escalade.bench.networks.measurement import Case, compare
from escalade.bench.networks.spectral import SPECTRAL
from escalade.bench.peers import registry, torch_training
from escalade.bench.peers.network import NetworkPeer, Replay, Task
from escalade.measure import records as store


def silent(text: str) -> None:
    pass


def test_frames_look_like_logarithmic_spectra() -> None:
    x = SPECTRAL.inputs(2_000, seed=4).view(-1, spectral.FRAMES, spectral.BANDS)
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
            "bench", "spectral_autoencoder", "--device", "cpu", "--seconds", "0", "-b", "8,4", "-t", "fp32,fp16",
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


def test_training_compares_gradients() -> None:
    """On the CPU the fused network's kernels run on the twin."""
    model, x = SPECTRAL.model(), SPECTRAL.inputs(4, seed=2)
    fused = models.FusedSpectralAutoencoder(spectral.BANDS, spectral.FRAMES)
    fused.load_state_dict(model.state_dict())
    with torch.no_grad():
        other = models.SpectralAutoencoder(spectral.BANDS, spectral.FRAMES)
        other.load_state_dict(model.state_dict())
        other.frame_decoder.weight.mul_(1.001)
    expected = training.gradients(model, x, spectral._loss, 3)
    assert [gradient.shape for gradient in expected] == [p.shape for p in model.parameters()]
    standard = training.standard(model, x, "fp32", spectral._loss, expected)
    case = Case("training", Task(model, x, "fp32"), standard, 0.0)
    makers = {
        "escalade": torch_training.fused("escalade", fused, spectral._loss),
        "wrong": torch_training.fused("wrong", other, spectral._loss),
        **registry.trainers(spectral._loss),
    }
    records = {r.system: r for r in compare(case, makers, silent)}
    absent = {system for system, record in records.items() if "needs a GPU" in record.failure}
    assert absent == {"torch-graph", "torch-compile"}
    assert "result 0: its error is" in records["wrong"].failure
    for system in ("escalade", "torch-eager"):
        assert not records[system].failure and records[system].wall_us and records[system].error


def test_steps_learn_and_start_again() -> None:
    model, x = SPECTRAL.model(), SPECTRAL.inputs(16)
    trainer = torch_training.Trainer(model, Task(model, x, "fp32"), spectral._loss)
    trainer()
    first = [gradient.clone() for gradient in trainer.gradients()]
    for _ in range(20):
        trainer()
    assert not torch.equal(trainer.gradients()[0], first[0])
    trainer.restart()
    trainer()
    torch.testing.assert_close(trainer.gradients(), first)


def test_the_time_is_the_graph_s_and_the_call_is_the_other_s() -> None:
    log: list[str] = []
    y = torch.ones(1)
    replay = Replay(lambda: log.append("fill"), lambda: log.append("run"), (y,), (y,))

    def peer(name: str, replay: Replay | None = None) -> NetworkPeer:
        return NetworkPeer(
            "net", "flat", lambda: log.append(f"call {name}"), lambda _: (y,), lambda: None, replay,
            lambda: log.append(f"restart {name}"),
        )  # fmt: skip

    both = torch_training._both(peer("graph", replay), peer("called"))
    both.call()
    both.restart()
    assert both.replay is replay and log == ["call called", "restart graph", "restart called"]


def test_the_rate_is_divided_by_the_rows() -> None:
    """The loss is a sum over them: a step is as long for many rows as for few of the same."""
    model, x = SPECTRAL.model(), SPECTRAL.inputs(3)
    moved = []
    for rows in (x, x.repeat(4, 1)):
        trainer = torch_training.Trainer(model, Task(model, rows, "fp32"), spectral._loss)
        before = [parameter.detach().clone() for parameter in trainer._model.parameters()]
        trainer()
        moved.append(
            [new.detach() - old for new, old in zip(trainer._model.parameters(), before, strict=True)]
        )
    torch.testing.assert_close(moved[0], moved[1], rtol=1e-2, atol=1e-7)
