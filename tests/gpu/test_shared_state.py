"""Rungs that keep weights in constant memory: threads, streams and graphs, each with its own weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.recipe import Recipe
from escalade.device.run import Executable
from escalade.errors import LaunchError
from escalade.ops import conv2d
from escalade.ops.base.switches import precision
from escalade.tune.verification import compare, max_peer_error
from tests.ops.test_shared_state import sharing
from tests.support import in_threads

pytestmark = pytest.mark.gpu

RUNG: dict[str, Any] = {"padding": 1, "rung": "constant_weights"}


def images(device: torch.device, batch: int = 64) -> torch.Tensor:
    return torch.randn(batch, 1, 224, 224, device=device)


def weights(device: torch.device, count: int) -> list[torch.Tensor]:
    return [torch.randn(4, 1, 3, 3, device=device) for _ in range(count)]


def right(y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    with precision("fp32"):
        return torch.allclose(y, F.conv2d(x, weight, padding=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [RUNG, {"padding": 1}], ids=["by name", "chosen"])
def test_threads(options: dict[str, Any], cuda: torch.device) -> None:
    x = images(cuda)
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            own = weights(cuda, 20)
            results = [conv2d(x, weight, **options) for weight in own]
            wrong.extend(
                f"thread {number}, call {call}"
                for call, (y, weight) in enumerate(zip(results, own, strict=True))
                if not right(y, x, weight)
            )

    in_threads(work)
    assert not wrong


def test_one_thread_with_many_streams(cuda: torch.device) -> None:
    """One stream's launch is still reading when the next one's copy is enqueued."""
    x, own = images(cuda), weights(cuda, 24)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for turn, weight in enumerate(own):
        with torch.cuda.stream(streams[turn % 4]):
            results.append(conv2d(x, weight, **RUNG))
    torch.cuda.synchronize()
    assert [right(y, x, weight) for y, weight in zip(results, own, strict=True)] == [True] * len(own)


def test_every_kind_on_two_streams(cuda: torch.device) -> None:
    for operation, rung, problem, config in sharing().values():
        recipe: Recipe = rung.recipe(problem, config)
        sets = [operation.inputs(problem, cuda, seed) for seed in range(8)]
        outputs = [operation.output(problem, cuda).fill_(float("nan")) for _ in sets]
        executables = [Executable(recipe, cuda) for _ in range(2)]
        streams = [torch.cuda.Stream() for _ in range(2)]
        torch.cuda.synchronize()
        absent = dict.fromkeys(("bias", "residual"))
        for turn, (inputs, y) in enumerate(zip(sets, outputs, strict=True)):
            with torch.cuda.stream(streams[turn % 2]):
                executables[turn % 2].bind({**absent, **inputs, "y": y})()
        torch.cuda.synchronize()
        for inputs, y in zip(sets, outputs, strict=True):
            allowed = rung.tolerance(problem, max_peer_error(operation, problem))
            failure, _ = compare(y, operation.reference(problem, inputs), allowed)
            assert not failure, f"{operation.name}/{rung.name}: {failure}"


def test_graphs_between_plain_calls(cuda: torch.device) -> None:
    """Two graphs and plain calls, each with other weights, replayed on separate streams."""
    x, own = images(cuda, 32), weights(cuda, 3)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graphs = []
    for weight in own[:2]:
        with torch.cuda.stream(side):
            conv2d(x, weight, **RUNG)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                y = conv2d(x, weight, **RUNG)
        graphs.append((graph, y, weight))
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(6):
        for stream, (graph, y, _) in zip(streams, graphs, strict=False):
            with torch.cuda.stream(stream):
                y.fill_(torch.nan)
                graph.replay()
        with torch.cuda.stream(streams[2]):
            plain = conv2d(x, own[2], **RUNG)
        torch.cuda.synchronize()
        assert right(plain, x, own[2])
        assert all(right(y, x, weight) for _, y, weight in graphs)


def test_a_graph_without_a_copy_is_refused_by_a_sentence(cuda: torch.device) -> None:
    x, (weight,) = images(cuda, 2), weights(cuda, 1)
    conv2d(x, weight, **RUNG)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        conv2d(x, weight, **RUNG)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        started = torch.ones(1, device=cuda) * 2
        with pytest.raises(LaunchError, match="make the same call once just before"):
            conv2d(x, weight, **RUNG)
    graph.replay()
    assert float(started) == 2, "what was recorded beside it is as good as before"
    assert right(conv2d(x, weight, **RUNG), x, weight)
