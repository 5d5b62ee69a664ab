"""One network, batch size and dtype: Escalade and its peers, each verified, timed in turns, and verified again.

Verification runs the timed call and the timed CUDA graph, over inputs and outputs that were filled with NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from escalade.device.timing import (
    CallSampler,
    ReplaySampler,
    Sampler,
    Timing,
    exclusive,
    interleave,
    keep_busy,
)
from escalade.engine.engine import Engine
from escalade.engine.explain import Explanation
from escalade.engine.graph.forms import STORAGE
from escalade.ops.base.switches import precision
from escalade.terminal_text import counted
from escalade.tune.refusal import failure_reason
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.figures import with_times
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import PEERS, Judge, fresh, spoil
from escalade_bench.networks.plans import planned, summary
from escalade_bench.networks.workload import Say
from escalade_bench.peers.network import Maker, NetworkPeer, Replay, Task, Unavailable, tensors, waiting

CALLS_IN_A_ROW = 10
"""Consecutive calls of a system without a CUDA graph: the CPU may run ahead of the GPU, as in a user's loop."""
_LONG_CALL_US = 10_000.0
"""Calls above this many microseconds need no such loop: launches are a small part of them."""
_MIN_ROUNDS, _MAX_ROUNDS = 5, 1000


@dataclass(frozen=True)
class Case:
    """One comparison: workload, inputs, expected results and the time for each system."""

    workload: str
    task: Task
    standard: Judge
    seconds: float
    """Seconds that each system is timed."""
    ceilings: Ceilings | None = None
    own: bool = False
    """True if all systems are Escalade's: they are recorded as its rungs, and none gets a peer's larger tolerance."""
    by_call: bool = False
    """True if rates are of whole calls, from host memory to host memory. Systems without a graph then run on the
    CPU."""

    def allowance(self, system: str) -> float:
        """Return the factor on the tolerance for a system."""
        return 1.0 if self.own or system == "escalade" else PEERS

    @property
    def batch(self) -> int:
        return self.task.x.shape[0]

    def blank(self, system: str, layout: str) -> Record:
        problem = f"{self.task.x.shape[-1]}_b{self.batch}"
        return Record(self.workload, problem, self.task.dtype, layout, self.batch, system, "")

    @property
    def bytes(self) -> int:
        """Least traffic: inputs and weights read once, results written once."""
        weights = sum(parameter.numel() for parameter in self.task.model.parameters())
        results = sum(expected.numel() for expected in self.standard.expected)
        elements = self.task.x.numel() + weights + results
        return elements * STORAGE[self.task.dtype].itemsize


def measure(case: Case, engine: Engine, peers: Mapping[str, Maker], say: Say) -> list[Record]:
    """Return a record of the engine and of every peer; a wrong result is a failure without a time."""
    records = compare(case, {"escalade": lambda task: [escalade(task, engine)], **peers}, say)
    if not any(_has_run(record) for record in records):
        return records
    plan = planned(engine, case.task.input(), floor=case.ceilings.floor_us if case.ceilings else None)
    records = [replace(r, config=summary(plan)) if _has_run(r) else r for r in records]
    if case.ceilings is None or any(r.failure for r in records if not r.is_peer):
        return records
    return [record if record.failure else _with_floor(case, record, plan) for record in records]


def _has_run(record: Record) -> bool:
    """Return True if the record is ours and has a result, correct or not."""
    return not record.is_peer and bool(record.layout)


@dataclass(frozen=True)
class Ready:
    """A verified peer with the sampler of its graph."""

    peer: NetworkPeer
    sampler: ReplaySampler | None
    error: float


