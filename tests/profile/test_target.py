"""Launches assigned to parts by name and order, and their times from a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import escalade
from escalade.commands.profiling import Asked, target_of
from escalade.device.twin.launch import TwinKernel
from escalade.engine.comparison import copy_inputs
from escalade.errors import EscaladeError
from escalade_bench.profile.counters import Counters
from escalade_bench.profile.ncu import launches
from escalade_bench.profile.target import Other, Part, merged, of_plan, owners

CPU = torch.device("cpu")


def part(name: str, kernels: list[str] | None) -> Part:
    return Part(name, "conv2d", "", "fp16", "", kernels, 10, 100)


PARTS = [part("in", None), part("a", ["pack", "conv"]), part("b", None), part("c", None), part("d", ["conv"])]


def test_adjacent_pytorch_launches_are_one_part() -> None:
    found = merged(PARTS)
    assert [one.name for one in found] == ["in", "a", "b, c", "d"]
    assert (found[2].flops, found[2].bytes, found[2].operation) == (20, 200, "conv2d")


def test_launches_belong_to_parts_by_their_names_and_order() -> None:
    parts = merged(PARTS)
    names = ["void at::copy(float*)", "pack", "conv(int)", "sort", "scan", "conv", "Memset"]
    assert owners(parts, names) == [0, 1, 1, 2, 2, 3, 3]
    assert owners(parts, ["pack", "conv", "conv"]) == [1, 1, 3], "PyTorch may have nothing to launch"
    constant = [part("a", ["conv"]), part("b", ["conv"])]
    assert owners(constant, ["conv", "Memcpy DtoD", "conv"]) == [0, 1, 1], "a copy comes before its kernel"
    with pytest.raises(EscaladeError, match="none of conv"):
        owners(parts, ["pack", "conv", "sort"])


def event(name: str, correlation: int, us: float, **more: object) -> dict[str, object]:
    arguments = {"correlation": correlation, **more}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": 100.0 - correlation, "dur": us, "args": arguments}


def test_times_are_medians_over_the_runs_of_a_trace() -> None:
    runs = [
        event(name, 2 * run + number, us + run, **{"registers per thread": 40})
        for run in range(3)
        for number, (name, us) in enumerate([("pack", 1.0), ("conv", 10.0)])
    ]
    others = [{"ph": "X", "cat": "cpu_op", "name": "conv", "dur": 5}, {"ph": "M", "name": "process_name"}]
    found = launches({"traceEvents": [*others, *reversed(runs)]}, 3)
    assert found == [Counters("pack", us=2.0, registers=40), Counters("conv", us=11.0, registers=40)]
    with pytest.raises(EscaladeError, match="not alike"):
        launches({"traceEvents": runs[:5]}, 3)
    with pytest.raises(EscaladeError, match="saw no kernels"):
        launches({"traceEvents": others}, 3)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels in the order in which the twin launched them."""
    seen: list[str] = []
    plain = TwinKernel.launch

    def noted(kernel: TwinKernel, *given: object, **more: object) -> None:
        seen.append(kernel.entry)
        plain(kernel, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(TwinKernel, "launch", noted)
    return seen


def test_a_rung_launches_the_kernels_that_its_part_names(launched: list[str]) -> None:
    target = target_of(Asked("softmax", "33_b5", None, "fp32", None, 1, False, "cpu", 0))
    launched.clear()
    (one,) = target.run()
    assert launched == one.kernels != [] and one.flops and one.bytes
    assert target.title.startswith("softmax 33_b5 fp32 flat, rung")


def test_a_plan_launches_the_kernels_that_its_parts_name(launched: list[str]) -> None:
    def unnamed(name: str, call: Callable[[], object]) -> Other:
        def noted() -> None:
            calls.append(name)
            call()

        return name, "other", "", noted

    calls: list[str] = []
    x = torch.rand(4, 16)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    program: Any = escalade.compile(copy.deepcopy(model).eval(), (x,), device="twin").program(x)
    network = of_plan("network", program, CPU, unnamed("in", lambda: copy_inputs(program, (x,))))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = escalade.training_step(model, nn.functional.mse_loss, optimizer, (x, x), device="twin")
    step(x, x)
    made: Any = step.program
    training = of_plan("step", made, CPU, unnamed("cast", made.prepare), unnamed("step", made.finish))
    for target in (network, training):
        launched.clear()
        parts = merged(target.run())
        named = [name for part in parts for name in part.kernels or ()]
        assert named and [name for name in launched if name in named] == named
        ranges = [parts[owner].kernels for owner in owners(parts, launched)]
        assert all(kernels is None or name in kernels for kernels, name in zip(ranges, launched, strict=True))
    assert calls == ["in", "cast", "step"]
