"""The gradient of a mean: refusals, the operator, and autograd of both kinds of means."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops import adaptive_avg_pool2d, avg_pool2d, avg_pool2d_backward
from escalade.ops.avg_pool2d_backward import AvgPool2dBackwardProblem

# Few kernels: the twin compiles each combination of window, dtype and layout.
WINDOW: dict[str, Any] = {"kernel": 3, "stride": 2, "padding": 1}


def test_pixels_that_lie_apart_are_refused() -> None:
    forward = replace(AvgPool2dBackwardProblem.parse("8_9_k3s2p1_b2").forward, layout="nhwc", x_pitch=16)
    with pytest.raises(UnsupportedError, match="avg_pool2d_backward supports dense images"):
        AvgPool2dBackwardProblem(forward)


@pytest.mark.parametrize(
    ("gradient", "change", "sentence"),
    [
        (torch.ones(8, 5, 5), {}, "gradient: N C P Q"),
        (torch.ones(2, 8, 5, 5).double(), {}, "float32, float16 or bfloat16"),
        (torch.ones(2, 8, 5, 4), {}, r"gradient has shape \(2, 8, 5, 4\); for .* it must be \(2, 8, 5, 5\)"),
        (torch.ones(2, 8, 5, 5), {"divisor_override": 0}, "needs at least 1"),
        (torch.ones(2, 8, 5, 5), {"rung": "vectorised"}, "supports layout nhwc, not nchw"),
    ],
)
def test_what_it_refuses(gradient: torch.Tensor, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        avg_pool2d_backward(gradient, 9, **{**WINDOW, **change})


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_opcheck(memory_format: torch.memory_format) -> None:
    gradient = torch.randn(2, 8, 5, 5).contiguous(memory_format=memory_format).requires_grad_()
    torch.library.opcheck(
        torch.ops.escalade.avg_pool2d_backward.default,
        (gradient, [9, 9], [3, 3], [2, 2], [1, 1], False, True, 0),
    )


POOLS: dict[str, tuple[Any, Any]] = {
    "windows": (lambda t: avg_pool2d(t, **WINDOW), lambda t: F.avg_pool2d(t, 3, 2, 1)),
    "an even grid": (lambda t: adaptive_avg_pool2d(t, 3), lambda t: F.adaptive_avg_pool2d(t, 3)),
    "all of the image": (lambda t: adaptive_avg_pool2d(t, 1), lambda t: F.adaptive_avg_pool2d(t, 1)),
    "an uneven grid": (lambda t: adaptive_avg_pool2d(t, 2), lambda t: F.adaptive_avg_pool2d(t, 2)),
}


@pytest.mark.parametrize(("ours", "theirs"), POOLS.values(), ids=list(POOLS))
def test_autograd_once_and_twice(ours: Any, theirs: Any, seed: int) -> None:
    """The gradient has x's layout, whatever the layout of the incoming gradient."""
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(seed))
    x = x.contiguous(memory_format=torch.channels_last)

    def gradients(pool: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        (once,) = torch.autograd.grad(pool(leaf).square().sum(), leaf, create_graph=True)
        return once, torch.autograd.grad(once.square().sum(), leaf)[0]

    found, expected = gradients(ours, torch.float32), gradients(theirs, torch.float64)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert found[0].is_contiguous(memory_format=torch.channels_last)


def test_torch_compile_with_a_batch_that_changes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(POOLS["windows"][0], fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        x = torch.randn(batch, 8, 9, 9, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
        (expected,) = torch.autograd.grad(POOLS["windows"][1](x).square().sum(), x)
        torch.testing.assert_close(found, expected)
