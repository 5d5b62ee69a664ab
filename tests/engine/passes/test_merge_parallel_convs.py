"""Convolutions of one image merged into one: which are merged, which are not, and unchanged results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import for_batch, optimize
from escalade.engine.passes.estimates import Estimates
from escalade.ops.base.accuracy import relative_error
from tests.engine.graphs import evaluate


class Inception(nn.Module):
    """A 1×1 that is part of the result, and two in front of larger filters, the first with or without a `bias`; the
    second has another activation if `apart`, or reads another image if `another`."""

    def __init__(
        self, apart: bool = False, filters: int = 8, another: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, 16, 3, padding=1)
        self.own = nn.Conv2d(16, 16, 1)
        self.first, self.second = nn.Conv2d(16, filters, 1, bias=bias), nn.Conv2d(16, 24, 1)
        self.third = nn.Conv2d(filters, 16, 3, padding=1)
        self.fifth = nn.Conv2d(24, 32, 5, padding=2)
        self.apart, self.another = apart, another

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        first, second = torch.relu(self.first(x)), self.second(self.own(x) if self.another else x)
        second = second.sigmoid() if self.apart else second.relu()
        both = self.third(first).relu(), self.fifth(second).relu()
        return torch.cat((self.own(x).relu(), *both), 1)


def made(model: nn.Module, batch: int = 3) -> Graph:
    x = torch.randn(batch, 8, 7, 7)
    graph = capture(model.eval(), (torch.randn(2, 8, 7, 7),))
    done = for_batch(optimize(graph, "fp16"), "fp16", batch)
    for old, new in zip(evaluate(graph, x), evaluate(done, x), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)
    return done


def joined(graph: Graph) -> list[tuple[str, object]]:
    return [(node.op, node.shape[1]) for node in graph if "joined" in node.name]


def test_siblings_in_front_of_other_layers_are_one_layer() -> None:
    done = made(Inception())
    assert joined(done) == [("conv2d", 32)]
    assert [node.attributes["first"] for node in done if node.op == "slice"] == [0, 8]


@pytest.mark.parametrize(
    "model",
    [Inception(apart=True), Inception(filters=9), Inception(another=True), Inception(bias=False)],
    ids=["other activations", "parts that are not aligned", "of other images", "one without a bias"],
)
def test_others_stay(model: nn.Module) -> None:
    assert not joined(made(model))


def test_fusions_that_do_not_pay_off_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Estimates, "us", lambda self, choice: float(choice.problem.filters) ** 2)
    assert not joined(made(Inception()))


def test_readers_take_their_part_on_the_twin() -> None:
    """No copy is made for them."""
    torch.manual_seed(0)
    model, x = Inception().eval(), torch.randn(3, 8, 7, 7)
    engine = Engine(capture(model, (x,)), "fp16", torch.device("cpu"))
    plan = engine.program(x).plan
    assert [node for node in plan.graph if "joined" in node.name]
    assert all(step.is_alias for step in plan.steps if step.node.op in ("slice", "concatenate"))
    assert relative_error(engine(x), model.double()(x.double()).detach()) < 2e-3
