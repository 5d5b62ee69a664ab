"""Prologues of 1×1 convolutions: which are fused, which are not, and unchanged results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import FusionLevel, for_batch, optimize
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.card import TWIN
from escalade.ops.conv2d.rungs.direct import Direct
from escalade.ops.conv2d.rungs.resident import Resident
from tests.bench.coverage.networks import NETWORKS
from tests.engine.graphs import Parts, evaluate, graph_of, ops

Run = Callable[[Parts, torch.Tensor], Any]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rungs with prologues that are preferred wherever possible, the simplest before the fastest."""
    monkeypatch.setattr(Direct, "last_resort", False)
    for rung, us in ((Direct, 0.0), (Resident, 0.1)):
        estimate = rung.estimate
        monkeypatch.setattr(
            rung,
            "estimate",
            lambda self, p, config, us=us, plain=estimate: us if p.prologue else plain(self, p, config),
        )


def made(run: Run) -> Graph:
    graph = graph_of(run)
    done = for_batch(optimize(graph, "fp16"), "fp16", 3)
    x = torch.randn(3, 3, 6, 6)
    for old, new in zip(evaluate(graph, x), evaluate(done, x), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
    return done


def prologues(graph: Graph) -> list[str]:
    return [node.attributes["prologue"] for node in graph if "prologue" in node.attributes]


def side_by_side(runs: Iterable[Run]) -> Run:
    """All of them in one graph, each with its own image; common work on the same image is done once."""
    return lambda p, x: tuple(run(p, x.roll(number, 3)) for number, run in enumerate(runs))


def pooled(p: Parts, x: torch.Tensor) -> torch.Tensor:
    """An image after a node without a fusable epilogue."""
    return F.max_pool2d(p.first(x), 3, 1, 1)


def gated(p: Parts, x: torch.Tensor) -> torch.Tensor:
    y = pooled(p, x)
    return y * torch.sigmoid(y.mean((2, 3), keepdim=True))


def normed(p: Parts, x: torch.Tensor) -> torch.Tensor:
    return F.relu(p.n(pooled(p, x)))


@pytest.mark.usefixtures("quick")
def test_elementwise_work_on_pixels_is_fused_into_the_convolution() -> None:
    cases: dict[str, Run] = {
        "relu(gain * x + shift)": lambda p, x: p.b(normed(p, x)),
        "gain * x + shift": lambda p, x: p.short(p.m(pooled(p, x))),
        "silu(gain * x + shift)": lambda p, x: p.b(F.silu(p.n(pooled(p, x)))) + p.first(x),
        "x * sigmoid(gate)": lambda p, x: F.relu(p.b(gated(p, x))),
        "silu(x) * gain": lambda p, x: p.b(F.silu(pooled(p, x)) * torch.arange(8.0).view(8, 1, 1)),
    }
    done = made(side_by_side(cases.values()))
    assert prologues(done) == list(cases)
    assert not {"batch_norm", "pointwise"} & set(ops(done))


@pytest.mark.usefixtures("quick")
def test_unfused_steps_stay_separate() -> None:
    cases: list[Run] = [
        lambda p, x: (lambda y: (p.b(y), p.a(y)))(normed(p, x)),  # read twice
        lambda p, x: (lambda y: (p.b(y), y))(normed(p, x)),  # an output
        lambda p, x: (lambda y: p.b(y) + y)(normed(p, x)),  # read as a residual too
        lambda p, x: p.a(normed(p, x)),  # 3x3
        lambda p, x: F.conv2d(normed(p, x), p.b.weight, padding=1),  # its result is zero-padded
        lambda p, x: F.conv2d(normed(p, x), p.b.weight[:, :4], groups=2),
        lambda p, x: p.b(pooled(p, x) * x.mean((1,), keepdim=True)),  # a factor per pixel
        lambda p, x: p.b(pooled(p, x) * p.a(p.first(x))),  # another image
    ]
    assert not prologues(made(side_by_side(cases)))


def test_the_mean_of_a_convolution_is_that_of_its_means() -> None:
    """It also fuses the preceding norm, as in DenseNet's transitions."""
    graph = made(lambda p, x: F.avg_pool2d(p.b(normed(p, x)), 2))
    pool, conv = tuple(graph)[-3:-1]
    assert (pool.op, conv.op) == ("avg_pool2d", "conv2d") and conv.inputs["x"] == pool.name
    assert pool.attributes["prologue"] == "relu(gain * x + shift)"


def test_means_that_stay_behind() -> None:
    cases: list[Run] = [
        lambda p, x: F.avg_pool2d(F.relu(p.b(pooled(p, x))), 2),
        lambda p, x: F.avg_pool2d(p.b(pooled(p, x)), 2, divisor_override=3),
        lambda p, x: F.avg_pool2d(p.b(pooled(p, x)), 3, 2, 1),  # zeros count
        lambda p, x: F.avg_pool2d(p.a(pooled(p, x)), 2),  # 3x3
        lambda p, x: (lambda y: (F.avg_pool2d(y, 2), y))(p.b(pooled(p, x))),  # also read by another node
        lambda p, x: (lambda y: F.avg_pool2d(p.b(y) + y, 2))(pooled(p, x)),
    ]
    graph = made(side_by_side(cases))
    means = [node for node in graph if node.op == "avg_pool2d"]
    assert [graph.nodes[node.inputs["x"]].op for node in means] == ["conv2d"] * len(cases)


def test_steps_of_a_last_resort_rung_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Resident, "supports_prologue", False)
    assert not prologues(made(lambda p, x: p.b(normed(p, x))))


