"""Cross-entropy: matches PyTorch for rows and pixels, with its gradient; ignored rows, and messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade import ops
from escalade.errors import UnsupportedError
from escalade.ops.cross_entropy import CrossEntropyProblem


def test_the_loss_of_pixels_and_its_gradient_are_pytorchs() -> None:
    x = torch.randn(2, 24, 5, 7).requires_grad_()
    target = torch.randint(0, 24, (2, 5, 7))
    target[0, :, 2] = 3
    again = x.detach().clone().requires_grad_()
    settings: dict[str, Any] = {"ignore_index": 3, "label_smoothing": 0.1}
    loss, expected = ops.cross_entropy(x, target, **settings), F.cross_entropy(again, target, **settings)
    torch.testing.assert_close(loss, expected)
    (3 * loss).backward()
    (3 * expected).backward()
    torch.testing.assert_close(x.grad, again.grad)
    both = ops.cross_entropy_with_gradient(x.detach(), target, torch.tensor(3.0), **settings)
    assert x.grad is not None and torch.equal(both[0], loss) and torch.equal(both[1], x.grad)


def test_no_number_where_there_is_none() -> None:
    x, target = torch.randn(4, 24), torch.tensor([1, -100, 2, 24])
    assert ops.cross_entropy(x, target).isnan()
    loss, gradient = ops.cross_entropy_with_gradient(x, target, torch.ones(1))
    assert loss.isnan() and gradient.isnan().all(1).tolist() == [False, False, False, True]
    assert ops.cross_entropy(x, torch.full((4,), -100)).isnan()  # the mean of nothing
    assert ops.cross_entropy(x[:0], target[:0]).isnan() and ops.cross_entropy(x[:0], target[:0], "sum") == 0
    x[0, 5] = -torch.inf
    target[3] = 0
    torch.testing.assert_close(ops.cross_entropy(x, target), F.cross_entropy(x, target))


def test_opcheck() -> None:
    x, target = torch.randn(4, 24), torch.randint(0, 24, (4,))
    torch.library.opcheck(torch.ops.escalade.cross_entropy.default, (x.requires_grad_(), target))


def test_what_does_not_fit_is_said() -> None:
    x, target = torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match=r"target is torch.int32 \[2\]"):
        ops.cross_entropy(x, target.int())
    with pytest.raises(UnsupportedError, match=r"target is torch.int64 \[1\]"):
        ops.cross_entropy(x, target[:1])
    with pytest.raises(UnsupportedError, match="between 0 and 1"):
        ops.cross_entropy(x, target, label_smoothing=1.5)
    with pytest.raises(UnsupportedError, match="reduction 'none'"):
        ops.cross_entropy(x, target, "none")
    with pytest.raises(UnsupportedError, match="the form is"):
        CrossEntropyProblem.parse("mean_8")
