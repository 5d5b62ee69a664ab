"""Gain of each technique of a training step: alone, removed from the whole, and removed in pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from escalade.engine.training.techniques import GRAPH, TECHNIQUES
from escalade_bench.ladder import free
from escalade_bench.measure.records import Record
from escalade_bench.networks.measurement import Case, compare
from escalade_bench.networks.training_step import Training, cases, escalade, planned
from escalade_bench.networks.workload import Part, Say, Setting
from escalade_bench.peers.network import Maker, NetworkPeer, Task
from escalade_bench.peers.torch_training_step import Lesson

SUFFIX = "_training_ablation"
"""Suffix of the workload of these records, behind the network's name."""
ALL, NONE, ONLY, WITHOUT = "all", "none", "only ", "without "
JOINT = " and "
_BATCHES = (64,)


def part(training: Training) -> Part:
    """Return the ablation as a part of a run, measured only if it is named."""
    return Part(partial(_measure, training), usual=False, batches=_BATCHES, made=partial(planned, training))


def _measure(training: Training, setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure the whole and all variants without one technique; then each that changes the plan alone, and pairs."""
    for case, lesson in cases(training, setting, SUFFIX, _BATCHES, say):
        first = _compared(case, lesson, [(), *((name,) for name in TECHNIQUES)], say)
        yield first
        used = _used(first)
        alone = [tuple(other for other in TECHNIQUES if other != name) for name in used]
        yield _compared(case, lesson, [(), tuple(TECHNIQUES), *alone], say)
        yield _compared(case, lesson, [(), *itertools.combinations(used, 2)], say)
        free(setting.device)


def name_of(without: Sequence[str]) -> str:
    """Return the name of the variant without these techniques."""
    if not without:
        return ALL
    left = [name for name in TECHNIQUES if name not in without]
    if not left:
        return NONE
    return f"{ONLY}{left[0]}" if len(left) == 1 else f"{WITHOUT}{JOINT.join(without)}"


def _compared(case: Case, lesson: Lesson, variants: Iterable[tuple[str, ...]], say: Say) -> list[Record]:
    makers: Mapping[str, Maker] = {name_of(one): partial(_made, lesson, one) for one in variants}
    return compare(replace(case, own=True), makers, say)


def _made(lesson: Lesson, without: tuple[str, ...], task: Task) -> list[NetworkPeer]:
    return [escalade(lesson, without, name_of(without))]


def _used(records: Sequence[Record]) -> list[str]:
    """Return the techniques without which the plan differs, or runs differently."""
    plans = {record.rung: record.config.get("plan") for record in records}
    return [name for name in TECHNIQUES if name == GRAPH or plans.get(WITHOUT + name) != plans.get(ALL)]
