"""Runs: they learn, end when they should, and resume bit for bit from any interruption."""

from __future__ import annotations

import copy
import csv
import io
import math
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from escalade import files
from escalade.errors import EscaladeError, UnsupportedError
from escalade_apps.train import checkpoints, logs, pictures
from escalade_apps.train.logs import DivergedError, Progress, ProgressReporter
from escalade_apps.train.parallel import Processes
from escalade_apps.train.settings import Settings
from escalade_apps.train.steps import DistributedStep, PlannedStep, TrainerStep, optimizer_of
from escalade_apps.train.trainer import Evaluation, Outcome, Trainer, trainer
from tests.train.quick import NOISY, add_noisy, hasten

SMALL: dict[str, Any] = {
    "data": "synthetic:40", "side": 8, "width": 4, "batch": 8, "epochs": 2, "every": 2, "flip": True, "shift": 1,
    "lr": 0.01,
}  # fmt: skip
HERE = Processes(torch.device("cpu"))
STEPS = 10
TOO_LARGE = 2.0**19
"""A loss scale at which the gradients of the noisy network overflow fp16, for the first few steps."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves and planned steps have tests of their own."""
    hasten(monkeypatch)
    add_noisy(monkeypatch)


def made(folder: pathlib.Path, task: str = "autoencoder", resume: bool = False, **given: Any) -> Trainer:
    return trainer(task, SMALL | given, folder, HERE, resume=resume)


def trained(folder: pathlib.Path, resume: bool = False, **given: Any) -> tuple[Outcome, list[Any]]:
    news: list[Any] = []
    return made(folder, resume=resume, **given).run(news.append), news


class KilledError(Exception):
    """Simulates the end of the process."""