def compare(case: Case, makers: Mapping[str, Maker], say: Say) -> list[Record]:
    """Return a record of every system, each verified, timed in turns, and verified again."""
    with precision(case.task.dtype), torch.no_grad():
        ready, failures = _verified(case, makers, say)
        say(f"{_label(case)}: timing {counted(len(ready), 'system')}")
        with exclusive():
            timed = _time(case, ready)
        records = []
        for one in ready:
            error, failure = check(case, one.peer, one.sampler)
            if failure:
                failures.append(_wrong(case, one.peer, error, f"after it was timed {failure}"))
            else:
                records.append(_record(case, one, *timed[one.peer.name]))
    found = _with_refusals(_fastest_layouts(records), failures)
    return [replace(r, system="escalade", rung=r.system) for r in found] if case.own else found


def _label(case: Case) -> str:
    return f"{case.workload} batch {case.batch} {case.task.dtype}"


def escalade(task: Task, engine: Engine) -> NetworkPeer:
    x = task.input()
    program = engine.program(x)

    def fill() -> None:
        program.inputs[0].copy_(x)

    on_gpu = task.device.type == "cuda"
    return NetworkPeer(
        "escalade",
        task.layout,
        lambda: engine(x),
        tensors,
        waiting(task.device),
        Replay(fill, program.run, program.inputs, program.outputs) if on_gpu else None,
        peak_bytes=program.plan.bytes if on_gpu else None,
    )


def _verified(case: Case, makers: Mapping[str, Maker], say: Say) -> tuple[list[Ready], list[Record]]:
    right: list[Ready] = []
    wrong: list[Record] = []
    for system, make in makers.items():
        say(f"{_label(case)}: making and verifying {system}")
        try:
            for peer in make(case.task):
                sampler = ReplaySampler(peer.replay.fill, peer.replay.run) if peer.replay else None
                error, failure = check(case, peer, sampler)
                if failure:
                    wrong.append(_wrong(case, peer, error, failure))
                else:
                    right.append(Ready(peer, sampler, error))
        except Unavailable as missing:
            say(f"{_label(case)}: without {system}: {missing}")
            wrong.append(replace(case.blank(system, ""), failure=str(missing)))
        except Exception as broken:  # a system may fail in any way: continue with the others
            failure_reason(broken)  # unless it was an interrupt
            wrong.append(replace(case.blank(system, ""), failure=f"{type(broken).__name__}: {broken}"))
    return right, wrong


def _wrong(case: Case, peer: NetworkPeer, error: float, failure: str) -> Record:
    allowed = case.allowance(peer.system) * case.standard.tolerance
    blank = case.blank(peer.system, peer.layout)
    return replace(blank, error=None if math.isnan(error) else error, tolerance=allowed, failure=failure)


def check(case: Case, peer: NetworkPeer, sampler: ReplaySampler | None) -> tuple[float, str]:
    """Return the larger error of a call and a replay, and the failure of either, or an empty string."""
    allowance = case.allowance(peer.system)
    replay = peer.replay
    if replay:
        spoil((*replay.inputs, *replay.outputs))  # a call may use the same memory
    results = fresh(peer.call, peer.results, peer.restart)
    peer.wait()
    error, failure = case.standard.judge(results, allowance)
    if failure or replay is None or sampler is None:
        return error, failure
    peer.restart()
    spoil((*replay.inputs, *replay.outputs))
    sampler.start()
    sampler.finish()
    peer.wait()
    results = replay.results() if replay.results else replay.outputs
    peer.wait()
    replayed, failure = case.standard.judge(results, allowance)
    return max(error, replayed), f"its graph: {failure}" if failure else ""


