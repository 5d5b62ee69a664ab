"""Whole training steps, `escalade.training_step` and PyTorch's: verified after a few steps, then timed."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from escalade.device.driver import check
from escalade.device.timing import on_gpu
from escalade.engine import training_step
from escalade.engine.explain import Explanation
from escalade.engine.plan.liveness import peak_bytes
from escalade.engine.plan.plan import Plan
from escalade.engine.training.program import KernelStep
from escalade.engine.training.settings import GRAPH, TECHNIQUES
from escalade.engine.training.step import TrainingStep, plan_training_step
from escalade.ops import OPERATIONS
from escalade.ops.conv2d import Conv2dProblem
from escalade.tune.verification import UNIT_ROUNDOFF
from escalade_apps.train.steps import Loss
from escalade_bench.ladder import climb, free
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import UPDATES, StepStandard, errors, nudged, unsearched
from escalade_bench.networks.measurement import Case, compare
from escalade_bench.networks.plans import summary
from escalade_bench.networks.workload import Part, Say, Setting
from escalade_bench.peers import torch_training_step as torch_steps
from escalade_bench.peers.comparison import TRAINING_STEP
from escalade_bench.peers.network import Maker, NetworkPeer, Peak, Replay, Task
from escalade_bench.peers.torch_training_step import Lesson, Pupil, results_of

_TRIALS = 3
_BATCH_NUMBER = 6


@dataclass(frozen=True)
class Training:
    """Loss, batches and optimizer settings of a measured training."""

    loss: Loss
    target: Callable[[torch.Tensor, int], torch.Tensor]
    """Returns the targets of a batch, from the batch and a seed: x itself for an autoencoder."""
    batches: tuple[int, ...]
    scale: float
    """Initial loss scale of fp16, small enough for finite first gradients."""
    rate: float
    most: float = 4.0
    """Factor on the usual largest tolerance: gradients pass every layer twice, and their sums cancel in part."""
    ours: Callable[[nn.Module], nn.Module] = lambda model: model
    """Returns the model that Escalade trains in place of this one, with equal parameters."""


def part(training: Training) -> Part:
    """Return training steps as a part of a run, measured only if it is named."""
    return Part(
        partial(_measure, training), usual=False, batches=training.batches, made=partial(planned, training)
    )


def planned(training: Training, setting: Setting, batches: Iterable[int], dtype: str) -> Made:
    """Return the digests of today's plans of a training step."""
    found = []
    for batch in batches:
        x = setting.inputs(batch, _BATCH_NUMBER)
        model = training.ours(trainable(setting.model).to(setting.device))
        target = training.target(x, setting.session.seed)
        lesson = Lesson(model, training.loss, x, target, dtype, training.rate, 1.0)
        layout = lesson.layouts[-1]
        pupil = Pupil(lesson, layout)
        batch_in, card = lesson.batch(layout), setting.session.card
        plan = plan_training_step(pupil.model, lesson.loss, pupil.optimizer, batch_in, dtype, card)
        found.append(Made.of_plan(plan))
    return Made.together(found)


def _measure(training: Training, setting: Setting, say: Say) -> Iterator[list[Record]]:
    for case, lesson in cases(training, setting, TRAINING_STEP, training.batches, say):
        own = replace(lesson, model=training.ours(lesson.model), _models={})
        makers: dict[str, Maker] = {
            "escalade": lambda _, own=own: [escalade(own)],  # type: ignore[misc]
            **setting.peers_at(case.batch, torch_steps.makers(lesson)),
        }
        yield compare(case, makers, say)
        free(setting.device)


def cases(
    training: Training, setting: Setting, suffix: str, batches: tuple[int, ...], say: Say
) -> Iterator[tuple[Case, Lesson]]:
    """Yield the case and the lesson of each batch and dtype of a run."""
    workload = setting.name + suffix
    for batch in setting.among(batches):
        x = setting.inputs(batch, _BATCH_NUMBER)
        target = training.target(x, setting.session.seed)
        model = trainable(setting.model).to(setting.device)
        first = Lesson(model, training.loss, x, target, "fp32", training.rate, training.scale)
        say(f"{workload} batch {batch}: float64")
        expected = exact(first)
        for dtype in setting.dtypes:
            lesson = replace(first, dtype=dtype)
            known = standard(lesson, expected, training.most)
            yield Case(workload, Task(setting.model, x, dtype), known, setting.session.seconds), lesson


def trainable(model: nn.Module) -> nn.Module:
    """Return a copy of a model in training mode, with BatchNorm's usual momentum."""
    copied = copy.deepcopy(model).train()
    for module in copied.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1
    return copied


