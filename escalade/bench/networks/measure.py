"""One network, batch size and dtype: Escalade and its peers, each verified, then timed in turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from escalade.bench.ceilings import Ceilings
from escalade.bench.networks import turns
from escalade.bench.networks.contender import (
    FORMATS,
    TOLERANCE,
    Contender,
    Entry,
    Maker,
    Unavailable,
    waiting,
)
from escalade.bench.networks.workload import Say
from escalade.bench.store import Record
from escalade.bench.timing import CallSampler, ReplaySampler, Sampler, Timing
from escalade.engine.engine import Engine
from escalade.engine.explain import Explanation, explain
from escalade.engine.forms import STORAGE
from escalade.errors import EscaladeError
from escalade.ops.accuracy import relative_error
from escalade.ops.precision import precision

CALLS_IN_A_ROW = 10
"""Of a system that has no graph to replay: the CPU may run ahead of the GPU, as it does in a loop of calls."""


@dataclass(frozen=True)
class Case:
    """What is measured, and what is known about it beforehand."""

    workload: str
    entry: Entry
    expected: torch.Tensor
    """In float64."""
    seconds: float
    ceilings: Ceilings | None = None
    slack: float = 1.0
    """How many times the usual error is allowed."""

    @property
    def tolerance(self) -> float:
        return self.slack * TOLERANCE[self.entry.dtype]

    @property
    def batch(self) -> int:
        return self.entry.x.shape[0]

    def blank(self, system: str, layout: str) -> Record:
        problem = f"{self.entry.x.shape[-1]}_b{self.batch}"
        return Record(self.workload, problem, self.entry.dtype, layout, self.batch, system, "")

    @property
    def bytes(self) -> int:
        """The fewest: inputs and weights read once, results written once."""
        weights = sum(parameter.numel() for parameter in self.entry.model.parameters())
        elements = self.entry.x.numel() + weights + self.expected.numel()
        return elements * STORAGE[self.entry.dtype].itemsize


def measure(case: Case, engine: Engine, peers: Mapping[str, Maker], say: Say) -> list[Record]:
    """A record of the engine and of every peer; a wrong result is a failure and has no time."""
    records = compare(case, {"escalade": lambda entry: [escalade(entry, engine)], **peers}, say)
    if case.ceilings is None or not any(r.system == "escalade" and not r.failure for r in records):
        return records
    plan = explain(engine.plan(_input(case.entry)), case.ceilings.floor_us)
    return [record if record.failure else _with_floor(case, record, plan) for record in records]


def compare(case: Case, makers: Mapping[str, Maker], say: Say) -> list[Record]:
    """A record of every system, each verified, then timed in turns."""
    with precision(case.entry.dtype), torch.no_grad():
        say(f"{_label(case)}: verifying")
        ready, failures = _verified(case, makers, say)
        say(f"{_label(case)}: timing {len(ready)} systems")
        timed = _time(case, [contender for contender, _ in ready])
    records = [_record(case, contender, error, *timed[contender.name]) for contender, error in ready]
    return _with_peer_gain(_fastest_layouts(records)) + failures


def _label(case: Case) -> str:
    return f"{case.workload} batch {case.batch} {case.entry.dtype}"


def _input(entry: Entry) -> torch.Tensor:
    """As the peers have it: of the dtype, images in channels_last."""
    return entry.x.to(STORAGE[entry.dtype], memory_format=FORMATS[entry.layout])


def escalade(entry: Entry, engine: Engine) -> Contender:
    x = _input(entry)
    program = engine.program(x)
    on_gpu = entry.device.type == "cuda"
    return Contender(
        "escalade",
        entry.layout,
        lambda: engine(x),
        lambda result: result,
        waiting(entry.device),
        prepare=(lambda: program.inputs[0].copy_(x)) if on_gpu else None,
        replay=program.run if on_gpu else None,
        peak_bytes=program.plan.bytes if on_gpu else None,
    )


def _verified(
    case: Case, makers: Mapping[str, Maker], say: Say
) -> tuple[list[tuple[Contender, float]], list[Record]]:
    right: list[tuple[Contender, float]] = []
    wrong: list[Record] = []
    for system, make in makers.items():
        try:
            checked = [(one, check(one, case.expected, case.tolerance)) for one in make(case.entry)]
        except Unavailable as reason:
            say(f"{_label(case)}: without {system}: {reason}")
            continue
        except (RuntimeError, EscaladeError) as broken:
            wrong.append(replace(case.blank(system, ""), failure=f"{type(broken).__name__}: {broken}"))
            continue
        for contender, (error, failure) in checked:
            if failure:
                blank = case.blank(contender.system, contender.layout)
                wrong.append(replace(blank, error=error, tolerance=case.tolerance, failure=failure))
            else:
                right.append((contender, error))
    return right, wrong


def check(contender: Contender, expected: torch.Tensor, tolerance: float) -> tuple[float, str]:
    """The error of a call's result, and what is wrong with it, or with that of a replay, if something is."""
    error, failure = judge(contender.tensor(contender.call()), expected, tolerance)
    if failure or contender.replayed is None:
        return error, failure
    return judge(contender.replayed(), expected, tolerance)


