"""Whole steps of training beside PyTorch's: what is wrong is seen, and graphs are judged as they are timed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from escalade import models
from escalade_bench.measure.records import Record
from escalade_bench.networks import training_step
from escalade_bench.networks.measurement import Case, compare
from escalade_bench.networks.training_step import escalade, exact, standard
from escalade_bench.networks.workloads import WORKLOADS
from escalade_bench.peers import torch_training_step as peers
from escalade_bench.peers.network import NetworkPeer, Task
from escalade_bench.peers.torch_training_step import Lesson
from tests.bench.fake_cuda import Card


def lesson_in(dtype: str) -> Lesson:
    torch.manual_seed(0)
    x = WORKLOADS["autoencoder"].inputs(4, 8)
    return Lesson(models.ConvAutoencoder(4).train(), F.mse_loss, x, x, dtype, 1e-2, 2.0**12)


class OnGpu(Lesson):
    """As if its tensors were there."""

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
    assert "its error is" in record.failure and record.wall_us is None


def test_a_step_without_momentum_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It differs from the second step on."""
    lesson = lesson_in("fp32")
    known = standard(lesson, exact(lesson), 4.0)
    monkeypatch.setattr(peers, "MOMENTUM", 0.0)
    _, failure = known.judge(peers.results_of(lesson), 2.0)
    assert "its error is" in failure


def test_the_graph_of_a_whole_step_is_judged_after_several(card: Card) -> None:
    """What is replayed goes on from the weights that the last replay has left, and the timing from the first."""
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
    """A loss that casts what it is given would make its own rounding everybody's."""
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
