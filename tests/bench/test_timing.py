"""The statistics and the turns, with samplers whose clock is made up."""

from __future__ import annotations

import pytest
import torch

from escalade.bench.timing import (
    L2_MULTIPLE,
    MAX_SETS,
    Arm,
    interleave,
    percentile,
    rotation,
    summarize,
    time_interleaved,
)
from escalade.errors import UnsupportedError


class FakeSampler:
    """Says what it is told to, and writes down when it was asked."""

    how = "graph"
    note = ""

    def __init__(self, name: str, microseconds: list[float], log: list[str], calls: int = 1) -> None:
        self.name = name
        self.calls = calls
        self._times = iter(microseconds)
        self._log = log

    def start(self) -> None:
        self._log.append(f"start {self.name}")

    def finish(self) -> float:
        self._log.append(f"finish {self.name}")
        return next(self._times)


def test_arms_take_turns_and_all_are_enqueued_before_any_is_waited_for() -> None:
    log: list[str] = []
    samplers = {name: FakeSampler(name, [1.0] * 9, log) for name in "AB"}
    interleave(samplers, seconds_per_arm=0, min_rounds=2, max_rounds=9)
    assert log == ["start A", "start B", "finish A", "finish B"] * 2


def test_median_and_spread() -> None:
    timing = summarize([5.0, 1.0, 3.0, 2.0, 4.0], "graph")
    assert (timing.median_us, timing.samples) == (3.0, 5)
    assert timing.p20_us == pytest.approx(1.8) and timing.p80_us == pytest.approx(4.2)


def test_percentiles() -> None:
    assert percentile([7.0], 20) == 7.0
    assert percentile([1.0, 2.0], 50) == 1.5
    assert percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert percentile([3.0, 1.0, 2.0], 100) == 3.0


def test_one_slow_sample_does_not_move_the_median() -> None:
    log: list[str] = []
    samplers = {"A": FakeSampler("A", [10.0, 10.0, 9000.0, 10.0, 10.0], log)}
    assert interleave(samplers, seconds_per_arm=0, min_rounds=5, max_rounds=5)["A"].median_us == 10.0


def test_an_arm_leaves_when_its_time_is_spent_and_the_others_go_on() -> None:
    log: list[str] = []
    slow = FakeSampler("slow", [1e6] * 50, log)
    fast = FakeSampler("fast", [10.0] * 50, log, calls=1000)  # 10 ms a sample
    times = interleave({"slow": slow, "fast": fast}, seconds_per_arm=0.1, min_rounds=5, max_rounds=50)
    assert times["slow"].samples == 5
    assert times["fast"].samples == pytest.approx(10, abs=1)


def test_rounds_are_bounded() -> None:
    log: list[str] = []
    samplers = {"A": FakeSampler("A", [0.001] * 100, log)}
    assert interleave(samplers, seconds_per_arm=10, min_rounds=5, max_rounds=20)["A"].samples == 20


@pytest.mark.parametrize("size", [1, 1000, 10**6, 5 * 10**7, 10**9])
def test_rotated_sets_exceed_the_cache_unless_one_does(size: int) -> None:
    l2 = 60 << 20
    sets = rotation(size, l2)
    assert 1 <= sets <= MAX_SETS
    assert sets == MAX_SETS or sets * size >= L2_MULTIPLE * l2
    assert (sets == 1) == (size >= L2_MULTIPLE * l2)


def test_rotation_without_a_cache_or_data() -> None:
    assert rotation(0, 60 << 20) == 1
    assert rotation(100, 0) == 1


def test_on_the_cpu_one_run_is_timed_and_marked_as_no_speed() -> None:
    runs: list[int] = []
    times = time_interleaved([Arm("A", [lambda: runs.append(1)])], torch.device("cpu"))
    assert runs == [1]
    assert times["A"].how == "twin" and "not a speed" in times["A"].note and times["A"].samples == 1


def test_arms_need_names_of_their_own_and_calls() -> None:
    with pytest.raises(UnsupportedError, match="repeat"):
        time_interleaved([Arm("A", [lambda: None]), Arm("A", [lambda: None])], torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="without calls"):
        time_interleaved([Arm("A", [])], torch.device("cpu"))


@pytest.mark.gpu
def test_on_the_gpu_a_copy_is_timed_by_graph_and_takes_as_long_as_it_must() -> None:
    source = torch.randn(64 << 20, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    timing = time_interleaved([Arm("copy", [copy])], torch.device("cuda", 0), seconds_per_arm=0.05)["copy"]
    assert timing.how == "graph" and timing.samples >= 5
    gbps = 2 * source.numel() * 4 / timing.median_us / 1e3
    assert 50 < gbps < 20_000


@pytest.mark.gpu
def test_what_cannot_be_captured_is_timed_eagerly_and_says_so() -> None:
    x = torch.randn(1000, device="cuda")

    def synchronizes() -> None:
        x.sum().item()

    def adds() -> None:
        x.add_(1)

    arms = [Arm("bad", [synchronizes]), Arm("good", [adds])]
    times = time_interleaved(arms, torch.device("cuda", 0), seconds_per_arm=0.02)
    assert times["bad"].how == "eager" and "captured" in times["bad"].note
    assert times["good"].how == "graph"
