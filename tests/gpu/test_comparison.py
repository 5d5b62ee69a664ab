"""PyTorch steps in plans on the GPU, and plans beside PyTorch."""

from __future__ import annotations

import copy
import pathlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.plan.kernel_program import KernelProgram

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """Measurements here are not stored for the user; compiled kernels stay cached."""
    path = tmp_path / "table.json"
    for module in ("escalade.engine.comparison", "escalade.ops.choose.table"):
        monkeypatch.setattr(f"{module}.user_path", lambda gpu: path)
    return path


class Mixed(nn.Module):
    """Kernels and PyTorch steps that read each other's values: fresh ones, views, and non-dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 3, padding=1)
        self.grouped = nn.Conv2d(20, 40, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(40, 16, 2, stride=2)
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.relu(self.conv(x))
        part = y[:, 4:24]
        z = F.relu(self.grouped(torch.cumsum(part, 2) / 8))
        up = self.up(z)
        return self.last(up.flip(3)), (part.mean((2, 3)).sort(1).values + part.amax((2, 3)))


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize(
    ("dtype", "allowed"), [("fp32", 1e-5), ("tf32", 5e-3), ("fp16", 5e-3), ("bf16", 4e-2)]
)
def test_kernels_and_pytorch_read_each_others_values(
    cuda: torch.device, dtype: str, allowed: float, measured: bool
) -> None:
    """In every replay, whatever other graphs left in the shared pool."""
    torch.manual_seed(2)
    model = Mixed().eval().to(cuda)
    exact = copy.deepcopy(model).double()
    engine = escalade.compile(model, torch.randn(4, 16, 24, 24, device=cuda), dtype=dtype, measured=measured)
    for seed in range(3):
        generator = torch.Generator(cuda).manual_seed(seed)
        x = torch.randn(4, 16, 24, 24, device=cuda, generator=generator)
        keep = [torch.empty(1 << 20, device=cuda).fill_(torch.nan) for _ in range(4)]
        with torch.no_grad():
            expected = exact(x.double())
        for found, right in zip(engine(x), expected, strict=True):
            assert off(found, right) <= allowed
        del keep


def test_a_convolution_that_only_the_foot_takes_is_cudnns(cuda: torch.device) -> None:
    """Unless another rung supports it by now; the lowest rung never runs if PyTorch should be faster."""
    conv = nn.Conv2d(20, 40, 3, padding=1, groups=4).eval().to(cuda)
    engine = escalade.compile(conv, torch.randn(32, 20, 28, 28, device=cuda), dtype="fp16")
    assert "direct" not in {step.rung for step in engine.explain().steps}


def test_a_comparison_has_every_step_and_the_whole(cuda: torch.device) -> None:
    torch.manual_seed(2)
    x = torch.randn(4, 16, 24, 24, device=cuda)
    engine = escalade.compile(Mixed().eval().to(cuda), x, dtype="fp16")
    before = [y.clone() for y in engine(x)]
    found = engine.compare(x)
    plan = engine.plan(x)
    assert [s.name for s in found.steps] == [s.node.name for s in plan.steps if not s.is_alias]
    assert all(s.plan_us > 0 and s.pytorch_us for s in found.steps)
    assert found.plan_us > 0 and found.pytorch_us > 0
    assert all(torch.equal(a, b) for a, b in zip(engine(x), before, strict=True))


def test_measured_steps_are_remembered(cuda: torch.device, own_table: pathlib.Path) -> None:
    """And the plan is no slower, step by step, than without measuring, up to noise."""
    torch.manual_seed(2)
    model, x = Mixed().eval().to(cuda), torch.randn(4, 16, 24, 24, device=cuda)
    plain = escalade.compile(model, x, dtype="fp16")
    before = plain.compare(x)
    measured = escalade.compile(model, x, dtype="fp16", measured=True)
    assert own_table.is_file()
    assert measured.compare(x).plan_us <= 1.1 * before.plan_us
    again = escalade.compile(model, x, dtype="fp16")
    program = again.program(x)
    assert isinstance(program, KernelProgram)
    names = {step.node.name for step in program.plan.fallbacks}
    assert names == {step.node.name for step in measured.plan(x).fallbacks}
