"""Engines on the GPU whose model was captured on the CPU, and the other way round."""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from torch import nn

import escalade

pytestmark = pytest.mark.gpu


class Encoded(nn.Module):
    """Depthwise stages plus a positional encoding of a mask: PyTorch steps, views of their results, kernels on both."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 16, 3, 2, 1, groups=16), nn.Conv2d(16, 16, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(x)
        batch, _, height, width = x.shape
        seen = ~torch.zeros(batch, height, width, dtype=torch.bool, device=x.device)
        rows, columns = (seen.cumsum(dim, dtype=torch.float32) for dim in (1, 2))
        rows = rows / (rows[:, -1:, :] + 1e-6) * 2 * math.pi
        columns = columns / (columns[:, :, -1:] + 1e-6) * 2 * math.pi
        scale = 100 ** (torch.arange(8, dtype=torch.float32, device=x.device) / 8)
        code = torch.cat(((rows[..., None] / scale).sin(), (columns[..., None] / scale).cos()), dim=3)
        return x + code.permute(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("captured_on", ["cpu", "cuda"])
def test_tensors_created_in_forward_are_on_the_engines_device(
    dtype: str, captured_on: str, tmp_path: pathlib.Path
) -> None:
    model = Encoded().eval()
    pairs = [(x, model(x).detach()) for x in (torch.randn(n, 3, 64, 64) for n in (4, 32))]
    model.to(captured_on)
    engine = escalade.compile(model, pairs[0][0].to(captured_on), dtype=dtype, device="cuda")
    engine.save(tmp_path / "engine.escalade")
    loaded = escalade.load(tmp_path / "engine.escalade", device="cuda")
    for x, expected in pairs:
        for one in (engine, loaded):
            torch.testing.assert_close(one(x.cuda()).float().cpu(), expected, rtol=2e-2, atol=2e-2)
    x, expected = pairs[0]
    torch.testing.assert_close(engine.to("cpu")(x).float(), expected, rtol=2e-2, atol=2e-2)
