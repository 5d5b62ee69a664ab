"""Movements done by kernels where PyTorch would copy, and those left to PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.capture.export import capture
from escalade.engine.graph.forms import InputFormat
from escalade.engine.passes import for_batch, optimize
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.planner import make_plan
from escalade.ops.base.card import H200
from escalade.ops.copy import COPY
from tests.engine.plan.test_plan import check_memory
from tests.engine.plan.test_subbuffers import Model

Forward = Callable[..., torch.Tensor]


def planned(forward: Forward, x: torch.Tensor, **layers: nn.Module) -> Plan:
    """Return the fp16 plan for an H200."""
    graph = capture(Model(forward, **layers).eval(), (x,))
    graph = for_batch(optimize(graph, "fp16"), "fp16", x.shape[0], card=H200)
    plan = make_plan(graph, "fp16", H200, {graph.inputs[0].name: InputFormat.of(x)})
    check_memory(plan)
    return plan


def copies(plan: Plan) -> list[int]:
    """The parts of each copy done by a kernel."""
    lowered = [step.lowered for step in plan.steps if step.lowered is not None]
    return [len(one.problem.parts) for one in lowered if one.operation is COPY]  # type: ignore[attr-defined]


def soft(x: torch.Tensor) -> torch.Tensor:
    """A kernel that reads and writes rows."""
    return torch.softmax(x, -1)


def windows(x: torch.Tensor) -> torch.Tensor:
    """Image of channel rows partitioned into windows and reassembled."""
    cut = soft(x).view(2, 2, 2, 2, 3, 5).permute(0, 1, 3, 2, 4, 5).reshape(8, 6, 5)
    back = soft(cut).view(2, 2, 2, 2, 3, 5).permute(0, 1, 3, 2, 4, 5).reshape(2, 4, 6, 5)
    return soft(back)


def merged(x: torch.Tensor) -> torch.Tensor:
    """Every second row and column, concatenated."""
    x = soft(x)
    return soft(torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1))


def misaligned(x: torch.Tensor) -> torch.Tensor:
    low, middle, high = soft(x).split([3, 5, 2], -1)
    return torch.cat([soft(middle), soft(low), high, soft(x)[..., 1:2]], -1)


MOVING: dict[str, tuple[Forward, tuple[int, ...], list[int]]] = {
    "transposed": (lambda x: soft(soft(x).transpose(1, 2)).transpose(1, 2), (5, 7), [1, 1]),
    "windows": (windows, (4, 6, 5), [1, 1]),
    "rolled": (lambda x: soft(torch.roll(soft(x), (-1, 2), (1, 2))), (4, 6, 5), [4]),
    "rolled and turned": (lambda x: soft(torch.roll(soft(x).transpose(1, 3), 2, 2)), (4, 6, 5), [2]),
    "merged": (merged, (4, 6, 5), [4]),
    "flipped": (lambda x: soft(soft(x).flip(1, -1)), (4, 6), [1]),
    "stacked": (lambda x: soft(torch.stack([soft(x), soft(x + 1)], 2)), (4, 6), [2]),
    "repeated": (lambda x: soft(soft(x).repeat(1, 2, 3)), (4, 6), [1]),
    "each repeated": (lambda x: soft(soft(x).repeat_interleave(3, 1)), (4, 6), [1]),
    "expanded": (lambda x: soft(soft(x).unsqueeze(1).expand(-1, 3, -1, -1).reshape(2, 12, 6)), (4, 6), [1]),
    "misaligned": (misaligned, (4, 10), [1, 1, 4]),
    "along rows": (lambda x: soft(torch.cat([soft(x), soft(x + 1)], 1)), (4, 6), [2]),
    "put together again": (lambda x: soft(torch.cat(soft(x).split([3, 5], -1), -1)), (4, 8), []),
    "returned": (lambda x: soft(x).permute(2, 0, 1), (4, 6), [1]),
}


@pytest.mark.parametrize("name", MOVING)
def test_pure_movements_are_kernels(name: str) -> None:
    forward, shape, expected = MOVING[name]
    x = torch.randn(2, *shape)
    plan = planned(forward, x)
    assert not plan.fallbacks and copies(plan) == expected
    engine = escalade.compile(Model(forward), x, device="twin", dtype="fp32")
    torch.testing.assert_close(engine(x), forward(x))


def patches(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    """Tokens as a vision transformer has them."""
    tokens = last(first(x).flatten(2).transpose(1, 2))
    return tokens.transpose(1, 2).reshape(2, 16, 2, 8)


def heads(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    """Attention between the pixels of an image, which a 1x1 convolution projects."""
    q, k, v = last(first(x)).chunk(3, 1)
    q, k, v = (one.reshape(2, 2, 16, 16).transpose(-1, -2) for one in (q, k, v))
    scores = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1)
    return (scores @ v).transpose(-1, -2).reshape(2, 32, 4, 4).sigmoid()


def projections(x: torch.Tensor, first: nn.Module, last: nn.ModuleList) -> torch.Tensor:
    """The same with a convolution for each operand, which become one."""
    q, k, v = (layer(first(x)).flatten(2) for layer in last)
    scores = torch.softmax(q.transpose(1, 2) @ k, -1)
    return (scores @ v.transpose(1, 2)).transpose(1, 2).reshape(2, 16, 4, 4).sigmoid()


def largest(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    rows = last(first(x)).flatten(2)
    return (rows * rows.amax(2, keepdim=True)).view(2, 16, 4, 4)


def parts(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
    """A sum of a part of one image and a part of another, as in Res2Net."""
    one, other = first(x).chunk(2, 1)
    one = last(one)
    return torch.cat([one, one + other], 1)


IMAGE_ROWS: dict[str, tuple[Forward, nn.Module, list[str]]] = {
    "patches": (patches, nn.LayerNorm(16), ["conv2d", "layer_norm"]),
    "heads": (heads, nn.Conv2d(16, 96, 1), ["conv2d", "conv2d", "attention", "pointwise"]),
    "largest": (largest, nn.Conv2d(16, 16, 1), ["conv2d", "conv2d", "reduce", "pointwise"]),
    "parts": (parts, nn.Conv2d(8, 8, 3, padding=1), ["conv2d", "conv2d", "pointwise", "copy"]),
    "projections": (
        projections,
        nn.ModuleList([nn.Conv2d(16, 16, 1) for _ in range(3)]),
        ["conv2d", "conv2d", "attention", "pointwise"],
    ),
}


@pytest.mark.parametrize("name", IMAGE_ROWS)
def test_rows_of_channels_are_the_bytes_of_an_image_in_nhwc(name: str) -> None:
    forward, last, expected = IMAGE_ROWS[name]
    first = nn.Conv2d(8, 16, 2, 2)
    x = torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last)
    plan = planned(forward, x, first=first, last=last)
    kernels = [step.lowered.operation.name for step in plan.steps if step.lowered]
    assert kernels == ["convert", *expected, "convert"]
    model = Model(forward, first=first, last=last).eval()
    for device in ("cpu", "twin"):
        engine = escalade.compile(model, x, device=device, dtype="fp32")
        torch.testing.assert_close(engine(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_single_channels_are_joined_at_once_behind_their_kernels() -> None:
    """As in CBAM, whose attention reads the mean and the maximum over channels."""

    def forward(x: torch.Tensor, first: nn.Module, last: nn.Module) -> torch.Tensor:
        x = first(x)
        return torch.sigmoid(last(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1)))

    layers = {"first": nn.Conv2d(8, 16, 3, padding=1), "last": nn.Conv2d(2, 1, 3, padding=1)}
    plan = planned(forward, torch.randn(2, 8, 6, 6), **layers)
    assert not plan.fallbacks and copies(plan) == [2]
    model = Model(forward, **layers).eval()
    x = torch.randn(2, 8, 6, 6)
    engine = escalade.compile(model, x, device="twin", dtype="fp32")
    torch.testing.assert_close(engine(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_fitting_values_are_in_place_and_the_rest_is_copied_beside_them() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.max_pool2d(x, 2), x.amax((2, 3), keepdim=True).expand(-1, -1, 4, 4)], 1).sin()

    plan = planned(forward, torch.randn(2, 16, 8, 8).to(memory_format=torch.channels_last))
    assert not plan.fallbacks and copies(plan) == [1]
    (step,) = [step for step in plan.steps if step.lowered is not None and step.lowered.operation is COPY]
    assert step.node.attributes["moved"] == ("x1",)
    assert plan.forms[step.node.inputs["x0"]].pitch == 32


def test_views_of_pytorch_results_read_by_pytorch_stay_views() -> None:
    """Attention reads operands of any strides, and writes results of any strides."""

    def forward(x: torch.Tensor, inner: nn.Module, outer: nn.Module) -> torch.Tensor:
        q, k, v = inner(x).reshape(2, 6, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        return outer(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 32))

    layers = {"inner": nn.Linear(32, 96), "outer": nn.Linear(32, 32)}
    plan = planned(forward, torch.randn(2, 6, 32), **layers)
    assert not copies(plan)


def test_a_movement_may_be_left_to_pytorch() -> None:
    x = torch.randn(2, 5, 7)
    graph = capture(Model(MOVING["transposed"][0]), (x,))
    graph = for_batch(optimize(graph, "fp16"), "fp16", 2, card=H200)
    (name, *_) = [node.name for node in graph if node.op == "permute"]
    formats = {graph.inputs[0].name: InputFormat.of(x)}
    plan = make_plan(graph, "fp16", H200, formats, pytorch_nodes={name: "it was measured so"})
    assert [step.node.name for step in plan.fallbacks] == [name] and copies(plan) == [1]
