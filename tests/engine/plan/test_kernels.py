"""Preparations for a plan's kernels before any of them is built."""

from __future__ import annotations

import copy
import pathlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.device import precompilation
from escalade.device.nvrtc import is_compiled
from escalade.device.program import Program
from escalade.engine import compile
from escalade.engine.plan import kernel_program, kernels
from escalade.errors import LaunchError
from tests.bench.fake import SOURCE


def test_kernels_compiled_for_a_plan_are_loaded_and_failures_are_left_to_their_steps(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "architecture_of", lambda device: "sm_90a")
    loaded: list[tuple[Program, int]] = []

    def load(program: Program, index: int) -> None:
        assert is_compiled(program, "sm_90a")
        loaded.append((program, index))

    monkeypatch.setattr(kernels, "load", load)
    one, other = (Program.of(SOURCE, "scale", {"FAULT": 0, "SLIP": slip}) for slip in (1.0, 2.0))
    broken = Program.of(SOURCE, "scale", {"FAULT": 0})  # SLIP is undefined
    plan: Any = SimpleNamespace(programs=(one, broken, other, one))
    kernels.compile_plans([plan], torch.device("cuda", 3))
    assert len(loaded) == 2 and {*loaded} == {(one, 3), (other, 3)}


def test_long_builds_for_the_twin_are_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = compile(nn.Linear(4, 4), torch.randn(2, 4), device="twin")
    plan = engine.plan(torch.randn(2, 4))
    kernels.compile_plans([plan], torch.device("cpu"))
    assert "building" not in caplog.text
    monkeypatch.setattr(precompilation, "_TWIN_SECONDS", 3600.0)
    monkeypatch.setattr(precompilation, "is_built", lambda *_: False)
    kernels.compile_plans([plan], torch.device("cpu"))
    assert re.search(r"building 1 kernel for the twin, about (\d+ min|[\d.]+ h|\d+ s); later", caplog.text)


class _Inverse(nn.Module):
    """A layer, and an operator that waits for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.layer(x) + 9 * torch.eye(4)).relu()


def _fail_to_capture(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(kernels, "CapturedGraph", capture)
    monkeypatch.setattr(kernels.PlanKernels, "_first_run", lambda self: "a stream")
    monkeypatch.setattr(kernel_program.KernelProgram, "_chain", lambda self: None)


def test_operators_that_no_graph_can_contain_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = _Inverse(), torch.randn(4, 4)
    expected = model(x).detach()
    engine = compile(model, x, device="twin")
    program = engine.program(x)
    assert isinstance(program, kernel_program.KernelProgram)
    _fail_to_capture(RuntimeError("not permitted when stream is capturing\nmore"), monkeypatch)
    with pytest.warns(
        UserWarning, match=r"\(.*inv.*\) cannot be part of a CUDA graph \(not permitted .*capturing\)"
    ):
        assert program.graph_of(list, "a stream") is None  # type: ignore[arg-type]
    torch.testing.assert_close(engine(x), expected, rtol=1e-4, atol=1e-5)

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = escalade.training_step(model, F.mse_loss, optimizer, (x, x), device="twin")
    monkeypatch.setattr(step.program, "_capture_stream", "a stream", raising=False)
    right = copy.deepcopy(model)
    loss = F.mse_loss(right(x), x)
    loss.backward()
    torch.optim.SGD(right.parameters(), 0.1).step()
    with pytest.warns(UserWarning, match="cannot be part of a CUDA graph"):
        torch.testing.assert_close(step(x, x), loss.detach())
    torch.testing.assert_close(model.state_dict(), right.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("error", [LaunchError("a kernel"), torch.OutOfMemoryError("memory")])
def test_other_failures_of_a_capture_are_reported(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 4)
    _fail_to_capture(error, monkeypatch)
    for model in (_Inverse(), nn.Linear(4, 4)):
        program = compile(model, x, device="twin").program(x)
        with pytest.raises(type(error)):
            program.graph_of(list, "a stream")  # type: ignore[attr-defined]
    _fail_to_capture(RuntimeError("of our own"), monkeypatch)
    with pytest.raises(RuntimeError, match="of our own"):  # there is no operator of PyTorch's
        program.graph_of(list, "a stream")  # type: ignore[attr-defined]