def _time(case: Case, ready: Sequence[Ready]) -> dict[str, tuple[Timing, Timing]]:
    """Return times on the device and by the wall clock."""
    replays: dict[str, Sampler] = {one.peer.name: one.sampler for one in ready if one.sampler}
    on_device = time_on_device(replays, case.seconds)
    on_gpu = case.task.device.type == "cuda"
    peers, how = [one.peer for one in ready], "calls" if on_gpu else "cpu"
    calls: dict[str, Sampler] = {one.name: CallSampler(one.call, one.wait, 1, how) for one in peers}
    if not case.by_call:  # after a wait, the process's caches are cold
        warm = interleave(calls, seconds_each=0, min_rounds=2, max_rounds=2)
        quick = [one for one in peers if not one.replay and warm[one.name].median_us < _LONG_CALL_US]
        if on_gpu and quick:
            rows = {f"{one.name} in a row": CallSampler(one.call, one.wait, CALLS_IN_A_ROW) for one in quick}
            interleave(rows, seconds_each=0, min_rounds=2, max_rounds=2)
            calls.update(rows)
    by_clock = time_by_clock(calls, case.seconds)
    found = {}
    for name in (one.name for one in peers):
        wall = by_clock[name]
        found[name] = on_device.get(name) or by_clock.get(f"{name} in a row") or wall, wall
    return found


def time_on_device(samplers: Mapping[str, Sampler], seconds: float) -> dict[str, Timing]:
    """Time by events, interleaved, after two rounds: the first replay of a graph also uploads it."""
    if not samplers:
        return {}
    interleave(samplers, seconds_each=0, min_rounds=2, max_rounds=2, before_round=keep_busy)
    return interleave(
        samplers, seconds_each=seconds, min_rounds=_MIN_ROUNDS, max_rounds=_MAX_ROUNDS, before_round=keep_busy
    )


def time_by_clock(samplers: Mapping[str, Sampler], seconds: float) -> dict[str, Timing]:
    """Time by the wall clock, interleaved."""
    return interleave(samplers, seconds_each=seconds, min_rounds=_MIN_ROUNDS, max_rounds=_MAX_ROUNDS)


def _record(case: Case, ready: Ready, device: Timing, wall: Timing) -> Record:
    one, blank = ready.peer, case.blank(ready.peer.system, ready.peer.layout)
    on_cpu = case.by_call and one.replay is None
    record = replace(
        with_wall(replace(blank, timing="cpu"), wall) if on_cpu else with_times(blank, device),
        wall_us=wall.median_us,
        images_per_s=1e6 * case.batch / (wall if case.by_call else device).median_us,
        error=ready.error,
        tolerance=case.allowance(one.system) * case.standard.tolerance,
        peak_bytes=one.peak_bytes,
        config=dict(one.config),
        note=one.note,
    )
    if case.ceilings is None:
        return record
    gbps = case.bytes / device.median_us / 1e3
    return replace(record, gbps=gbps, copy_pct=100 * gbps / case.ceilings.copy_gbps)


def with_wall(record: Record, wall: Timing) -> Record:
    """Return the record with the time and rate of calls by the wall clock, without a time on the device."""
    return replace(
        record,
        samples=wall.samples,
        conditions=wall.record,
        wall_us=wall.median_us,
        images_per_s=1e6 * record.batch / wall.median_us,
    )


def _with_floor(case: Case, record: Record, plan: Explanation) -> Record:
    assert case.ceilings is not None
    tflops = plan.flops / record.time / 1e6
    peak = case.ceilings.peak(case.task.dtype)
    return replace(record, tflops=tflops, peak_pct=100 * tflops / peak, floor_us=plan.floor_us)


def _fastest_layouts(records: Sequence[Record]) -> list[Record]:
    """Return the record of each system's fastest layout."""
    best: dict[str, Record] = {}
    for record in records:
        if record.system not in best or record.time < best[record.system].time:
            best[record.system] = record
    return list(best.values())


def _with_refusals(records: Sequence[Record], failures: Sequence[Record]) -> list[Record]:
    """Note a failed layout in the record of the system's other layout; a system without a time is a failure."""
    found = {record.system: record for record in records}
    alone: dict[str, Record] = {}
    for failed in failures:
        if failed.system in found:
            timed = found[failed.system]
            note = f"{failed.layout}: {failed.failure}"
            found[failed.system] = replace(timed, note="; ".join(filter(None, (timed.note, note))))
        else:
            alone.setdefault(failed.system, failed)
    return [*found.values(), *alone.values()]
