"""Statistics and turns, with samplers on a fake clock, and the rest on a fake card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from escalade.device import timing as clocks
from escalade.device.timing import (
    L2_MULTIPLE,
    MAX_SETS,
    CallSampler,
    ReplaySampler,
    ResultCheck,
    Subject,
    host_time,
    interleave,
    percentile,
    rotation,
    summarize,
    time_interleaved,
)
from escalade.errors import EscaladeError, UnsupportedError
from tests.bench.fake_cuda import Card

GPU = torch.device("cuda", 0)


class FakeSampler:
    """Return the given readings, and record when it was called."""

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
    interleave(samplers, seconds_each=0, min_rounds=2, max_rounds=9)
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
    assert interleave(samplers, seconds_each=0, min_rounds=5, max_rounds=5)["A"].median_us == 10.0


def test_an_arm_leaves_when_its_time_is_spent_and_the_others_go_on() -> None:
    log: list[str] = []
    slow = FakeSampler("slow", [1e6] * 50, log)
    fast = FakeSampler("fast", [10.0] * 50, log, calls=1000)  # 10 ms per sample
    times = interleave({"slow": slow, "fast": fast}, seconds_each=0.1, min_rounds=5, max_rounds=50)
    assert times["slow"].samples == 5
    assert times["fast"].samples == pytest.approx(10, abs=1)


def test_rounds_are_bounded() -> None:
    log: list[str] = []
    samplers = {"A": FakeSampler("A", [0.001, 0.002] * 50, log)}
    assert interleave(samplers, seconds_each=10, min_rounds=5, max_rounds=20)["A"].samples == 20


def test_a_subject_is_done_when_its_median_is_known_to_one_percent() -> None:
    log: list[str] = []
    steady = FakeSampler("steady", [1.0, 1.005] * 50, log)
    noisy = FakeSampler("noisy", [1.0, 1.2] * 50, log)
    times = interleave({"steady": steady, "noisy": noisy}, seconds_each=10, min_rounds=5, max_rounds=50)
    assert times["steady"].samples < 20 and times["noisy"].samples == 50


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
    times = time_interleaved([Subject("A", [lambda: runs.append(1)])], torch.device("cpu"))
    assert runs == [1]
    assert times["A"].how == "twin" and "not a speed" in times["A"].note and times["A"].samples == 1


def test_arms_need_names_of_their_own_and_calls() -> None:
    with pytest.raises(UnsupportedError, match="unique"):
        time_interleaved([Subject("A", [lambda: None]), Subject("A", [lambda: None])], torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="without calls"):
        time_interleaved([Subject("A", [])], torch.device("cpu"))


def test_a_time_is_that_of_one_call_and_of_nothing_else(card: Card) -> None:
    """Three calls over three sets, repeated in one graph; it contains no launch overhead, upload or other subject."""
    subjects = [
        Subject("ten", [lambda: card.kernel(10.0)] * 3),
        Subject("seven", [lambda: card.kernel(7.0)]),
        Subject("long", [lambda: card.kernel(9000.0)]),
    ]
    times = time_interleaved(subjects, GPU, seconds_each=0.0, min_rounds=5)
    assert {name: timing.median_us for name, timing in times.items()} == pytest.approx(
        {"ten": 10.0, "seven": 7.0, "long": 9000.0}
    )
    for timing in times.values():
        assert timing.p20_us == pytest.approx(timing.median_us) == pytest.approx(timing.p80_us)
        assert timing.samples == 5 and timing.how == "graph"


def test_one_replay_takes_long_enough_and_each_round_is_waited_for_busily(card: Card) -> None:
    subjects = [Subject("ten", [lambda: card.kernel(10.0)] * 3), Subject("other", [lambda: card.kernel(1.0)])]
    time_interleaved(subjects, GPU, seconds_each=0.0, min_rounds=4, replay_us=600.0)
    assert card.log[-12:] == ["sleep", "replay", "replay"] * 4
    graphs: list[float] = []
    real = clocks.EventSampler.finish

    def spy(sampler: clocks.EventSampler) -> float:
        found = real(sampler)
        graphs.append(found * sampler.calls)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clocks.EventSampler, "finish", spy)
        time_interleaved(subjects[:1], GPU, seconds_each=0.0, min_rounds=4, replay_us=600.0)
    assert graphs[-4:] == pytest.approx([600.0] * 4)


def test_the_wait_outlasts_the_launches_of_a_round(card: Card) -> None:
    """With sixty subjects the CPU needs 300 us to enqueue a round."""
    subjects = [Subject(str(number), [lambda: card.kernel(2.0)]) for number in range(60)]
    times = time_interleaved(subjects, GPU, seconds_each=0.0, min_rounds=3, replay_us=1.0)
    assert [timing.median_us for timing in times.values()] == pytest.approx([2.0] * 60)


def test_uncapturable_subjects_are_timed_by_plain_calls(card: Card) -> None:
    def call() -> None:
        if card.recording is not None:
            raise RuntimeError("operation not permitted\nmore of it")
        card.kernel(50.0)

    (timing,) = time_interleaved([Subject("eager", [call] * 2)], GPU, seconds_each=0.0).values()
    assert timing.how == "eager" and "operation not permitted" in timing.note and "more" not in timing.note
    assert timing.median_us == pytest.approx(50.0)


# Timed results are judged


def doubling(card: Card, x: torch.Tensor, y: torch.Tensor, name: str = "double", broken: str = "") -> Subject:
    """y = 2x, unless broken in one of the ways that a plain call does not show."""
    runs: list[int] = []

    def times(factor: int) -> Callable[[], None]:
        def work() -> None:
            runs.append(1)
            torch.mul(x, 3 if broken == "wears out" and len(runs) > 8 else factor, out=y)

        return work

    def call() -> None:
        if card.recording is not None and broken == "does nothing":
            card.kernel(10.0)
        else:
            card.kernel(10.0, times(1 if card.recording is not None and broken == "is wrong" else 2))

    def judge() -> str:
        return "" if torch.equal(y, 2 * x) else "it is not twice x"

    return Subject(name, [call], ResultCheck(partial(y.fill_, torch.nan), judge))


@pytest.mark.parametrize("broken", ["does nothing", "is wrong", "wears out"])
def test_a_graph_that_does_not_do_its_work_has_no_time(
    card: Card, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = torch.randn(5), torch.zeros(5)
    took_turns: list[str] = []
    real = clocks.interleave

    def spy(samplers: Mapping[str, clocks.Sampler], **settings: Any) -> dict[str, clocks.Timing]:
        took_turns.extend(samplers)
        return real(samplers, **settings)

    monkeypatch.setattr(clocks, "interleave", spy)
    subjects = [doubling(card, x, y), doubling(card, x, y, "suspect", broken)]
    wrong: dict[str, str] = {}
    times = time_interleaved(subjects, GPU, seconds_each=0.0, min_rounds=9, wrong=wrong, replay_us=1.0)
    assert list(times) == ["double"] and times["double"].median_us == pytest.approx(10.0)
    assert wrong == {"suspect": "the timed results are wrong: it is not twice x"}
    assert ("suspect" in took_turns) == (broken == "wears out"), "what is wrong from the start is not timed"
    with pytest.raises(EscaladeError, match="suspect: the timed results are wrong"):
        time_interleaved(subjects, GPU, seconds_each=0.0, min_rounds=9, replay_us=1.0)


def test_on_the_cpu_the_run_that_is_timed_is_judged() -> None:
    x, y = torch.randn(5), torch.zeros(5)

    def judge() -> str:
        return "unwritten" if bool(y.isnan().any()) else ""

    def double() -> None:
        torch.mul(x, 2, out=y)

    proof = ResultCheck(partial(y.fill_, torch.nan), judge)
    twice = Subject("twice", [double], proof)
    lazy = Subject("lazy", [lambda: None], proof)
    wrong: dict[str, str] = {}
    assert list(time_interleaved([twice, lazy], torch.device("cpu"), wrong=wrong)) == ["twice"]
    assert wrong == {"lazy": "the timed results are wrong: unwritten"}


def test_a_replay_has_its_inputs_filled_before_and_not_in_its_time(card: Card) -> None:
    filled: list[str] = []

    def fill() -> None:
        filled.append("fill")
        card.kernel(100.0)

    sampler = ReplaySampler(fill, lambda: card.kernel(30.0, lambda: filled.append("run")))
    card.sleep(1_000_000)
    for _ in range(2):
        sampler.start()
        assert sampler.finish() == pytest.approx(30.0)
        card.sleep(1_000_000)
    assert filled == ["fill", "run"] * 2


class Clock:
    """CPU time in seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(clocks.time, "perf_counter", lambda: self.now)

    def take(self, us: float) -> None:
        self.now += us / 1e6


