"""Linear layers over rows of several dimensions: their fused epilogues."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine import compile
from escalade.engine.capture.export import capture
from escalade.engine.passes import for_batch, optimize
from escalade.ops.base.accuracy import relative_error
from tests.engine.graphs import ops


class Residual(nn.Module):
    """Transformer blocks, with residuals added, scaled and multiplied, also after an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24)
        self.scale = nn.Parameter(torch.rand(24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.narrow(F.gelu(self.wide(self.norm(x))))
        x = torch.relu(self.narrow(self.wide(x)) + x)
        x = x + self.scale * self.narrow(self.wide(x))
        return x * torch.sigmoid(self.narrow(self.wide(x)))


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "allowed"), [("fp32", 1e-5), ("fp16", 2e-3)])
def test_residuals_are_added_on_the_way_out(dtype: str, allowed: float) -> None:
    model, x = Residual().eval(), torch.randn(2, 3, 4, 24)
    engine = compile(model, x, dtype=dtype, device="twin")
    assert relative_error(engine(x), model.double()(x.double())) < allowed
    steps = [step.node.op for step in engine.plan(x).steps if step.runs]
    assert steps == ["layer_norm", *["linear"] * 8]


def test_layers_that_become_one_step_with_others_take_none() -> None:
    """Merging two layers into one launch saves more than fusing the addition."""
    graph = optimize(capture(Residual().eval(), (torch.randn(2, 3, 24),)), "fp16")
    assert ops(for_batch(graph, "fp16", 2)) == [*["mlp", "add"] * 3, "mlp", "pointwise"]
