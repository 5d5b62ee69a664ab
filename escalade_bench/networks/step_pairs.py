"""Pairs around a training step: pageable or pinned memory, one stream or two, memory allocated in the loop or once,
weights in global or in constant memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from escalade.device.memory import allocate, release
from escalade.engine.training.program import KernelStep
from escalade.engine.training.step import TrainingStep
from escalade.engine.training.techniques import GRAPH
from escalade.ops import OPERATIONS
from escalade.ops.conv2d import Conv2dProblem
from escalade_bench import ladder
from escalade_bench.ladder import free
from escalade_bench.measure.records import Record
from escalade_bench.networks.measurement import Case, compare
from escalade_bench.networks.training_step import Training, cases, made, planned, stepping
from escalade_bench.networks.workload import Part, Say, Setting
from escalade_bench.peers.network import Maker
from escalade_bench.peers.torch_training_step import Lesson, Pupil
from escalade_bench.trial import Settings

SUFFIX = "_training_pairs"
"""Suffix of the workload of these records, behind the network's name."""
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
_BATCHES = (256,)


def part(training: Training) -> Part:
    """Return the pairs as a part of a run, measured only if it is named."""
    return Part(
        partial(_measure, training), usual=False, needs_gpu=True, batches=_BATCHES, made=partial(planned, training)
    )  # fmt: skip


def _measure(training: Training, setting: Setting, say: Say) -> Iterator[list[Record]]:
    for case, lesson in cases(training, setting, SUFFIX, _BATCHES, say):
        pupil, step = made(lesson, "nhwc")
        yield _compared(case, {name: _fed(lesson, pupil, step, name) for name in FEEDING}, say)
        pupil, step = made(lesson, "nhwc", (GRAPH,))
        yield _compared(case, {name: _allocating(lesson, pupil, step, name) for name in ALLOCATION}, say)
        yield _constants(case, lesson, setting, say)
        free(setting.device)


def _compared(
    case: Case, calls: Mapping[str, tuple[Pupil, Callable[[], torch.Tensor]]], say: Say
) -> list[Record]:
    """Verify every variant by the model after a few steps, and time calls in turns."""

    def maker(name: str, pupil: Pupil, call: Callable[[], torch.Tensor]) -> Maker:
        return lambda task: [stepping(name, "nhwc", task.device, pupil, call)]

    makers = {name: maker(name, *one) for name, one in calls.items()}
    return compare(replace(case, own=True), makers, say)


def _fed(
    lesson: Lesson, pupil: Pupil, step: TrainingStep, name: str
) -> tuple[Pupil, Callable[[], torch.Tensor]]:
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
        return pupil, lambda: taken(brought())
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

    return pupil, call


def _allocating(
    lesson: Lesson, pupil: Pupil, step: TrainingStep, name: str
) -> tuple[Pupil, Callable[[], torch.Tensor]]:
    """Return a step that launches its kernels one by one, each after an allocation as large as its result. The memory
    is freed after the step; the kernels compute in the arena all the same."""
    x, target = lesson.batch("nhwc")
    if name == "one arena":
        return pupil, lambda: step(x, target)
    step(x, target)
    program = step.program
    assert isinstance(program, KernelStep)
    by_cuda = name == "allocated by CUDA at each step"

    def call() -> torch.Tensor:
        addresses: list[int] = []
        tensors: list[torch.Tensor] = []
        program.prepare()
        for one, run in program.one_by_one():
            size = program.plan.forms[one.node.name].bytes
            if by_cuda:
                addresses.append(allocate(lesson.device, size))
            else:
                tensors.append(torch.empty(size, dtype=torch.uint8, device=lesson.device))
            run()
        program.finish()
        for address in addresses:
            release(address)
        return program.results()[0].clone()

    return pupil, call


def _constants(case: Case, lesson: Lesson, setting: Setting, say: Say) -> list[Record]:
    """Measure the first convolution by two rungs, with weights and bias in global or in constant memory."""
    first = next(one for one in lesson.model.modules() if isinstance(one, nn.Conv2d))
    (rows, columns), (height, width) = lesson.x.shape[2:], first.kernel_size
    problem = Conv2dProblem(
        case.batch, first.in_channels, rows, columns, first.out_channels, height, width,
        padding=(height // 2, width // 2), bias=first.bias is not None,
    )  # fmt: skip
    seed, seconds = setting.seed, setting.seconds
    asked = Settings(
        ("fp32",), ("nchw",), tuple(CONSTANTS), with_peers=False, seed=seed, seconds_each=seconds
    )
    found = ladder.climb(OPERATIONS["conv2d"], problem, setting.device, asked, setting.ceilings, say)
    blank = case.blank("escalade", "nchw")
    return [
        replace(r, workload=blank.workload, problem=blank.problem, dtype=case.task.dtype, rung=CONSTANTS[r.rung])
        for r in found
    ]  # fmt: skip
