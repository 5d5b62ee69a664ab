"""Variants of a training step: techniques alone, removed and removed in pairs; ways to feed it and to allocate memory;
weights in global or in constant memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from escalade.device.driver import check
from escalade.engine.training.program import KernelStep
from escalade.engine.training.settings import GRAPH, TECHNIQUES
from escalade.engine.training.step import TrainingStep
from escalade.ops import OPERATIONS
from escalade.ops.conv2d import Conv2dProblem
from escalade_bench.ladder import climb, free
from escalade_bench.measure.records import Record
from escalade_bench.networks.measurement import Case, compare
from escalade_bench.networks.training_step import Training, cases, escalade, made, planned
from escalade_bench.networks.workload import Part, Say, Setting
from escalade_bench.peers.network import NetworkPeer
from escalade_bench.peers.torch_training_step import Lesson

ABLATION, PAIRS = "_training_ablation", "_training_pairs"
"""Suffixes of the workloads of these records, after the network's name."""
ALL, NONE, ONLY, WITHOUT = "all", "none", "only ", "without "
JOINT = " and "
FEEDING = ("pageable, one stream", "pinned, one stream", "pageable, two streams", "pinned, two streams")
ALLOCATION = ("allocated by CUDA at each step", "allocated by PyTorch at each step", "one arena")
CONSTANTS = {"input_tile": "weights in global memory", "constant_weights": "weights in constant memory"}
"""Rungs of `conv2d`, and their names here."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "A batch from host memory, and a step": FEEDING,
    "A step launched kernel by kernel": ALLOCATION,
    "The first convolution, by a plain kernel in fp32": tuple(CONSTANTS.values()),
}
"""Variants that are compared with each other, by title; the first is the baseline."""
_ABLATION_BATCHES, _PAIR_BATCHES = (64,), (256,)
_PAIRED = 6
"""Techniques that are also removed in pairs: those that gain most. Pairs of the others hardly matter."""
Call = Callable[[], torch.Tensor]
Variants = Iterable[tuple[str, Callable[[], NetworkPeer]]]
"""Names, each with a function that makes the step."""


def parts(training: Training) -> dict[str, Part]:
    """Return techniques and pairs as parts of a run, measured only if they are named."""
    shared = partial(Part, usual=False, made=partial(planned, training))
    return {
        "training-ablation": shared(partial(_ablation, training), batches=_ABLATION_BATCHES),
        "training-pairs": shared(partial(_pairs, training), batches=_PAIR_BATCHES, needs_gpu=True),
    }


def compared(case: Case, variants: Variants, say: Say) -> list[Record]:
    """Verify every variant by the model after a few steps, and time them in turns; each is a rung of ours."""
    makers = {name: lambda _, make=make: [make()] for name, make in variants}
    return compare(replace(case, own=True), makers, say)


def _ablation(training: Training, setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure the whole and all variants without one technique; then each that changes the plan alone, and pairs of
    those that gain most."""
    for case, lesson in cases(training, setting, ABLATION, _ABLATION_BATCHES, say):
        first = compared(case, without(lesson, ((name,) for name in TECHNIQUES)), say)
        yield first
        used = changing(first)
        alone = [tuple(other for other in TECHNIQUES if other != name) for name in used]
        yield compared(case, without(lesson, [tuple(TECHNIQUES), *alone]), say)
        yield compared(case, without(lesson, itertools.combinations(strongest(first, used), 2)), say)
        free(setting.device)


def without(lesson: Lesson, removed: Iterable[tuple[str, ...]]) -> Variants:
    """Yield the whole step, then the step without each of these sets of techniques."""
    for names in ((), *removed):
        name = name_of(names)
        yield name, partial(escalade, lesson, names, name)


def name_of(removed: Sequence[str]) -> str:
    """Return the name of the variant without these techniques."""
    if not removed:
        return ALL
    left = [name for name in TECHNIQUES if name not in removed]
    if not left:
        return NONE
    return f"{ONLY}{left[0]}" if len(left) == 1 else f"{WITHOUT}{JOINT.join(removed)}"


def changing(records: Sequence[Record]) -> list[str]:
    """Return the techniques without which the plan differs, or runs differently."""
    plans = {record.rung: record.config.get("plan") for record in records}
    return [name for name in TECHNIQUES if name == GRAPH or plans.get(WITHOUT + name) != plans.get(ALL)]


