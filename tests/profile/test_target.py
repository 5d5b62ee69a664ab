"""Launches assigned to parts by name and order, and their times from a trace."""

from __future__ import annotations

import pytest

from escalade.commands.profiled import Asked, target_of
from escalade.device.twin.launch import TwinKernel
from escalade.errors import EscaladeError
from escalade.profile.counters import Counters
from escalade.profile.cupti import launches
from escalade.profile.target import Part, merged, owners


def part(name: str, kernels: list[str] | None) -> Part:
    return Part(name, "conv2d", "", "fp16", "", kernels, 10, 100)


PARTS = [part("in", None), part("a", ["pack", "conv"]), part("b", None), part("c", None), part("d", ["conv"])]


def test_neighbours_of_pytorch_are_one_part() -> None:
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


def test_a_part_launches_the_kernels_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(Asked("softmax", "33_b5", None, "fp32", None, 1, False, "cpu", 0))
    seen: list[str] = []
    plain = TwinKernel.launch

    def noted(kernel: TwinKernel, *given: object, **more: object) -> None:
        seen.append(kernel.entry)
        plain(kernel, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(TwinKernel, "launch", noted)
    (one,) = target.run()
    assert seen == one.kernels != [] and one.flops and one.bytes
    assert target.title.startswith("softmax 33_b5 fp32 flat, rung")