def test_merges_that_take_longer_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for rung in (Direct, Resident):
        monkeypatch.setattr(rung, "last_resort", False)
        monkeypatch.setattr(rung, "estimate", lambda self, p, config: 1e3)
    assert not prologues(made(lambda p, x: p.b(normed(p, x))))


@pytest.mark.usefixtures("quick")
def test_a_rung_that_has_failed_is_not_counted_on() -> None:
    graph = optimize(graph_of(lambda p, x: p.b(normed(p, x))), "fp16")
    assert prologues(for_batch(graph, "fp16", 2))
    assert not prologues(
        for_batch(graph, "fp16", 2, FusionLevel.fused, TWIN, frozenset({"conv2d/direct", "conv2d/resident"}))
    )


@pytest.mark.share(7)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_kernels_compute_it(dtype: str) -> None:
    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(p.b(normed(p, x)), 3, 1, 1)
        return p.short(y * torch.sigmoid(y.mean((2, 3), keepdim=True)))

    names = run_on_twin(run, dtype, 2e-3 if dtype == "fp16" else 1e-6)
    assert [name.count("[pre:") for name in names] == [1, 1]


@pytest.mark.usefixtures("quick")
def test_an_image_inside_a_larger_buffer_is_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in DenseNet: the normalized input becomes part of the next concatenation."""
    monkeypatch.setattr(Direct, "supports_prologue", False)  # its kernel handles images separately

    def run(p: Parts, x: torch.Tensor) -> torch.Tensor:
        y = pooled(p, x)
        z = torch.cat((y, p.a(y)), 1)
        return torch.cat((z, F.conv2d(F.relu(p.wn(z)), p.short.weight.transpose(0, 1))), 1)

    names = run_on_twin(run, "fp16", 2e-3)
    assert "16to8_6_k1s1_b2[pre:relu(gain*x+shift)]_xpitch24_ypitch24" in names


def run_on_twin(run: Run, dtype: str, most: float) -> list[str]:
    """The convolutions of a network whose result by kernels matches float64 within a tolerance."""
    graph, x = graph_of(run), torch.randn(2, 3, 6, 6)
    engine = Engine(graph, dtype, "twin")
    wide = graph.copy()
    wide.constants = {name: tensor.double() for name, tensor in wide.constants.items()}
    (expected,) = evaluate(wide, x.double())
    assert relative_error(engine(x).double(), expected) < most
    return [step.problem for step in engine.explain(x).steps if step.operation == "conv2d"]


@pytest.mark.parametrize(
    ("name", "texts", "left"),
    [
        ("mobilenet_v3", ["x * gate"], {"pointwise": 0}),
        ("efficientnet", ["x * gate"], {"pointwise": 0}),
        ("densenet", ["relu(gain * x + shift)"] * 4, {"batch_norm": 1}),  # the one before the mean
    ],
)
def test_networks_have_nothing_left_in_front_of_their_convolutions(
    name: str, texts: list[str], left: dict[str, int]
) -> None:
    graph = optimize(capture(NETWORKS[name]().eval(), (torch.randn(1, 3, 64, 64),)), "fp16")
    done = for_batch(graph, "fp16", 32)
    assert prologues(done) == texts
    assert {op: ops(done).count(op) for op in left} == left