def killed_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    left = [calls]

    def counted(*arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KilledError
        return function(*arguments, **keywords)

    return counted


def course(folder: pathlib.Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    state = checkpoints.load(folder / "checkpoint.pt")
    assert state is not None
    return state, logs.read(folder / "log.jsonl")


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


def test_a_run_resumes_bit_for_bit_wherever_it_was_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a network that draws random numbers, in a process whose generator has another state."""
    torch.manual_seed(7)
    trained(tmp_path / "whole", task=NOISY)
    whole = course(tmp_path / "whole")
    assert len(whole[1]) == STEPS + 2
    points = [
        (DistributedStep, "__call__", 0),  # before the first step
        (DistributedStep, "__call__", 3),  # between two checkpoints
        (Trainer, "_evaluate", 0),  # after the epoch's last step
        (checkpoints, "save", 2),  # evaluated, but not saved
        (files.os, "replace", 5),  # a checkpoint was written, but not renamed
        (logs.JsonLog, "write", 7),  # in the middle of the log
    ]
    for number, (owner, name, calls) in enumerate(points):
        folder = tmp_path / str(number)
        with monkeypatch.context() as until:
            until.setattr(owner, name, killed_after(calls, getattr(owner, name)))
            torch.manual_seed(7)
            with pytest.raises(KilledError):
                trained(folder, task=NOISY)
        with open(folder / "log.jsonl", "a") as log:
            log.write('{"event": "step", "st')  # a truncated line
        torch.manual_seed(8 if (folder / "checkpoint.pt").exists() else 7)
        outcome, _ = trained(folder, resume=True, task=NOISY)
        assert outcome.step == STEPS
        assert_same(course(folder), whole)


def test_csv_files_match_the_log_wherever_a_run_was_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables() -> dict[str, list[dict[str, str]]]:
        paths = {event: tmp_path / f"{event}s.csv" for event in (logs.STEP, logs.EVALUATION)}
        return {event: [*csv.DictReader(io.StringIO(path.read_text()))] for event, path in paths.items()}

    with monkeypatch.context() as until:
        until.setattr(DistributedStep, "__call__", killed_after(7, DistributedStep.__call__))
        with pytest.raises(KilledError):
            trainer("autoencoder", SMALL, tmp_path, HERE, csv=True).run(lambda news: None)
    with open(tmp_path / "steps.csv", "a") as file:
        file.write("9,0.5,0.1\n10,0.")  # rows after the checkpoint, the last one truncated
    trainer("autoencoder", SMALL, tmp_path, HERE, resume=True, csv=True).run(lambda news: None)
    expected: dict[str, list[dict[str, str]]] = {logs.STEP: [], logs.EVALUATION: []}
    for line in logs.read(tmp_path / "log.jsonl"):
        expected[line.pop("event")].append({name: str(value) for name, value in line.items()})
    assert tables() == expected and len(expected[logs.STEP]) == STEPS

    # A value that appears later adds a column to all rows.
    log = logs.CsvLog(tmp_path, STEPS)
    log.write(logs.STEP, STEPS + 1, loss=0.5, norm=2.0)
    log.close()
    rows = tables()[logs.STEP]
    assert len(rows) == STEPS + 1 and rows[-1]["norm"] == "2.0" and rows[0]["norm"] == ""


def test_a_run_stopped_on_request_resumes_later(tmp_path: pathlib.Path) -> None:
    trained(tmp_path / "whole")
    asked = iter([False, False, True])
    outcome = made(tmp_path / "asked").run(lambda news: None, lambda: next(asked))
    assert outcome.step == 3 and outcome.reason == "stopped at step 3"
    trained(tmp_path / "asked", resume=True)
    assert_same(course(tmp_path / "asked"), course(tmp_path / "whole"))


def test_a_run_learns_and_writes_its_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = torch.random.get_rng_state()
    given: dict[str, Any] = {
        "weight_decay": 1e-4,
        "optimizer": "adamw",
        "schedule": "cosine",
        "dtype": "fp16",
    }
    outcome, news = trained(tmp_path, epochs=6, **given)
    evaluations = [each for each in news if isinstance(each, Evaluation)]
    assert evaluations[-1].loss < 0.8 * evaluations[0].loss
    assert outcome.best == min(each.loss for each in evaluations)
    assert isinstance(news[-2], Progress) and (news[-2].step, news[-2].total) == (30, 30)
    assert torch.equal(before, torch.random.get_rng_state())
    steps = [line for line in logs.read(tmp_path / "log.jsonl") if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 31))
    assert max(line["lr"] for line in steps) == steps[2]["lr"] == 0.01 and steps[-1]["lr"] < 0.001
    assert steps[0]["lr"] == pytest.approx(0.01 / 3)
    assert Image.open(tmp_path / "reconstructions.png").size == ((8 * 10 - 2) * 12, (2 * 10 - 2) * 12)
    assert Image.open(tmp_path / "loss.png").width > 500
    monkeypatch.setattr(Trainer, "_make_step", lambda run, twin: None)
    again = made(tmp_path / "again", epochs=1, **given)
    again.model.load_state_dict(torch.load(tmp_path / "best.pt", weights_only=True))
    assert again._evaluate().loss == pytest.approx(outcome.best, rel=1e-5)


def test_planned_steps_go_on_bit_for_bit_too(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss scale that is too large shrinks while steps are skipped, in a second process too."""
    monkeypatch.undo()
    add_noisy(monkeypatch)
    monkeypatch.setattr(pictures, "curve", lambda *arguments: None)
    monkeypatch.setattr("escalade.engine.training.step.FIRST_SCALE", TOO_LARGE)
    given: dict[str, Any] = {"task": NOISY, "dtype": "fp16", "schedule": "cosine"}
    torch.manual_seed(7)
    trained(tmp_path / "whole", **given)
    torch.manual_seed(7)
    asked = iter([False] * 6 + [True])
    made(tmp_path / "ended", **given).run(lambda news: None, lambda: next(asked))
    middle = course(tmp_path / "ended")[0]["taken"]
    assert 0 < middle["scale"]["scale"] < TOO_LARGE and middle["scale"]["good_steps"] > 1
    assert all(one["exp_avg"].any() for one in middle["optimizer"]["state"].values())
    torch.manual_seed(8)
    outcome, _ = trained(tmp_path / "ended", resume=True, **given)
    assert outcome.step == STEPS
    assert_same(course(tmp_path / "ended"), course(tmp_path / "whole"))


@pytest.mark.parametrize("task", [NOISY, "resnet18"])
def test_an_evaluation_is_of_all_test_images_in_evaluation_mode(tmp_path: pathlib.Path, task: str) -> None:
    run = made(tmp_path, task, data="synthetic:130", side=8)
    test = run.dataset.test
    assert test.labels is not None
    assert len(test) % SMALL["batch"], "the last batch is to be smaller"
    model = run.model
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5) if "var" in name else buffer.normal_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    found = run._evaluate()
    assert model.training and torch.equal(drawn, torch.get_rng_state())
    assert_same(before, dict(model.state_dict()))
    images = test.pixels.permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        output = model.eval()(images)
    expected = F.mse_loss(output, images) if task == NOISY else F.cross_entropy(output, test.labels)
    assert found.loss == pytest.approx(float(expected), rel=1e-5)
    right = None if task == NOISY else float((output.argmax(1) == test.labels).float().mean())
    assert found.accuracy == (None if right is None else pytest.approx(right))


def test_a_resnet_is_trained_by_the_same_machinery(tmp_path: pathlib.Path) -> None:
    run = made(tmp_path, "resnet18", epochs=1, steps=2, schedule="cosine", side=16)
    news: list[Any] = []
    assert run.run(news.append).step == 2
    assert news[-1].accuracy is not None and 0 <= news[-1].accuracy <= 1


def test_it_ends_early_where_nothing_gets_better(tmp_path: pathlib.Path) -> None:
    outcome, _ = trained(tmp_path, epochs=9, patience=2, lr=1e-30)
    assert outcome.reason == "no better evaluation for 2 epochs" and outcome.step == 15
    assert trained(tmp_path, resume=True, epochs=9, patience=2, lr=1e-30)[0] == outcome
    assert trained(tmp_path, resume=True, epochs=4, patience=9, lr=1e-30)[0].step == 20


def test_a_loss_that_is_no_number_ends_it(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DivergedError, match="the loss is (nan|inf) at step .* smaller --lr"):
        trained(tmp_path, lr=1e30, optimizer="sgd")
    for loss in (math.nan, math.inf, -math.inf):
        reporter = ProgressReporter(torch.device("cpu"), 1, 1, (), lambda _: None)
        reporter.add(1, torch.tensor(loss), 0.1)
        with pytest.raises(DivergedError, match=f"the loss is {loss} at step 1"):
            reporter.flush()


def test_another_run_is_not_taken_for_the_same(tmp_path: pathlib.Path) -> None:
    trained(tmp_path, epochs=1)
    for given, said in (
        ({}, "already holds a run; .*--resume"),
        ({"resume": True, "batch": 4}, "--batch 4: .* started with batch 8"),
        ({"resume": True, "task": "resnet18"}, "started with task autoencoder"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            made(tmp_path, **given)
    state, _ = course(tmp_path)
    for changed, said in (
        (state | {"images": 1}, "images of .* have changed"),
        (state | {"order": 1}, "shuffles the images differently"),
        (state | {"settings": {}}, "lacks task"),
        (state | {"escalade_checkpoint": 0}, "not a checkpoint of this version"),
    ):
        torch.save(changed, tmp_path / "checkpoint.pt")
        with pytest.raises(EscaladeError, match=said):
            made(tmp_path, resume=True)
    (tmp_path / "checkpoint.pt").write_bytes(b"something else")
    with pytest.raises(EscaladeError, match="cannot be read as a checkpoint"):
        made(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"batch": 41}, "has only 40 training images"),
        ({"side": 6}, "multiples of 4"),
        ({"lr": 0.0}, "--lr 0.0: must be positive"),
        ({"dtype": "fp8"}, "training supports fp32, tf32, fp16 and bf16"),
        ({"epochs": 0}, "--epochs 0: must be at least 1"),
        ({"shift": 8}, "--shift 8: must be less"),
        ({"task": "vgg"}, "'vgg': supported are autoencoder, resnet18"),
    ],
)
def test_untrainable_models_are_refused(tmp_path: pathlib.Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        made(tmp_path, **given)


def test_learning_rates_climb_and_come_down() -> None:
    cosine = Settings("", "", 1, 1, 0.4, "sgd", "cosine", 0.0, "fp32", 0, 1, 8, False, 0, 0.0)
    rates = [cosine.rate(step, 20) for step in range(20)]
    assert rates[:3] == [0.2, 0.4, 0.4] and rates[11] == pytest.approx(0.2)
    assert rates[19] == pytest.approx(0.2 * (1 - math.cos(math.pi / 18)))
    assert cosine.rate(0, 1) == 0.4
    assert [replace(cosine, schedule="constant").rate(step, 20) for step in (0, 19)] == [0.4, 0.4]
    assert [replace(cosine, epochs=3, steps=limit).total(5) for limit in (None, 7, 99)] == [15, 7, 15]


def test_optimizers_have_the_settings_of_the_run() -> None:
    model = torch.nn.Linear(2, 2)
    for name, kind, further in (
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": False}),
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.999), "decoupled_weight_decay": False}),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999)}),
    ):
        made_of = optimizer_of(name, model, 0.3, 0.02)
        (group,) = made_of.param_groups
        assert type(made_of) is kind and len(group["params"]) == 2
        assert {key: group[key] for key in further} == further
        assert (group["lr"], group["weight_decay"]) == (0.3, 0.02)


