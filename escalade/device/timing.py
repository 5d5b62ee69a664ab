"""Timing by CUDA graphs, interleaved rounds and medians.

Every subject is captured into a CUDA graph that repeats its calls until one replay is long enough for events. The
subjects are then replayed in rounds (A B C A B C …), so that a card that warms up slows all of them alike. A subject
drops out when its time budget is spent.

What is timed is also verified: before and after timing, the results are poisoned, the same graph is replayed, and its
results are compared with the expected ones.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from escalade.device.nvml import ConditionMonitor, GpuConditions
from escalade.device.recording import capture_into
from escalade.errors import EscaladeError, UnsupportedError

L2_MULTIPLE = 3  # input sets of 3x the L2 size evict everything of the previous round
MAX_SETS = 512
MAX_GRAPH_CALLS = 20_000
ENQUEUE_CYCLES = 1_000_000  # about 0.5 ms: longer than the CPU needs to launch a large graph
ENQUEUE_CYCLES_EACH = 50_000
_LEAST_SAMPLES, _PRECISION = 9, 0.01
"""Minimum samples for a confidence interval, and its relative half width at which a subject is done."""


class Turn(Protocol):
    """Exclusive use of a GPU that several processes share."""

    def take(self) -> None: ...
    def give_back(self) -> None: ...
    def silence(self) -> None:
        """Stop the other processes, and wait until the GPU is idle."""

    def resume(self) -> None:
        """Let the other processes run again."""


_turn: Turn | None = None
_sections = 0
_silent_sections = 0
_turn_taken_in = 0
"""Nesting depth of the section that holds the GPU; 0 if none does."""


def take_turns(turn: Turn | None) -> None:
    """Register this process as sharing the GPU: its exclusive sections then wait for the others'."""
    global _turn
    _turn = turn


@contextlib.contextmanager
def on_gpu(*, lazily: bool = False) -> Iterator[None]:
    """Enter a section that excludes those of other processes: for kernel searches, and work that fills the GPU.

    Other processes keep compiling and planning. Sections may be nested; the GPU is released at the end of the section
    that acquired it. With `lazily` it is only acquired when `begin_turn` is called.
    """
    global _sections, _turn_taken_in
    _sections += 1
    try:
        if not lazily:
            begin_turn()
        yield
    finally:
        if _turn is not None and _turn_taken_in == _sections:
            _turn_taken_in = 0
            _turn.give_back()
        _sections -= 1


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Stop the other processes while the block runs: it times something."""
    global _silent_sections
    with on_gpu():
        _silent_sections += 1
        try:
            if _turn is not None and _silent_sections == 1:
                _turn.silence()
            yield
        finally:
            _silent_sections -= 1
            if _turn is not None and not _silent_sections:
                _turn.resume()


def begin_turn() -> None:
    """Acquire the GPU for the enclosing section; do nothing without one, or if the process is the only one."""
    global _turn_taken_in
    if _turn is not None and _sections and not _turn_taken_in:
        _turn.take()
        _turn_taken_in = _sections


def takes_turns() -> bool:
    """Return True if other processes use the GPU at the same time."""
    return _turn is not None


@dataclass(frozen=True)
class ResultCheck:
    """Check that the timed work computes the right results."""

    spoil: Callable[[], object]
    """Overwrites all results, so that missing writes are noticed."""
    judge: Callable[[], str]
    """Returns what is wrong with the results; empty if they are right."""


@dataclass(frozen=True)
class Subject:
    """Work to time: a rung, a peer, a copy. `calls` do the same work on rotating input sets."""

    name: str
    calls: Sequence[Callable[[], object]]
    proof: ResultCheck | None = None


@dataclass(frozen=True)
class Timing:
    """Time per call in microseconds."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    how: str
    """`graph` (CUDA graph replay), `eager` (events around plain calls), `calls` (wall clock over consecutive calls),
    `cpu` (wall clock of a call on the CPU), `host` (CPU time of a call on the GPU) or `twin` (wall clock, not a speed).
    """
    note: str = ""
    conditions: GpuConditions | None = None
    """State of the card during the measurement; None if unknown."""

    @property
    def record(self) -> dict[str, Any]:
        """Conditions in the form of result records."""
        return {} if self.conditions is None else self.conditions.as_dict()


class Sampler(Protocol):
    """Prepared subject: `start` enqueues one sample, `finish` returns its microseconds per call."""

    calls: int
    how: str
    note: str

    def start(self) -> None: ...
    def finish(self) -> float: ...


