"""What a step of training should give: the gradients, and how far PyTorch's own are from them."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from escalade.bench.networks.judging import Standard
from escalade.bench.peers.torch_training import Loss, gradients_of
from escalade.engine.graph.forms import STORAGE
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.switches import precision

MOST = 4.0
"""Times the most that is allowed of a network: gradients come through every layer twice, and their sums over a batch
cancel in part."""


def standard(
    model: nn.Module, x: torch.Tensor, dtype: str, loss: Loss, expected: Sequence[torch.Tensor]
) -> Standard:
    """Each parameter's gradient by itself, and how far PyTorch's is from it in that dtype."""
    with precision(dtype):
        its = gradients(model, x, loss, len(x), STORAGE[dtype])
    own = tuple(relative_error(one, right) for one, right in zip(its, expected, strict=True))
    return Standard(dtype, tuple(expected), own, MOST)


def gradients(
    model: nn.Module, x: torch.Tensor, loss: Loss, chunk: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    """The gradients of all parameters, summed over chunks of the rows."""
    its = copy.deepcopy(model).to(x.device, dtype)
    with torch.enable_grad():
        for part in x.split(chunk):
            loss(its, part.to(dtype)).backward()
    return gradients_of(its)
