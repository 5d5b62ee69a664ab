"""Elementwise losses: PyTorch's results and gradients, for any layout; and their messages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from escalade import ops
from escalade.errors import UnsupportedError
from escalade.ops.pointwise_loss import MSE, PointwiseLossProblem


def test_the_loss_and_its_gradient_are_pytorchs() -> None:
    x = torch.randn(2, 3, 5, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    target = torch.randn(2, 3, 5, 4)
    again = x.detach().clone().requires_grad_()
    loss, expected = ops.mse_loss(x, target), F.mse_loss(again, target)
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(x.grad, again.grad)
    both = ops.pointwise_loss_with_gradient(x.detach(), target, torch.tensor(3.0), MSE)
    assert x.grad is not None and torch.equal(both[0], loss) and torch.equal(both[1], x.grad)
    torch.testing.assert_close(ops.mse_loss(x[:, ::2], target[:, ::2]), F.mse_loss(x[:, ::2], target[:, ::2]))


def test_opcheck() -> None:
    x, target = torch.randn(4, 10), torch.randn(4, 10)
    torch.library.opcheck(torch.ops.escalade.pointwise_loss.default, (x.requires_grad_(), target, MSE))


def test_what_does_not_fit_is_said() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(UnsupportedError, match="x: ..., target: ..."):
        ops.mse_loss(x, x[:1])
    with pytest.raises(UnsupportedError, match="reduction 'none'"):
        ops.mse_loss(x, x, "none")
    with pytest.raises(UnsupportedError, match="two results computed from x and target"):
        ops.pointwise_loss(x, x, "abs(x - target)")
    with pytest.raises(UnsupportedError, match="needs at least one"):
        ops.mse_loss(x[:0], x[:0])
    with pytest.raises(UnsupportedError, match="scale: 1 of float32"):
        ops.pointwise_loss_with_gradient(x, x, x, MSE)
    with pytest.raises(UnsupportedError, match="the form is"):
        PointwiseLossProblem.parse("mean_8")
    target = x.clone().requires_grad_()
    with pytest.raises(UnsupportedError, match="detach the target"):
        ops.mse_loss(x, target).backward()