def rotation(bytes_per_set: int, l2_bytes: int) -> int:
    """Return the number of input sets needed so that a set has left the L2 when it is used again."""
    if bytes_per_set <= 0 or l2_bytes <= 0:
        return 1
    return min(MAX_SETS, max(1, math.ceil(L2_MULTIPLE * l2_bytes / bytes_per_set)))


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, interpolated linearly between the nearest ranks."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def time_interleaved(
    subjects: Sequence[Subject],
    device: torch.device,
    *,
    seconds_each: float = 0.3,
    min_rounds: int = 5,
    max_rounds: int = 400,
    replay_us: float = 500.0,
    wrong: dict[str, str] | None = None,
) -> dict[str, Timing]:
    """Time the subjects; returns timings by name. On the CPU (the twin), one wall-clock run each, marked as such.

    Subjects with wrong results get no timing: the reason is added to `wrong`, or raised if that is None.
    """
    names = [subject.name for subject in subjects]
    if len(set(names)) != len(names):
        raise UnsupportedError(f"subject names must be unique: {names}")
    if any(not subject.calls for subject in subjects):
        raise UnsupportedError(
            f"subjects without calls cannot be timed: {[a.name for a in subjects if not a.calls]}"
        )
    failures: dict[str, str] = {}
    if device.type != "cuda":
        found = {
            name: timing for subject in subjects for name, timing in _by_clock(subject, failures).items()
        }
    else:
        with torch.cuda.device(device), on_gpu():
            samplers: dict[str, Sampler] = {
                subject.name: _cuda_sampler(subject, replay_us) for subject in subjects
            }
            right = [subject for subject in subjects if _proven(subject, samplers[subject.name], failures)]
            with exclusive():
                found = interleave(
                    {subject.name: samplers[subject.name] for subject in right},
                    seconds_each=seconds_each,
                    min_rounds=min_rounds,
                    max_rounds=max_rounds,
                    before_round=keep_busy,
                )
            found = {
                subject.name: found[subject.name]
                for subject in right
                if _proven(subject, samplers[subject.name], failures)
            }
    if wrong is not None:
        wrong.update(failures)
    elif failures:
        raise EscaladeError("; ".join(f"{name}: {failure}" for name, failure in failures.items()))
    return found


def _by_clock(subject: Subject, failures: dict[str, str]) -> dict[str, Timing]:
    """Time one run by the wall clock, and verify it."""
    if subject.proof:
        subject.proof.spoil()
    found = interleave({subject.name: WallSampler(subject)}, seconds_each=0.0, min_rounds=1, max_rounds=1)
    failure = subject.proof.judge() if subject.proof else ""
    if failure:
        failures[subject.name] = f"the timed results are wrong: {failure}"
        return {}
    return found


def _proven(subject: Subject, sampler: Sampler, failures: dict[str, str]) -> bool:
    """Replay once more over poisoned results; returns whether the new results are right."""
    if subject.proof is None:
        return True
    subject.proof.spoil()
    sampler.start()
    sampler.finish()
    failure = subject.proof.judge()
    if failure:
        failures[subject.name] = f"the timed results are wrong: {failure}"
    return not failure


