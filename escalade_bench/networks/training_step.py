"""Whole training steps, `escalade.training_step` and PyTorch's: verified after a few steps, then timed."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from escalade.device.timing import on_gpu
from escalade.engine import training_step
from escalade.engine.explain import Explanation
from escalade.engine.plan.liveness import peak_bytes
from escalade.engine.plan.plan import Plan
from escalade.engine.training.settings import GRAPH
from escalade.engine.training.step import TrainingStep, plan_training_step
from escalade.tune.verification import UNIT_ROUNDOFF
from escalade_apps.train.steps import Loss
from escalade_bench.ladder import free
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import nudged, unsearched
from escalade_bench.networks.measurement import Case, compare, summary
from escalade_bench.networks.step_judging import UPDATES, StepStandard, errors
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
