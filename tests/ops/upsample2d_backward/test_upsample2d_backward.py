"""The gradient of a resized image: a pixel's outputs, refusals, the operator, and autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, upsample2d, upsample2d_backward
from escalade.ops.upsample2d import MODES
from escalade.ops.upsample2d_backward import TileConfig, Upsample2dBackwardProblem, weights
from tests.support import check


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("outputs", [1, 2, 3, 7, 8, 14, 56])
def test_no_pixel_has_more_outputs_than_the_code_looks_at(size: int, outputs: int) -> None:
    """In every mode, with both corner rules, and if coordinates follow a factor that rounds to the size."""
    for mode, taps in MODES.items():
        for corners in {False, taps > 1}:
            for more in (None, 0.0, 0.3, 0.9):
                factor = 0.0 if more is None else (outputs + more) / size
                name = f"8_{size}to{outputs}_b1_{mode}{'_corners' * corners}" + (
                    f"_by{factor}x{factor}" if factor else ""
                )
                problem = Upsample2dBackwardProblem.parse(name)
                of_pixel = (weights(problem.forward, 0, torch.device("cpu")) != 0).sum(0)
                assert int(of_pixel.max()) <= problem.most_outputs[0], name
                if problem.even is not None:
                    assert set(of_pixel.tolist()) == {problem.even[0]}, name
                for pixels in range(1, size + 1):
                    assert _most_spanned(problem, pixels) <= problem.most_outputs_of(pixels, 1)[0], name


def _most_spanned(problem: Upsample2dBackwardProblem, pixels: int) -> int:
    """Upper bound of the range of outputs that depend on any of some neighboring pixels."""
    made = weights(problem.forward, 0, torch.device("cpu")) != 0
    of_tiles = (made[:, first : first + pixels].any(1).nonzero() for first in range(made.shape[1]))
    return max(int(outputs.max() - outputs.min()) + 1 if len(outputs) else 0 for outputs in of_tiles)


def test_a_doubling_is_even_and_a_trebling_is_searched_for() -> None:
    parse = Upsample2dBackwardProblem.parse
    assert parse("8_5x7to10x28_b1_nearest").even == (2, 4)
    assert parse("8_5to10_b1_nearest_exact_by2.0x2.0").even == (2, 2)
    assert parse("8_5to15_b1_nearest").even is None and parse("8_5to10_b1_bilinear").even is None


@pytest.mark.parametrize("name", ["3_9x10to18x20_b3_nearest", "3_9x10to13x25_b3_bicubic"])
def test_a_shared_tile_serves_several_planes(name: str, seed: int) -> None:
    """Eight planes and one, of tiles that reach past the image: with checks for races between planes."""
    operation = OPERATIONS["upsample2d_backward"]
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(
        operation, operation.ladder.rung("shared_tile"), operation.parse(name), TileConfig(4, 8, 8),
        torch.device("cpu"), seed, options,
    )  # fmt: skip


def test_pixels_that_lie_apart_are_refused() -> None:
    forward = replace(
        Upsample2dBackwardProblem.parse("8_5to10_b1_nearest").forward, layout="nhwc", x_pitch=16
    )
    with pytest.raises(UnsupportedError, match="upsample2d_backward supports dense images"):
        Upsample2dBackwardProblem(forward)


@pytest.mark.parametrize(
    ("gradient", "options", "sentence"),
    [
        (torch.ones(8, 5, 5), {}, "gradient: N C P Q"),
        (torch.ones(2, 8, 5, 5).double(), {}, "float32, float16 or bfloat16"),
        (torch.ones(2, 8, 5, 5), {"mode": "area"}, "mode 'area'"),
        (torch.ones(2, 8, 5, 5), {"factors": (3.0, 3.0)}, "they do not scale 4 to 5"),
        (torch.ones(2, 8, 5, 5), {"rung": "vectorised"}, "supports layout nhwc, not nchw"),
    ],
)
def test_what_it_refuses(gradient: torch.Tensor, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        upsample2d_backward(gradient, 4, **options)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_opcheck(memory_format: torch.memory_format) -> None:
    gradient = torch.randn(2, 8, 8, 8).contiguous(memory_format=memory_format).requires_grad_()
    torch.library.opcheck(
        torch.ops.escalade.upsample2d_backward.default, (gradient, [4, 4], "bilinear", False, [0.0, 0.0])
    )


@pytest.mark.parametrize("corners", [False, True])
def test_autograd_once_and_twice_and_compiled(corners: bool, seed: int) -> None:
    x = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(seed))
    x = x.contiguous(memory_format=torch.channels_last)

    def ours(t: torch.Tensor) -> torch.Tensor:
        return upsample2d(t, 8, "bilinear", align_corners=corners)

    def theirs(t: torch.Tensor) -> torch.Tensor:
        return F.interpolate(t, 8, mode="bilinear", align_corners=corners)

    def gradients(resize: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.to(dtype, copy=True).requires_grad_()
        (once,) = torch.autograd.grad(resize(leaf).square().sum(), leaf, create_graph=True)
        return once, torch.autograd.grad(once.square().sum(), leaf)[0]

    expected = gradients(theirs, torch.float64)
    for found, wanted in zip(gradients(ours, torch.float32), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        assert found.is_contiguous(memory_format=torch.channels_last)
    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)(leaf).square().sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), expected[0], rtol=1e-5, atol=1e-5)
