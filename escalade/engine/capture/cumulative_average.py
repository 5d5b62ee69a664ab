"""Traceable BatchNorm with `momentum=None`: the averaging factor is a tensor, not a Python number.

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

    Modules with a custom `forward`, and those that do not update statistics, are skipped.
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
    """Compute the same as `_BatchNorm.forward`."""
    module._check_input_dim(x)
    mean, variance, count = module.running_mean, module.running_var, module.num_batches_tracked
    assert mean is not None and variance is not None and count is not None
    count.add_(1)
    new_mean, new_variance = (torch.zeros_like(value, dtype=torch.float32) for value in (mean, variance))
    # Momentum 1 replaces the zeros with the statistics of this batch.
    y = F.batch_norm(x, new_mean, new_variance, module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        factor = 1.0 / count.to(torch.float32)
        for value, new in ((mean, new_mean), (variance, new_variance)):
            value.copy_(value.float() * (1 - factor) + new * factor)
    return y
