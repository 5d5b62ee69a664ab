"""Networks in processes of their own: what they send arrives, and one that dies leaves a failure."""

from __future__ import annotations

import os

import torch
from torch import nn

from escalade.bench.coverage.catalogue import entries
from escalade.bench.coverage.run import Clock, Coverage
from escalade.bench.coverage.together import measure_together


class Whole(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU())


class Dying(Whole):
    def __init__(self) -> None:
        os.kill(os.getpid(), 9)


def test_a_process_that_dies_is_a_failure_and_the_others_go_on() -> None:
    coverage = Coverage(
        "coverage_own", torch.device("cpu"), (1, 2), ("fp16",), {}, 0.0, 0, 32, timed=False
    )  # fmt: skip
    found = entries(f"{__name__}:Whole,Dying")
    pieces = list(measure_together(coverage, __name__, found, 2, Clock(None), lambda text: None))
    records = {record.problem: record for _, some in pieces for record in some}
    assert set(records) == {f"{name}_32_b{batch}" for name in ("Whole", "Dying") for batch in (1, 2)}
    assert all(
        records[f"Whole_32_b{n}"].config["launches"] and not records[f"Whole_32_b{n}"].failure for n in (1, 2)
    )
    assert "SIGKILL" in records["Dying_32_b1"].failure and "SIGKILL" in records["Dying_32_b2"].failure
    assert sorted(entry.name for entry, some in pieces if not some) == ["Dying", "Whole"]
    assert [*measure_together(coverage, __name__, found, 2, Clock(0.0), lambda text: None)] == []