def strongest(records: Sequence[Record], names: Sequence[str]) -> list[str]:
    """Return the techniques whose removal slows a step down most, in the order of `names`."""
    slowed = {record.rung: record.median_us or 0.0 for record in records}
    kept = sorted(names, key=lambda name: -slowed.get(WITHOUT + name, 0.0))[:_PAIRED]
    return [name for name in names if name in kept]


def _pairs(training: Training, setting: Setting, say: Say) -> Iterator[list[Record]]:
    for case, lesson in cases(training, setting, PAIRS, _PAIR_BATCHES, say):
        for names, make, removed in ((FEEDING, fed, ()), (ALLOCATION, _allocating, (GRAPH,))):
            pupil, step = made(lesson, "nhwc", removed)
            calls = {name: make(lesson, step, name) for name in names}
            yield compared(
                case, ((name, partial(pupil.peer, name, "nhwc", calls[name])) for name in names), say
            )
        yield _constants(case, lesson, setting, say)
        free(setting.device)


def fed(lesson: Lesson, step: TrainingStep, name: str) -> Call:
    """Return a step over a batch from host memory. With two streams the next batch is copied while a step runs."""
    where, streams = name.split(", ")
    x, target = (one.cpu() for one in lesson.batch("nhwc"))
    if where == "pinned":
        x, target = x.pin_memory(), target.pin_memory()
    host = [x] if lesson.target is lesson.x else [x, target]

    def taken(batch: list[torch.Tensor]) -> torch.Tensor:
        return step(batch[0], batch[-1])

    def brought() -> list[torch.Tensor]:
        return [one.to(lesson.device, non_blocking=True) for one in host]

    if streams == "one stream":
        return lambda: taken(brought())
    side = torch.cuda.Stream(lesson.device)

    def ahead() -> tuple[list[torch.Tensor], torch.cuda.Event]:
        with torch.cuda.stream(side):
            batch = brought()
            there = torch.cuda.Event()
            there.record()
        return batch, there

    coming = [ahead()]

    def call() -> torch.Tensor:
        batch, there = coming.pop()
        current = torch.cuda.current_stream(lesson.device)
        current.wait_event(there)
        loss = taken(batch)
        for one in batch:
            one.record_stream(current)
        coming.append(ahead())
        return loss

    return call


def _allocating(lesson: Lesson, step: TrainingStep, name: str) -> Call:
    """Return a step that launches its kernels one by one, each after an allocation as large as its result. The memory
    is freed after the step; the kernels compute in the arena all the same."""
    from cuda.bindings import driver

    x, target = lesson.batch("nhwc")
    if name == "one arena":
        return lambda: step(x, target)
    step(x, target)
    program = step.program
    assert isinstance(program, KernelStep)
    by_cuda = name == "allocated by CUDA at each step"

    def call() -> torch.Tensor:
        addresses: list[Any] = []
        tensors: list[torch.Tensor] = []
        program.prepare()
        for one, run in program.iter_steps():
            size = program.plan.forms[one.node.name].bytes
            if by_cuda:
                with torch.cuda.device(lesson.device):
                    addresses.append(check(driver.cuMemAlloc(max(size, 1)), f"allocating {size} bytes"))
            else:
                tensors.append(torch.empty(size, dtype=torch.uint8, device=lesson.device))
            run()
        program.finish()
        for address in addresses:
            check(driver.cuMemFree(address), "freeing memory")
        return program.results()[0].clone()

    return call


def _constants(case: Case, lesson: Lesson, setting: Setting, say: Say) -> list[Record]:
    """Measure the first convolution by two rungs, with weights and bias in global or in constant memory."""
    first = next(one for one in lesson.model.modules() if isinstance(one, nn.Conv2d))
    (rows, columns), (height, width) = lesson.x.shape[2:], first.kernel_size
    problem = Conv2dProblem(
        case.batch, first.in_channels, rows, columns, first.out_channels, height, width,
        padding=(height // 2, width // 2), bias=first.bias is not None,
    )  # fmt: skip
    asked = setting.session.settings(say, "fp32", layouts=("nchw",), rungs=tuple(CONSTANTS), with_peers=False)
    found = climb(OPERATIONS["conv2d"], problem, asked)
    blank = case.blank("escalade", "nchw")
    return [
        replace(r, workload=blank.workload, problem=blank.problem, dtype=case.task.dtype, rung=CONSTANTS[r.rung])
        for r in found
    ]  # fmt: skip
