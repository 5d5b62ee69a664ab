"""The convolution of few channels by definition, for non-finite values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.ops.base.dtypes import STORAGE
from escalade.ops.few_channels import FewChannelsProblem
from tests import formulas


def by_definition(problem: FewChannelsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Padding adds nothing; the result is rounded once, at the end."""
    p = problem
    y = formulas.convolution(
        inputs["x"],
        inputs["weight"].view(p.filters, p.channels, p.filter_height, p.filter_width),
        inputs.get("bias"),
        padding=p.padding,
    )
    y = formulas.relu(y) if p.relu else y
    y = formulas.max_pool(y, p.pool, p.pool, ceil_mode=p.ceil_mode) if p.pool > 1 else y
    return y.to(STORAGE[p.storage])
