"""Connectionist temporal classification: the operator against PyTorch's, and lengths and labels out of range."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from escalade import ops

STEPS, BATCH, CLASSES = 7, 4, 5
TARGETS = torch.tensor([[1, 2, 3], [2, 2, 2], [4, 1, 1], [3, 3, 3]])
STEPS_USED = torch.tensor([7, 5, 4, 2])
LENGTHS = torch.tensor([3, 3, 0, 2])
"""Repeated labels, no label, and one sequence that is too short for its target."""


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_loss_and_gradient_are_those_of_pytorch(zero_infinity: bool) -> None:
    logits = torch.randn(STEPS, BATCH, CLASSES)
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found, wanted = (logits.clone().requires_grad_() for _ in range(2))
    own = ops.ctc_loss(found.log_softmax(-1), TARGETS, STEPS_USED, LENGTHS, zero_infinity=zero_infinity)
    theirs = F.ctc_loss(
        wanted.log_softmax(-1), TARGETS, STEPS_USED, LENGTHS, reduction="none", zero_infinity=zero_infinity
    )
    torch.testing.assert_close(own, theirs)
    for each, loss in ((found, own), (wanted, theirs)):
        (loss * weights).sum().backward()
        assert each.grad is not None and each.grad.isnan().any() == (not zero_infinity)
    assert found.grad is not None and wanted.grad is not None
    torch.testing.assert_close(found.grad, wanted.grad, equal_nan=True)


def test_labels_and_lengths_out_of_range() -> None:
    x = torch.randn(STEPS, BATCH, CLASSES).log_softmax(-1)
    targets = TARGETS.clone()
    targets[0, 1], targets[1, 0] = CLASSES, -1
    long = torch.full((BATCH,), 100)
    loss = ops.ctc_loss(x, targets, long, torch.full((BATCH,), 3))
    assert loss.isnan().tolist() == [True, True, False, False]
    torch.testing.assert_close(ops.ctc_loss(x, targets, long, long)[2:], loss[2:])
