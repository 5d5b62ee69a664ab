"""conv2d_input_gradient as a PyTorch operator, and conv2d's gradient in autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops import Operation, conv2d, conv2d_input_gradient
from escalade.ops.calling import executables
from escalade.ops.choose.choice import choose
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem

parse = Conv2dInputGradientProblem.parse


def half(name: str, dtype: str = "fp16") -> Conv2dInputGradientProblem:
    return parse(name, dtype, "nhwc")


def tensors(
    *,
    stride: int = 1,
    dtype: torch.dtype = torch.float32,
    size: int = 9,
    channels: int = 8,
    filters: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and a gradient of y, for a 3x3 filter with padding 1."""
    generator = torch.Generator().manual_seed(stride)
    x = torch.randn(2, channels, size, size, generator=generator)
    weight = torch.randn(filters, channels, 3, 3, generator=generator) / (9 * channels) ** 0.5
    gradient = torch.randn(F.conv2d(x, weight, None, stride, 1).shape, generator=generator)
    return x.to(dtype), weight.to(dtype), gradient.to(dtype)


def expected_gradient(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, **options: Any
) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(F.conv2d(x, weight, **options), x, gradient)[0]


@pytest.mark.share(7)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_pytorchs_gradient(dtype: torch.dtype, stride: int, layout: torch.memory_format) -> None:
    x, weight, gradient = tensors(stride=stride, dtype=dtype)
    dx = conv2d_input_gradient(
        gradient.contiguous(memory_format=layout), weight, (9, 9), x, stride=stride, padding=1
    )
    wide = expected_gradient(x.float(), weight.float(), gradient.float(), stride=stride, padding=1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(dx.float(), wide * (x > 0), rtol=tolerance, atol=tolerance)
    assert dx.is_contiguous(memory_format=layout)


def test_every_run_gives_the_same_bits_whatever_the_strides() -> None:
    _, weight, gradient = tensors(stride=2)
    first, again = (
        conv2d_input_gradient(one, weight, (9, 9), stride=2, padding=1)
        for one in (gradient, gradient.repeat_interleave(2, 3)[..., ::2])
    )
    assert torch.equal(first, again)


def test_size_tells_images_apart_that_have_the_same_output() -> None:
    gradient, weight = torch.ones(1, 2, 3, 3), torch.ones(2, 1, 3, 3)
    for size in (7, 8):
        dx = conv2d_input_gradient(gradient, weight, (size, size), stride=2)
        assert dx.shape == (1, 1, size, size)
        assert torch.equal(dx, expected_gradient(torch.zeros(1, 1, size, size), weight, gradient, stride=2))


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((torch.ones(2, 16, 9), torch.ones(16, 8, 3, 3), (9, 9)), {}, "gradient: N K P Q"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9, 9)), {}, "size has 3 numbers"),
        ((torch.ones(2, 16, 7, 7).double(), torch.ones(16, 8, 3, 3), (9, 9)), {}, "torch.float64.*float32"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3).half(), (9, 9)), {}, "weight is torch.float16"),
        (
            (torch.ones(2, 8, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)),
            {},
            "weight is .* here K is 8",
        ),
        ((torch.ones(2, 16, 9, 9), torch.ones(16, 8, 3, 3), (9, 9)), {}, r"must be \(2, 16, 7, 7\)"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (2, 9)), {}, "the filter covers 3x3"),
        (
            (torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9), torch.ones(2, 8, 7, 7)),
            {},
            r"mask has shape .* \(2, 8, 9, 9\)",
        ),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)), {"groups": 0}, "groups is 0"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)), {"stride": (1, 1, 1)}, "stride is"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)), {"rung": "nonsense"}, "it has atomics"),
        (
            (torch.ones(2, 16, 7, 7).half(), torch.ones(16, 8, 3, 3).half(), (9, 9)),
            {"tf32": True},
            "tf32=True",
        ),
    ],
)
def test_what_poses_no_problem(arguments: tuple[Any, ...], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        conv2d_input_gradient(*arguments, **options)


def test_an_empty_batch() -> None:
    assert conv2d_input_gradient(torch.ones(0, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)).shape == (
        0,
        8,
        9,
        9,
    )
    with pytest.raises(UnsupportedError, match="no rung 'nonsense'"):
        conv2d_input_gradient(torch.ones(0, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9), rung="nonsense")


def test_pytorch_knows_the_operator() -> None:
    x, weight, gradient = tensors(stride=2)
    arguments = (
        gradient.requires_grad_(), weight.requires_grad_(), [9, 9], x, [2, 2], [1, 1], [1, 1], 1, False, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.escalade.conv2d_input_gradient.default, arguments)


def test_it_has_gradients_of_its_own() -> None:
    x, weight, gradient = tensors(stride=2)

    def penalty(ours: bool) -> list[torch.Tensor]:
        grad_y, w = gradient.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            dx = conv2d_input_gradient(grad_y, w, (9, 9), x, stride=2, padding=1)
        else:
            dx = F.conv_transpose2d(grad_y, w, None, 2, 1) * (x > 0)
        return list(torch.autograd.grad(dx.square().sum(), (grad_y, w)))

    for mine, its in zip(penalty(True), penalty(False), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_conv2d_goes_back_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of x is ours if a rung above `direct` supports it, else PyTorch's."""
    made = []

    def noting(operation: Operation[Any], *rest: Any) -> Any:
        made.append(operation.name)
        return choose(operation, *rest)

    monkeypatch.setattr(executables, "choose", noting)
    for groups, ours in ((1, True), (4, False)):
        made.clear()
        x = torch.randn(1, 8, 7, 10 + groups, requires_grad=True)  # a size that no other test uses
        weight = torch.randn(8, 8 // groups, 3, 3)
        y = conv2d(x, weight, padding=1, groups=groups)
        gradient = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, gradient)
        expected = expected_gradient(x, weight, gradient, padding=1, groups=groups)
        torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)
        assert ("conv2d_input_gradient" in made) == ours
