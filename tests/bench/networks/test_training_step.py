"""Whole training steps beside PyTorch's: errors are detected, and graphs are judged as timed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade import models
from escalade import training_step as escalade_step
from escalade_bench.measure.records import Record
from escalade_bench.networks import training_step
from escalade_bench.networks.judging import nudged
from escalade_bench.networks.measurement import Case, compare
from escalade_bench.networks.training_step import escalade, exact, standard
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers import torch_training_step as peers
from escalade_bench.peers.network import NetworkPeer, Task
from escalade_bench.peers.torch_training_step import Lesson, Pupil
from tests.bench.fake_cuda import Card


def lesson_in(dtype: str) -> Lesson:
    torch.manual_seed(0)
    x = WORKLOADS["autoencoder"].inputs(4, 8)
    return Lesson(models.ConvAutoencoder(4).train(), F.mse_loss, x, x, dtype, 1e-2, 2.0**12)


class OnGpu(Lesson):
    """Pretend that its tensors are on the card."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def judged(lesson: Lesson, *systems: NetworkPeer) -> dict[str, Record]:
    case = Case(
        "steps", Task(lesson.model, lesson.x, lesson.dtype), standard(lesson, exact(lesson), 4.0), 0.0
    )
    return {
        r.system: r
        for r in compare(case, {one.system: lambda _, one=one: [one] for one in systems}, lambda _: None)  # type: ignore[misc]
    }


def test_our_step_is_right_and_its_time_a_call_s() -> None:
    lesson = lesson_in("fp32")
    before = copy.deepcopy(lesson.model.state_dict())
    found = judged(lesson, escalade(lesson), peers._eager(lesson, "nchw"))
    for record in found.values():
        assert not record.failure and record.wall_us and record.error is not None
    said = found["escalade"].config
    assert said["steps"] > 10 and set(said["phases"]) == {"forward", "backward", "optimiser"}
    assert 0 < said["phases"]["optimiser"] < max(said["phases"].values()) <= said["memory"]["arena"]
    for name, tensor in lesson.model.state_dict().items():
        assert torch.equal(tensor, before[name]), "the model that all begin with stays as it is"


def _rate(lesson: Lesson) -> Lesson:
    return replace(lesson, rate=1.01 * lesson.rate)


def _loss(lesson: Lesson) -> Lesson:
    return replace(lesson, loss=lambda y, target: 1.001 * F.mse_loss(y, target))


def _target(lesson: Lesson) -> Lesson:
    return replace(lesson, target=torch.zeros_like(lesson.x))


@pytest.mark.parametrize("other", [_rate, _loss, _target])
def test_another_step_is_a_failure_and_has_no_time(other: Callable[[Lesson], Lesson]) -> None:
    lesson = lesson_in("fp32")
    (record,) = judged(lesson, peers._eager(other(lesson), "nhwc")).values()
    assert "more than the" in record.failure and record.wall_us is None


def test_a_step_without_momentum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results differ from the second step on."""
    lesson = lesson_in("fp32")
    known = standard(lesson, exact(lesson), 4.0)
    monkeypatch.setattr(peers, "MOMENTUM", 0.0)
    _, failure = known.judge(peers.results_of(lesson), 2.0)
    assert "more than the" in failure


def test_updates_may_be_as_small_as_the_rounding_of_parameters() -> None:
    lesson = replace(lesson_in("fp32"), rate=1e-5)
    known = standard(lesson, exact(lesson), 1.0)
    assert known.judge(peers.results_of(lesson, nudged(lesson.x, "fp32", 4)))[1] == ""
    assert "more than the" in known.judge(peers.results_of(_loss(lesson)))[1]


class _Block(torch.nn.Module):
    """An inverted residual with a bias before a BatchNorm: the bias gradient is pure rounding error."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(width, 2 * width, 1), torch.nn.BatchNorm2d(2 * width), torch.nn.SiLU(),
            torch.nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False),
            torch.nn.BatchNorm2d(2 * width), torch.nn.SiLU(), torch.nn.Conv2d(2 * width, width, 1, bias=False),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layers(x)


Fault = Callable[[peers.TorchStep], object]


