"""BatchNorm with `momentum=None` made traceable: its averaging factor as a tensor instead of a Python number.

PyTorch computes the factor, 1 / num_batches_tracked, on the host. A plan is fixed before the count is known, so the
factor has to be computed from the buffer by the plan itself.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def trace_factors(model: nn.Module) -> None:
    """Replace `forward` of the BatchNorm modules that average cumulatively, in a copy of the caller's model.

    Modules with a `forward` of their own, and those that do not update statistics, stay as they are.
    """
    for module in model.modules():
        if (
            isinstance(module, _BatchNorm)
            and type(module).forward is _BatchNorm.forward
            and "forward" not in vars(module)
            and module.momentum is None
            and module.training
            and module.track_running_stats
            and module.num_batches_tracked is not None
            and module.running_mean is not None
            and module.running_var is not None
        ):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def _forward(module: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Compute what `_BatchNorm.forward` does. With momentum 1, zeros become the statistics of the batch."""
    module._check_input_dim(x)
    mean, variance, count = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None and variance is not None and count is not None
    count.add_(1)
    of_batch = [torch.zeros_like(one, dtype=torch.float32) for one in (mean, variance)]
    y = F.batch_norm(x, of_batch[0], of_batch[1], module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        factor = 1.0 / count.to(torch.float32)
        for kept, found in zip((mean, variance), of_batch, strict=True):
            kept.copy_(kept.float() * (1 - factor) + found * factor)
    return y
