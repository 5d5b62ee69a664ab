"""Several rungs counted in one run: their layouts, and records of their traffic."""

from __future__ import annotations

import pytest
import torch

from escalade.errors import UnsupportedError
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.profile import climb, ncu
from escalade_bench.profile.climb import Climb
from escalade_bench.profile.counters import counters_of
from escalade_bench.profile.profiles import profile
from escalade_bench.profile.target import Part
from escalade_bench.report.pages.goals import WALL_COLUMNS

CPU = torch.device("cpu")
CLIMB = Climb("conv2d", "8to8_9_k3s1_b2", "fp32", ["direct", "register_blocking", "nhwc", "unrolled"])
CEILINGS = Ceilings("NVIDIA H200", 132, 1, 1, 1, 4000.0, 4000.0, {"fp32": 50.0})


def test_a_climb_stays_in_its_layout_as_long_as_rungs_take_it() -> None:
    layouts = [choice.problem.layout for choice in CLIMB.choices(CPU)]
    assert layouts == ["nchw", "nchw", "nhwc", "nhwc"]
    with pytest.raises(UnsupportedError, match="conv2d has no rung 'nosuch'"):
        Climb("conv2d", CLIMB.problem, "fp32", ["nosuch"]).choices(CPU)


def test_records_have_the_bytes_that_were_counted() -> None:
    choices = Climb("conv2d", CLIMB.problem, "fp32", ["direct", "nhwc"]).choices(CPU)
    parts = [
        Part(one.rung.name, "conv2d", CLIMB.problem, "fp32", one.rung.name, [one.rung.name], 9, 9)
        for one in choices
    ]
    values = {"gpu__time_duration.sum": 2.0, "dram__bytes_read.sum": 3e6, "dram__bytes_write.sum": 1e6}
    launches = [
        counters_of("direct", {**values, "lts__t_bytes.sum": 8e6}),
        counters_of("nhwc", {"gpu__time_duration.sum": 2.0}),
    ]
    first, second = climb.records(CLIMB, choices, profile("a climb", "", parts, launches, CEILINGS), CEILINGS)
    problem = choices[0].problem
    assert (first.workload, first.rung, first.layout, first.timing) == (
        "conv2d_traffic",
        "direct",
        "nchw",
        "ncu",
    )
    assert first.time == 2.0 and first.tflops == pytest.approx(problem.flops / 2e6)
    assert first.peak_pct == pytest.approx(100 * problem.flops / 2e6 / 50)
    assert (first.config["moved_bytes"], first.config["l2_bytes"]) == (4e6, 8e6)
    assert first.config["fewest_bytes"] == problem.bytes
    assert second.config["moved_bytes"] is None
    cells, without = ({c.heading: c.cell(r) for c in WALL_COLUMNS} for r in (first, second))
    assert (cells["MB moved"], cells["GB/s of memory"], cells["GB/s of L2"]) == ("4", "2,000", "4,000")
    assert cells["times the fewest"] == f"{4e6 / problem.bytes:.0f}×"
    assert without["MB moved"] == without["times the fewest"] == without["GB/s of memory"] == ""


def test_without_nsight_compute_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "find", lambda: None)
    with pytest.raises(ncu.NoCounters, match="is not installed"):
        climb.measure(CLIMB, CPU, CEILINGS)
