"""Host time of calls: both systems are judged before and after, timed in turns, and shown side by side."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from escalade.device.timing import Timing
from escalade.errors import UnsupportedError
from escalade_bench import calls
from escalade_bench.calls import CALLS, Call, New, chosen
from escalade_bench.campaign.units import Session
from escalade_bench.measure.records import Record
from escalade_bench.report.pages.records import calls_table

CPU = torch.device("cpu")
LINEAR = replace(CALLS["linear"], ours=F.linear)
"""A call whose two functions are both PyTorch's."""


def measured(call: Call, dtype: str = "fp32") -> list[Record]:
    said: list[str] = []
    return [
        record for records in calls.measure(call, dtype, Session(CPU, 0.0), said.append) for record in records
    ]


def test_theirs_agrees_with_float64_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """So all attributes exist: tensors, layouts, autocast, gradients and where they are compared."""
    told = Timing(1.0, 1.0, 1.0, 1, "host")
    monkeypatch.setattr(calls, "time_by_clock", lambda works, seconds: dict.fromkeys(works, told))
    monkeypatch.setattr(calls, "COPIES", 1)
    monkeypatch.setattr(calls, "SIDE", 4)
    for call in CALLS.values():
        for dtype, layouts in call.layouts.items():
            found = measured(replace(call, ours=call.theirs), dtype)
            assert [record.failure for record in found] == [""] * 4 * len(layouts), call.name


def test_what_is_timed_are_calls_alone_and_with_gradients() -> None:
    made: list[bool] = []

    def noted(*given: torch.Tensor) -> torch.Tensor:
        made.append(torch.is_grad_enabled())
        return F.linear(*given)

    found = measured(replace(LINEAR, ours=noted))
    assert [(r.workload, r.system) for r in found] == [
        ("calls", "escalade"), ("calls", "torch"),
        ("calls_with_gradient", "escalade"), ("calls_with_gradient", "torch"),
    ]  # fmt: skip
    assert all(r.median_us and r.timing == "host" and r.samples >= 5 and r.error is not None for r in found)
    assert made.count(False) == made.count(True) - 2 >= 10 * calls.COPIES, "two are judged"


def test_a_wrong_result_or_gradient_has_no_time() -> None:
    def slightly(*given: torch.Tensor) -> torch.Tensor:
        return 1.01 * LINEAR.theirs(*given)

    def backwards(x: torch.Tensor, *learnt: torch.Tensor) -> torch.Tensor:
        right = LINEAR.theirs(x, *learnt)
        return right + (x.mean() - x.mean().detach())

    calls = iter([True])  # right when judged first, and wrong in all later calls

    def worn(x: torch.Tensor, *learnt: torch.Tensor) -> torch.Tensor:
        return LINEAR.theirs(x, *learnt) * (1.0 if next(calls, False) else 1.5)

    for ours, said in (
        (slightly, "its error is"),
        (backwards, "off by|error is"),
        (worn, "after it was timed"),
    ):
        found = measured(replace(LINEAR, ours=ours))
        assert [bool(record.failure) for record in found] == [True, False, True, False]
        assert re.search(said, found[0].failure) and found[0].median_us is None


def test_a_call_that_is_refused_leaves_the_reason() -> None:
    def refuses(*given: torch.Tensor) -> torch.Tensor:
        raise UnsupportedError("no such layer")

    found = measured(replace(LINEAR, ours=refuses))
    assert found[0].failure == "no such layer" and found[1].median_us


def test_names_are_found_or_said() -> None:
    assert list(chosen(("relu", "add_relu"))) == ["relu", "add_relu"] and chosen(()) == CALLS
    with pytest.raises(UnsupportedError, match="no call 'relus'; known: conv2d,"):
        chosen(("relus",))


def test_images_lie_as_the_call_has_them() -> None:
    new = New("fp16", "nhwc", CPU, torch.Generator().manual_seed(0))
    assert new.image().is_contiguous(memory_format=torch.channels_last) and new.image().dtype == torch.float16
    assert new(4, dtype="fp32").dtype == torch.float32 and new(4).requires_grad
    assert F.relu(new.image(learns=False)).grad_fn is None


def test_the_page_shows_both_and_how_many_times_as_long_theirs_takes() -> None:
    ours = Record(
        "calls", "relu", "fp16", "nhwc", 2, "escalade", "", median_us=10.0, commit="one", driver="5"
    )
    records = [
        replace(ours, date="2026-01-01", gpu="NVIDIA H200", system=system, workload=workload, median_us=us)
        for system, workload, us in (
            ("escalade", "calls", 10.0),
            ("torch", "calls", 12.5),
            ("escalade", "calls_with_gradient", 50.0),
            ("torch", "calls_with_gradient", 40.0),
        )
    ]
    assert "| relu | fp16 | nhwc | 10.00 | 12.50 | 1.25× | 50.00 | 40.00 | 0.80× |" in calls_table(
        records
    ).markdown().replace("`", "")