def judge(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> tuple[float, str]:
    if result.shape != expected.shape:
        return float("nan"), f"its result has shape {tuple(result.shape)}, not {tuple(expected.shape)}"
    error = relative_error(result.to(expected.device), expected)
    if error <= tolerance:
        return error, ""
    return error, f"its error is {error:.2e}, more than the {tolerance:.0e} allowed"


def _time(case: Case, contenders: Sequence[Contender]) -> dict[str, tuple[Timing, Timing]]:
    """On the device, and by the wall clock; each in turns."""
    replays: dict[str, Sampler] = {
        one.name: ReplaySampler(one.prepare, one.replay) for one in contenders if one.replay and one.prepare
    }
    on_device = turns.on_device(replays, case.seconds)
    how = "calls" if case.entry.device.type == "cuda" else "cpu"
    calls: dict[str, Sampler] = {one.name: CallSampler(one.call, one.wait, 1, how) for one in contenders}
    in_a_row: dict[str, Sampler] = {
        f"{one.name} in a row": CallSampler(one.call, one.wait, CALLS_IN_A_ROW)
        for one in contenders
        if not one.replay and case.entry.device.type == "cuda"
    }
    by_clock = turns.by_clock({**calls, **in_a_row}, case.seconds)
    found = {}
    for one in contenders:
        wall = by_clock[one.name]
        found[one.name] = on_device.get(one.name) or by_clock.get(f"{one.name} in a row") or wall, wall
    return found


def _record(case: Case, one: Contender, error: float, device: Timing, wall: Timing) -> Record:
    record = replace(
        case.blank(one.system, one.layout),
        timing=device.how,
        samples=device.samples,
        median_us=device.median_us,
        p20_us=device.p20_us,
        p80_us=device.p80_us,
        wall_us=wall.median_us,
        images_per_s=1e6 * case.batch / device.median_us,
        error=error,
        tolerance=case.tolerance,
        peak_bytes=one.peak_bytes,
        note=one.note,
    )
    if case.ceilings is None:
        return record
    gbps = case.bytes / device.median_us / 1e3
    return replace(record, gbps=gbps, copy_pct=100 * gbps / case.ceilings.copy_gbps)


def _with_floor(case: Case, record: Record, plan: Explanation) -> Record:
    assert case.ceilings is not None
    tflops = plan.flops / record.time / 1e6
    peak = case.ceilings.tflops[case.entry.dtype]
    return replace(record, tflops=tflops, peak_pct=100 * tflops / peak, floor_us=plan.floor_us)


def _fastest_layouts(records: Sequence[Record]) -> list[Record]:
    """Of a system's layouts the faster one."""
    best: dict[str, Record] = {}
    for record in records:
        if record.system not in best or record.time < best[record.system].time:
            best[record.system] = record
    return list(best.values())


def _with_peer_gain(records: Sequence[Record]) -> list[Record]:
    rivals = [record for record in records if record.system != "escalade"]
    best = min(rivals, key=lambda record: record.time, default=None)
    return [
        replace(record, peer=best.system, peer_gain=best.time / record.time)
        if best and record.system == "escalade"
        else record
        for record in records
    ]