def exact(lesson: Lesson) -> list[torch.Tensor]:
    """Return the results of the steps in float64."""
    with on_gpu(), unsearched("fp32"):
        return results_of(lesson, exact=True)


def standard(lesson: Lesson, expected: Sequence[torch.Tensor], most: float) -> StepStandard:
    """Return the expected results, and PyTorch's errors against them in the lesson's dtype."""
    with on_gpu(), unsearched(lesson.dtype):
        found = [results_of(lesson, nudged(lesson.x, lesson.dtype, trial)) for trial in range(_TRIALS)]
    trials = torch.stack([errors(one, expected) for one in found])
    updates = [
        tensor for name, tensor in zip(lesson.names, expected, strict=True) if name.startswith(UPDATES)
    ]
    ratio = _norm(lesson.model.parameters()) / _norm(updates)
    rounding = UNIT_ROUNDOFF["fp32"] * torch_steps.STEPS**0.5 * ratio
    return StepStandard(lesson.dtype, lesson.names, tuple(expected), trials, most, rounding)


def _norm(tensors: Iterable[torch.Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(one.detach().double()) for one in tensors]).norm())


def escalade(lesson: Lesson, without: Collection[str] = (), system: str = "escalade") -> NetworkPeer:
    """Return our own step, or one without some techniques. Its memory is the peak of a step, as for peers; the
    peak during planning is in its config."""
    layout = lesson.layouts[-1]
    x, target = lesson.batch(layout)
    lesson.model_in(layout)
    peak = Peak(lesson.device)
    (pupil, step), making_bytes = peak.of(lambda: made(lesson, layout, without))
    _, peak_bytes = peak.of(lambda: step(x, target))
    loss = step.program.results()[0]

    def replayed() -> torch.Tensor:
        step.program.run()
        return loss.clone()

    plan = step.explain()
    is_graph = lesson.device.type == "cuda" and GRAPH not in without
    results = partial(pupil.after, step=replayed)
    replay = Replay(pupil.restart, step.program.run, (), [loss], lambda: results(loss.clone()))
    begin = step.state_dict() and {"scale": lesson.scale, "good_steps": 0.0}

    def restart() -> None:
        pupil.restart()
        step.load_state_dict(begin)

    config = {"plan": _digest(plan), "making_bytes": making_bytes, "phases": phases(step.plan)}
    return pupil.peer(
        system, layout, lambda: step(x, target), replay=replay if is_graph else None, restart=restart,
        peak_bytes=peak_bytes, config=summary(plan) | config,
    )  # fmt: skip


def made(lesson: Lesson, layout: str, without: Collection[str] = ()) -> tuple[Pupil, TrainingStep]:
    """Compile a step, and run it once."""
    pupil = Pupil(lesson, layout)
    batch = lesson.batch(layout)
    step = training_step(
        pupil.model, lesson.loss, pupil.optimizer, batch, dtype=lesson.dtype,
        loss_scale=lesson.scale if lesson.dtype == "fp16" else None, without=without,
    )  # fmt: skip
    step(*batch)
    return pupil, step


def phases(plan: Plan) -> dict[str, int]:
    """Return the peak bytes of the arena in the forward pass, in the backward pass, and in the optimizer."""
    end = len(plan.steps)
    loss = next(number for number, one in enumerate(plan.steps) if one.node.name == plan.graph.outputs[0])
    spans = {"forward": (0, loss), "backward": (loss + 1, end - 1), "optimiser": (end, end)}
    return {name: peak_bytes(plan.lifetimes, *span) for name, span in spans.items()}


def _digest(plan: Explanation) -> str:
    """Return a name that plans of the same steps share."""
    steps = [(step.operation, step.problem, step.dtype, step.rung) for step in plan.steps]
    return hashlib.sha256(repr(steps).encode()).hexdigest()[:12]


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


def variants(training: Training) -> dict[str, Part]:
    """Return techniques and pairs as parts of a run, measured only if they are named."""
    shared = partial(Part, usual=False, made=partial(planned, training))
    return {
        "training-ablation": shared(partial(_ablation, training), batches=_ABLATION_BATCHES),
        "training-pairs": shared(partial(_pairs, training), batches=_PAIR_BATCHES, needs_gpu=True),
    }


def compared(case: Case, asked: Variants, say: Say) -> list[Record]:
    """Verify every variant by the model after a few steps, and time them in turns; each is a rung of ours."""
    makers = {name: lambda _, make=make: [make()] for name, make in asked}
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