def _harmed(name: str, harm: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    """A step that corrupts the gradient of one parameter."""
    return lambda step: dict(step.pupil.model.named_parameters())[name].register_hook(harm)


def _lost(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * (torch.arange(len(gradient)) != 1).view(-1, 1, 1, 1)


def _stale(step: peers.TorchStep) -> None:
    step.pupil.model.get_submodule("2.layers.1").momentum = 0.0  # type: ignore[assignment]


def _undecayed(step: peers.TorchStep) -> None:
    step.pupil.optimizer.param_groups[0]["weight_decay"] = 0.0


FAULTS: dict[str, Fault] = {
    "1.layers.0.weight": _harmed("1.layers.0.weight", lambda gradient: 1.1 * gradient),
    "1.layers.3.weight": _harmed("1.layers.3.weight", _lost),
    "1.layers.0.bias": _harmed("1.layers.0.bias", lambda gradient: gradient + 1e-2),
    "buffer 2.layers.1.running_": _stale,
    "layers": _undecayed,
}


def test_sixteen_bits_are_judged_by_pytorch_s_own_errors() -> None:
    """PyTorch in other precisions and our kernels pass; a wrong gradient, statistic or decay does not."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1), _Block(4), _Block(4), torch.nn.BatchNorm2d(4),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 5),
    ).train()  # fmt: skip
    x, target = torch.randn(4, 3, 6, 6), torch.zeros(4, dtype=torch.long)
    lesson = Lesson(model, F.cross_entropy, x, target, "fp16", 1e-2, 2.0**10)
    known = standard(lesson, exact(lesson), 100.0)
    for number in (4, 5):
        assert known.judge(peers.results_of(lesson, nudged(x, "fp16", number)))[1] == ""

    pupil, batch = Pupil(lesson, "nhwc"), lesson.batch("nhwc")
    ours = escalade_step(
        pupil.model, lesson.loss, pupil.optimizer, batch, dtype="fp16", loss_scale=lesson.scale, device="twin"
    )
    error, failure = known.judge(pupil.after(ours(*batch).clone(), lambda: ours(*batch).clone()))
    assert failure == "" and 0 < error < known.tolerance

    for name, fault in FAULTS.items():
        step = peers.TorchStep(lesson, "nhwc", batch)
        fault(step)
        _, failure = known.judge(step.pupil.after(step(), step))
        assert name in failure, f"{name}: {failure}"


def test_a_restart_restores_the_loss_scale_too() -> None:
    lesson = lesson_in("fp16")
    step = peers.TorchStep(lesson, "nhwc", lesson.batch("nhwc"))
    first = [one.clone() for one in step.pupil.after(step(), step)]
    step._scaler._scale.zero_()  # type: ignore[union-attr]  # as after many steps that overflowed
    step.restart()
    for one, again in zip(first, step.pupil.after(step(), step), strict=True):
        assert torch.equal(one, again)


def test_the_graph_keeps_what_it_reads(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next allocation reuses the memory of a freed loss scale."""
    made: list[weakref.ref[peers.TorchStep]] = []

    class Watched(peers.TorchStep):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            made.append(weakref.ref(self))

    monkeypatch.setattr(peers, "TorchStep", Watched)
    plain = lesson_in("fp32")
    lesson = OnGpu(plain.model, plain.loss, plain.x, plain.target, plain.dtype, plain.rate, plain.scale)
    graph = peers._graphed(lesson, "nhwc", "torch-graph")
    gc.collect()
    assert graph.replay and made[0]() is not None


def test_the_graph_of_a_whole_step_is_judged_after_several(card: Card) -> None:
    """Replays continue from the weights of the last replay; timing starts from the first."""
    plain = lesson_in("fp32")
    lesson = OnGpu(plain.model, plain.loss, plain.x, plain.target, plain.dtype, plain.rate, plain.scale)
    graph = peers._graphed(lesson, "nhwc", "torch-graph")
    assert graph.replay is not None and len(graph.replay.inputs) == 1, "x is its own target, and copied once"
    (record,) = judged(plain, graph).values()
    assert not record.failure and record.timing == "graph" and record.median_us

    def idle() -> None:
        pass

    broken = replace(graph, system="idle", replay=replace(graph.replay, run=idle))
    (record,) = judged(plain, broken).values()
    assert "its graph: " in record.failure and record.median_us is None


@pytest.mark.parametrize("name", ["autoencoder", "resnet18"])
def test_references_are_of_float64_throughout(name: str) -> None:
    """A loss that casts its input would add its own rounding to every system."""
    workload = WORKLOADS[name]
    training = workload.parts["training-step"].measure.args[0]  # type: ignore[attr-defined]
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 3, 1)) if name == "autoencoder" else _Classifier()
    x = workload.inputs(2, 32)
    lesson = Lesson(model.train(), training.loss, x, training.target(x, 0), "fp16", 1e-2, 1.0)
    assert {one.dtype for one in exact(lesson)} == {torch.float64}


class _Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3)))


def test_norms_follow_batches_in_training() -> None:
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3, momentum=None)).eval()
    made = training_step.trainable(model)
    assert made.training and not model.training
    assert made[0].momentum == 0.1 and model[0].momentum is None  # type: ignore[index]
