"""What each technique of a training step brings: alone, removed from the whole, and beside each other one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from escalade.bench.ladder import free
from escalade.bench.networks.measurement import Case, compare
from escalade.bench.networks.training_step import Training, cases, escalade, planned
from escalade.bench.networks.workload import Part, Say, Setting
from escalade.bench.peers.network import Maker, NetworkPeer, Task
from escalade.bench.peers.torch_training_step import Lesson
from escalade.engine.training.techniques import GRAPH, TECHNIQUES
from escalade.measure.records import Record

SUFFIX = "_training_ablation"
"""How the workload of these records ends, behind the network's name."""
ALL, NONE, ONLY, WITHOUT = "all", "none", "only ", "without "
JOINT = " and "
_BATCHES = (64,)


@dataclass(frozen=True)
class OwnCase(Case):
    """A case whose systems are all Escalade's: none is allowed more than another."""

    def allowance(self, system: str) -> float:
        return 1.0


def part(training: Training) -> Part:
    """The ablation as a part of a run, which has to be asked for."""
    return Part(partial(_measure, training), usual=False, batches=_BATCHES, made=partial(planned, training))


def _measure(training: Training, setting: Setting, say: Say) -> Iterator[list[Record]]:
    """First the whole and all that lack one technique; then, of those that make another plan, each alone and pairs."""
    for case, lesson in cases(training, setting, SUFFIX, _BATCHES, say):
        first = _compared(case, lesson, [(), *((name,) for name in TECHNIQUES)], say)
        yield first
        used = _used(first)
        alone = [tuple(other for other in TECHNIQUES if other != name) for name in used]
        yield _compared(case, lesson, [(), tuple(TECHNIQUES), *alone], say)
        yield _compared(case, lesson, [(), *itertools.combinations(used, 2)], say)
        free(setting.device)


def name_of(without: Sequence[str]) -> str:
    """What a variant is called that lacks these techniques."""
    if not without:
        return ALL
    left = [name for name in TECHNIQUES if name not in without]
    if not left:
        return NONE
    return f"{ONLY}{left[0]}" if len(left) == 1 else f"{WITHOUT}{JOINT.join(without)}"


def _compared(case: Case, lesson: Lesson, variants: Iterable[tuple[str, ...]], say: Say) -> list[Record]:
    makers: Mapping[str, Maker] = {name_of(one): partial(_made, lesson, one) for one in variants}
    own = OwnCase(case.workload, case.task, case.standard, case.seconds)
    return [replace(r, system="escalade", rung=r.system) for r in compare(own, makers, say)]


def _made(lesson: Lesson, without: tuple[str, ...], task: Task) -> list[NetworkPeer]:
    return [escalade(lesson, without, name_of(without))]


def _used(records: Sequence[Record]) -> list[str]:
    """The techniques without which the plan is another one, or is run otherwise."""
    plans = {record.rung: record.config.get("plan") for record in records}
    return [name for name in TECHNIQUES if name == GRAPH or plans.get(WITHOUT + name) != plans.get(ALL)]