@pytest.mark.parametrize("planned", [False, True])
def test_steps_are_those_of_a_plain_loop_at_the_given_rates(planned: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    expected = copy.deepcopy(model)
    own, theirs = (optimizer_of("sgd", each, 0.3, 0.02) for each in (model, expected))
    x, target = torch.randn(5, 4), torch.randn(5, 3)
    step: TrainerStep = (
        PlannedStep(model, F.mse_loss, own, (x, target), "fp32", False)
        if planned
        else DistributedStep(model, F.mse_loss, own, "fp32", torch.device("cpu"))
    )
    for rate in (0.1, 0.05, 0.2):
        theirs.param_groups[0]["lr"] = rate
        theirs.zero_grad()
        loss = F.mse_loss(expected(x), target)
        loss.backward()
        theirs.step()
        torch.testing.assert_close(step(x, target, rate), loss.detach())
        torch.testing.assert_close(model.state_dict(), expected.state_dict())


@pytest.mark.gpu
@pytest.mark.parametrize("task", ["autoencoder", "resnet18", NOISY])
def test_a_run_on_the_gpu_resumes_bit_for_bit(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, cuda: torch.device, task: str
) -> None:
    monkeypatch.undo()
    add_noisy(monkeypatch)
    given = SMALL | {
        "data": "synthetic:400",
        "side": 32,
        "width": 32,
        "batch": 64,
        "dtype": "fp16",
        "steps": 10,
    }
    on_gpu = Processes(cuda)
    torch.manual_seed(7)
    trainer(task, given, tmp_path / "whole", on_gpu).run(lambda news: None)
    asked = iter([False, False, True])
    torch.manual_seed(7)
    trainer(task, given, tmp_path / "ended", on_gpu).run(lambda news: None, lambda: next(asked))
    torch.manual_seed(8)
    trainer(task, given, tmp_path / "ended", on_gpu, resume=True).run(lambda news: None)
    assert_same(course(tmp_path / "ended"), course(tmp_path / "whole"))