def test_calls_by_the_clock_are_divided_by_their_number_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    pending: list[float] = []

    def wait() -> None:
        clock.take(sum(pending))
        pending.clear()

    def call() -> None:
        clock.take(3.0)
        pending.append(20.0)

    pending.append(500.0)  # unrelated work, which ends before the clock starts
    assert CallSampler(call, wait, 10).finish() == pytest.approx(23.0)
    host = host_time(call, wait, calls=7, rounds=4)
    assert host.median_us == pytest.approx(3.0) and host.samples == 4 and host.how == "host"


@pytest.mark.gpu
def test_on_the_gpu_a_copy_is_timed_by_graph_and_takes_as_long_as_it_must() -> None:
    source = torch.randn(64 << 20, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    timing = time_interleaved([Subject("copy", [copy])], torch.device("cuda", 0), seconds_each=0.05)["copy"]
    assert timing.how == "graph" and timing.samples >= 5
    gbps = 2 * source.numel() * 4 / timing.median_us / 1e3
    assert 50 < gbps < 20_000


@pytest.mark.gpu
def test_uncapturable_subjects_are_timed_eagerly_and_reported() -> None:
    x = torch.randn(1000, device="cuda")

    def synchronizes() -> None:
        x.sum().item()

    def adds() -> None:
        x.add_(1)

    subjects = [Subject("bad", [synchronizes]), Subject("good", [adds])]
    times = time_interleaved(subjects, torch.device("cuda", 0), seconds_each=0.02)
    assert times["bad"].how == "eager" and "capture failed" in times["bad"].note
    assert times["good"].how == "graph"
