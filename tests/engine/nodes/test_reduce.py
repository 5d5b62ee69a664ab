"""Reductions as nodes: which are matched, in which layout they run, and what they fuse."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from escalade.engine.capture.export import capture
from escalade.engine.compiler import load
from escalade.engine.engine import Engine
from escalade.engine.passes import optimize
from escalade.ops.base.card import TWIN
from tests.engine.nodes.test_operators import Call

Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(1),
        lambda x: x.mean((1, 2, 3)),
        lambda x: x.mean(1, keepdim=True),
        lambda x: x.amax((2, 3), keepdim=True),
        lambda x: x.amin(3),
        lambda x: x.var((2, 3)),
        lambda x: x.std(1, correction=0, keepdim=True),
        lambda x: x.logsumexp(1),
        lambda x: torch.linalg.vector_norm(x, 1, -1),
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: x.norm(torch.inf, dim=(1, 2)),
        lambda x: x.max(2).values,
        lambda x: x.sum(),
        lambda x: x.square().sum(1).sqrt(),
    ],
)
def test_a_reduction_is_one_node_of_its_own(function: Function) -> None:
    x = torch.randn(2, 8, 3, 5)
    graph = capture(Call(function), (x,))
    assert [node.op for node in optimize(graph, "fp32") if node.op not in ("convert", "reshape")] == [
        "reduce"
    ]
    torch.testing.assert_close(Engine(graph, "fp32", "twin")(x), function(x))


def test_the_mean_of_a_large_plane_is_a_reduction_of_rows() -> None:
    """A warp per plane would leave most of a GPU idle."""
    for size, expected in (((40, 30), "reduce"), ((8, 8), "adaptive_avg_pool2d")):
        x = torch.randn(2, 3, *size)
        engine = Engine(capture(Call(lambda x: F.adaptive_avg_pool2d(x, 1)), (x,)), "fp32", "twin")
        (step,) = engine.plan_for(TWIN, x).steps
        assert step.lowered is not None and step.lowered.operation.name == expected
        torch.testing.assert_close(engine(x), x.mean((2, 3), keepdim=True))


def test_a_type_that_the_operand_has_already_is_no_conversion() -> None:
    """CUDA's autocast casts to fp32 even if values are fp32; a norm of parameters fell back to PyTorch for that."""
    functions: dict[str, Function] = {
        "adaptive_avg_pool2d": lambda x: x.mean((2, 3), keepdim=True, dtype=x.dtype),
        "reduce": lambda x: torch.linalg.vector_norm(x, dim=1, dtype=x.dtype) + x.sum(1, dtype=x.dtype),
        "relu": lambda x: F.relu(x.view(x.dtype)),
        "softmax": lambda x: F.softmax(x, -1, dtype=x.dtype),
    }
    for op, function in functions.items():
        graph = capture(Call(function), (torch.randn(2, 8, 3, 5),))
        ops = [node.op for node in graph]
        assert op in ops and "aten" not in ops


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.amax((2, 3)),
        lambda x: x.sum(1),
        lambda x: x.var((0, 2, 3)),
        lambda x: x.sum(2, keepdim=True),
    ],
)
def test_an_image_is_reduced_in_its_layout(function: Function) -> None:
    """After a layer that returns NHWC."""
    model = Call(lambda x: function(F.interpolate(x, scale_factor=2.0)))
    x = torch.randn(2, 8, 4, 6).to(memory_format=torch.channels_last)
    graph = capture(model, (x,))
    assert [node.op for node in optimize(graph, "fp32", images="nhwc")] == ["upsample2d", "reduce"]
    torch.testing.assert_close(Engine(graph, "fp32", "twin")(x), model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.vector_norm(x, 3.0, dim=1),
        lambda x: x.sum(1, dtype=torch.float64).float(),
        lambda x: (x > 0).sum(1).float(),
    ],
)
def test_reductions_that_are_left_to_pytorch(function: Function) -> None:
    graph = capture(Call(function), (torch.randn(2, 8, 3, 5),))
    assert "reduce" not in {node.op for node in optimize(graph, "fp32")}


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.argmax(1),
        lambda x: x.argmin(1, keepdim=True),
        lambda x: x.argmax(-2),
        lambda x: x.argmin(2, keepdim=True),
        lambda x: x.argmax(0),
        lambda x: x.argmax(),
        lambda x: x.argmin(keepdim=True),
        lambda x: x.max(1).indices,
        lambda x: x.min(-1).indices.float() + 1,
    ],
)
def test_an_index_is_exactly_that_of_pytorch(function: Function, layout: str, tmp_path: pathlib.Path) -> None:
    """Including ties and NaN, in both layouts and in saved engines."""
    model = Call(lambda x: function(F.interpolate(x, scale_factor=2.0)))
    x = torch.randn(2, 8, 3, 5).mul(2).round()
    x[0, 3, 1, 2] = x[0, 5, 1, 2] = x[1, 7, 2, 4] = torch.nan
    x = x.contiguous(memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format)
    engine = Engine(capture(model, (x,)), "fp32", "twin")
    engine.save(tmp_path / "index.engine")
    for one in (engine, load(tmp_path / "index.engine", device="twin")):
        (step,) = (step for step in one.plan_for(TWIN, x).steps if step.node.op == "arg_reduce")
        assert step.lowered is not None and not step.in_pytorch
        found, expected = one(x), model(x)
        assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_an_image_in_nhwc_has_the_index_of_its_channels_without_conversion() -> None:
    model = Call(lambda x: F.interpolate(x, scale_factor=2.0).argmax(1))
    x = torch.randn(2, 8, 3, 5).to(memory_format=torch.channels_last)
    steps = Engine(capture(model, (x,)), "fp32", "twin").plan_for(TWIN, x).steps
    assert [step.node.op for step in steps] == ["upsample2d", "arg_reduce"]
    assert steps[1].lowered is not None and steps[1].lowered.problem.name == "argmax_8x1_b120"


def test_indices_of_whole_numbers_are_left_to_pytorch() -> None:
    graph = capture(Call(lambda x: (x * 2).int().argmax(1)), (torch.randn(2, 8),))
    assert "arg_reduce" not in {node.op for node in graph}
