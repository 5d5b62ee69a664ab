"""Programs of `torch.export` in place of a model, exported in either mode."""

from __future__ import annotations

import copy
import logging
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine import compile, load


class Trained(nn.Module):
    """Differs in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.instance = nn.InstanceNorm2d(8, track_running_stats=True)
        self.drop, self.bent = nn.Dropout2d(0.5), nn.RReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(self.instance(self.norm(self.conv(x))))
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.2 if self.training else 0.0)
        return F.dropout(self.bent(y), training=self.training)


def test_a_program_exported_in_training_mode_is_evaluated(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, x = Trained().train(), torch.randn(2, 3, 8, 8)
    model(x)  # so that statistics differ from their initial values
    program = torch.export.export(model, (x,))
    before, expected = str(program.graph), copy.deepcopy(model).eval()(x)
    engine = compile(program)
    assert "exported in training mode" in caplog.text and str(program.graph) == before
    for batch in (x, x[:1]):
        torch.testing.assert_close(engine(batch), expected[: len(batch)].detach(), rtol=1e-4, atol=1e-5)
    engine.save(tmp_path / "trained.escalade")  # deterministic, so a file can hold it
    assert torch.equal(load(tmp_path / "trained.escalade", device="cpu")(x), engine(x))


def test_statistics_of_the_batch_alone_stay_so(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.BatchNorm2d(3, track_running_stats=False).eval(), 3 * torch.randn(4, 3, 8, 8) + 1
    with caplog.at_level(logging.WARNING):
        engine = compile(torch.export.export(model, (x,)))
    torch.testing.assert_close(engine(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    assert "training mode" not in caplog.text