def interleave(
    samplers: Mapping[str, Sampler],
    *,
    seconds_each: float,
    min_rounds: int,
    max_rounds: int,
    before_round: Callable[[int], None] = lambda turns: None,
) -> dict[str, Timing]:
    """Sample all subjects in rounds until each has spent its time or its median is known to 1%.

    All samples of a round are enqueued before the first is awaited. `before_round` keeps the GPU busy meanwhile, so
    that no sample contains CPU launch time.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    spent = dict.fromkeys(samplers, 0.0)
    running = list(samplers)
    watch = ConditionMonitor()
    for finished in range(1, max_rounds + 1):
        before_round(len(running))
        for name in running:
            samplers[name].start()
        watch.sample()  # while the GPU is under load
        for name in running:
            microseconds = samplers[name].finish()
            samples[name].append(microseconds)
            spent[name] += microseconds * samplers[name].calls / 1e6
        if finished >= min_rounds:
            running = [name for name in running if spent[name] < seconds_each and not _settled(samples[name])]
        if not running:
            break
    return {
        name: summarize(values, samplers[name].how, samplers[name].note, watch.conditions)
        for name, values in samples.items()
    }


def _settled(values: Sequence[float]) -> bool:
    """Return True if the median is known to 1%, by the notch of a box plot (about 95% confidence)."""
    if len(values) < _LEAST_SAMPLES:
        return False
    spread = percentile(values, 75) - percentile(values, 25)
    return 1.57 * spread / math.sqrt(len(values)) < _PRECISION * percentile(values, 50)


def summarize(
    values: Sequence[float], how: str, note: str = "", conditions: GpuConditions | None = None
) -> Timing:
    low, high = percentile(values, 20), percentile(values, 80)
    return Timing(percentile(values, 50), low, high, len(values), how, note, conditions)


class WallSampler:
    """Wall clock of one run on the twin: shows that it ran, not how fast it is on a GPU."""

    how = "twin"
    note = "wall clock of the CPU twin; not a speed"

    def __init__(self, subject: Subject) -> None:
        self.calls = len(subject.calls)
        self._calls = subject.calls

    def start(self) -> None:
        pass  # the twin is synchronous: `finish` runs it

    def finish(self) -> float:
        began = time.perf_counter()
        for call in self._calls:
            call()
        return (time.perf_counter() - began) * 1e6 / self.calls


class EventSampler:
    """CUDA events around `enqueue`, which makes `calls` calls."""

    def __init__(self, enqueue: Callable[[], object], calls: int, how: str, note: str = "") -> None:
        self.calls = calls
        self.how = how
        self.note = note
        self._enqueue = enqueue
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        self._begin.record()
        self._enqueue()
        self._end.record()

    def finish(self) -> float:
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e3 / self.calls


class ReplaySampler:
    """CUDA events around one replay of a captured graph, after `prepare` has filled its inputs.

    A network's inputs share memory with later values. Without `prepare`, replays would feed a network its own results
    until they overflow.
    """

    calls = 1
    how = "graph"
    note = ""

    def __init__(self, prepare: Callable[[], object], replay: Callable[[], None]) -> None:
        self._prepare = prepare
        self._replay = EventSampler(replay, 1, self.how)

    def start(self) -> None:
        self._prepare()
        self._replay.start()

    def finish(self) -> float:
        return self._replay.finish()


class CallSampler:
    """Wall clock of calls as users make them: from an idle device until the last result is complete."""

    def __init__(
        self, call: Callable[[], object], wait: Callable[[], None], calls: int = 1, how: str = "calls"
    ) -> None:
        self.calls = calls
        self.how = how
        self.note = ""
        self._call = call
        self._wait = wait

    def start(self) -> None:
        pass  # must not overlap other subjects: all of it is in `finish`

    def finish(self) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(self.calls):
            self._call()
        self._wait()
        return (time.perf_counter() - began) * 1e6 / self.calls


class HostSampler:
    """Wall clock of `run`, which makes `calls` asynchronous calls: what they cost the calling thread.

    `calls` must be below the capacity of a stream's queue, or a call would wait for the GPU.
    """

    how = "host"
    note = ""

    def __init__(self, run: Callable[[], object], wait: Callable[[], None], calls: int) -> None:
        self.calls = calls
        self._run = run
        self._wait = wait

    def start(self) -> None:
        pass  # needs an idle device: all of it is in `finish`

    def finish(self) -> float:
        self._wait()
        began = time.perf_counter()
        results = self._run()
        took = time.perf_counter() - began
        del results  # freed outside the timed region
        return took * 1e6 / self.calls


def host_time(
    call: Callable[[], object], wait: Callable[[], None], *, calls: int = 100, rounds: int = 20
) -> Timing:
    """Time an asynchronous call until it returns: what it costs the calling thread."""

    def run() -> None:
        for _ in range(calls):
            call()

    sampler = HostSampler(run, wait, calls)
    samples = [sampler.finish() for _ in range(rounds + 1)]
    wait()
    return summarize(samples[1:], sampler.how)


def _cuda_sampler(subject: Subject, replay_us: float) -> EventSampler:
    """Warm up and capture the subject, repeated until one replay takes about `replay_us`."""
    for call in subject.calls:  # compiles, allocates, lets cuDNN choose algorithms
        call()
    torch.cuda.synchronize()
    try:
        once = EventSampler(_capture(subject.calls, 1), len(subject.calls), "graph")
    except (RuntimeError, EscaladeError) as error:
        torch.cuda.synchronize()
        return _eager_sampler(subject, replay_us, error)
    repetitions = _repetitions(once, replay_us)
    if repetitions == 1:
        return once
    repeated = EventSampler(_capture(subject.calls, repetitions), repetitions * len(subject.calls), "graph")
    _replay_time(repeated)
    return repeated


def _repetitions(once: EventSampler, replay_us: float) -> int:
    replay = _replay_time(once)
    if replay < replay_us:  # short: measure again, because the first replay also uploads the graph
        replay = min(_replay_time(once) for _ in range(3))
    wanted = math.ceil(replay_us / max(replay, 0.1))
    return max(1, min(wanted, MAX_GRAPH_CALLS // once.calls))


def keep_busy(turns: int) -> None:
    """Let the GPU sleep while the CPU enqueues `turns` samples, so that none of them waits for the CPU."""
    torch.cuda._sleep(ENQUEUE_CYCLES + ENQUEUE_CYCLES_EACH * turns)


def _replay_time(once: EventSampler) -> float:
    keep_busy(1)
    once.start()
    return once.finish() * once.calls


def _capture(calls: Sequence[Callable[[], object]], repetitions: int) -> Callable[[], None]:
    calls[0]()  # reloads per-graph resources that the previous capture consumed
    graph = torch.cuda.CUDAGraph()
    with capture_into(graph):
        for _ in range(repetitions):
            for call in calls:
                call()
    return graph.replay


def _eager_sampler(subject: Subject, replay_us: float, error: Exception) -> EventSampler:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    note = f"CUDA graph capture failed ({reason}); timed by events around plain calls"

    def turn(repetitions: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(repetitions):
                for call in subject.calls:
                    call()

        return run

    once = EventSampler(turn(1), len(subject.calls), "eager", note)
    repetitions = _repetitions(once, replay_us)
    return EventSampler(turn(repetitions), repetitions * len(subject.calls), "eager", note)
