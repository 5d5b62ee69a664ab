"""Compare a network by kernels with PyTorch: results, shapes, types, repeated calls, files, training."""

from __future__ import annotations

import copy
import math
import pathlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import escalade
from escalade.engine import Engine
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.training import planned
from escalade.engine.training.settings import StepSettings
from escalade.engine.training.step import TrainingStep
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.card import H200, Card
from escalade.tune.verification import compare
from escalade_bench.networks.judging import LEAST, TIMES, nudged
from tests.random_models.program import Text, exactly, run_exactly, run_rounded, tensors, wide

SLACK = 2.0
"""Tolerance beyond a network's usual one. A random network is a few roundings deep and its results have few elements:
PyTorch's error on them is a sample that may be small by chance. A wrong kernel is off by far more than twice."""

_NONE = 1e-6
"""A change of less than this part of the usual one is ignored: in a low-precision dtype it is rounding error."""
CARDS = {"h200": H200}
"""Devices that need not be present: plans are made for these cards, and PyTorch computes their nodes on the CPU."""
CPU_SLACK = 16.0
"""Replaces SLACK for these: PyTorch's CPU kernels sum values in other layouts less precisely. A wrong plan is off
by far more."""
NUDGES = 8
"""Nudged inputs, moved by less than a rounding, on which PyTorch's error is measured again where a training step looks
wrong. Rounding decides which of two nearly equal elements a maximum selects, and so where its gradient goes."""


class Wrong(AssertionError):
    """A network whose results do not match PyTorch's."""


class Case:
    """A network, and its results in float64 and in PyTorch's own arithmetic of a dtype."""

    def __init__(self, text: Text, dtype: str, slack: float = SLACK) -> None:
        self.text, self.dtype, self._slack = text, dtype, slack
        self.model = text.module()

    def expect(self, inputs: Sequence[torch.Tensor]) -> tuple[Any, list[float]]:
        """The results in float64, and the tolerance of each."""
        expected = run_exactly(copy.deepcopy(self.model), inputs)
        own = tensors(run_rounded(copy.deepcopy(self.model), inputs, self.dtype))
        errors = [
            relative_error(mine, best) if best.is_floating_point() else 0.0
            for mine, best in zip(own, tensors(expected), strict=True)
        ]
        # Results of one network share their roundings: the mean of all is a better estimate than one with few elements.
        typical = math.hypot(*errors) / max(1, len(errors)) ** 0.5
        most = [self._slack * max(LEAST[self.dtype], TIMES[self.dtype] * max(e, typical)) for e in errors]
        return expected, most

    def judge(self, found: Any, inputs: Sequence[torch.Tensor], what: str) -> None:
        expected, most = self.expect(inputs)
        with torch.no_grad():
            eager = self.model(*(each.clone() for each in inputs))
        if pytree.tree_structure(found) != pytree.tree_structure(eager):
            raise Wrong(f"{what}: a result of another structure, {pytree.tree_structure(found)}")
        each = zip(tensors(found), tensors(expected), tensors(eager), most, strict=True)
        for number, (mine, best, plain, allowed) in enumerate(each):
            name = f"{what}: result {number} {list(plain.shape)}"
            if mine.shape != plain.shape or mine.dtype != plain.dtype:
                raise Wrong(f"{name} {plain.dtype} is {list(mine.shape)} {mine.dtype}")
            mine = mine.detach().cpu()
            if not mine.is_floating_point():
                if not torch.equal(mine, plain):
                    raise Wrong(f"{name} differs in {int((mine != plain).sum())} of {mine.numel()} elements")
                continue
            failure, _ = compare(mine, best.double(), allowed)
            if failure:
                raise Wrong(f"{name}: {failure}")


def check(
    text: Text,
    dtype: str,
    device: str,
    batches: Sequence[int] = (2, 3, 1),
    thorough: bool = True,
    slack: float = SLACK,
) -> None:
    """Raise `Wrong` with the difference from PyTorch."""
    if device in CARDS:
        with _planned_for(CARDS[device]):
            return check(text, dtype, "cpu", batches, thorough, CPU_SLACK)
    case = Case(text, dtype, slack)
    first = text.draw(batches[0])
    home = "cuda" if device == "cuda" else "cpu"
    start = "cpu" if text.on_host else home
    model = copy.deepcopy(case.model).to(start)
    state = copy.deepcopy(model.state_dict())
    # The caller's default device must not matter; only a model captured on the host may rely on it.
    with nullcontext() if text.on_host else torch.device("meta"):
        engine = escalade.compile(model, _placed(first, start), dtype=dtype, device=device)
    results = _call(engine, case, first, "first call", home)
    kept = [each.clone() for each in tensors(results)]
    _call(engine, case, text.draw(batches[0], 1), "other data", home)
    if not all(map(torch.equal, tensors(results), kept)):
        raise Wrong("other data: the call changed the results of the one before it")
    for batch in batches[1:]:
        _call(engine, case, text.draw(batch), f"batch of {batch}", home)
    if thorough:
        _call(engine, case, _strided(text.draw(batches[0], 2)), "strided inputs", home)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "network.escalade")
            engine.save(path)
            loaded = escalade.load(path, device=device)
        _call(loaded, case, text.draw(batches[0], 3), "loaded from a file", home)
        _call(engine, case, first, "first data again", home)
    for name, value in model.state_dict().items():
        if not torch.equal(value, state[name]):
            raise Wrong(f"the caller's {name} has changed")


@contextmanager
def _planned_for(card: Card) -> Iterator[None]:
    """Make plans of the CPU for a card. Unlike the twin's, they have no rungs of other architectures."""
    with mock.patch.object(Card, "of", staticmethod(lambda place: card)):
        yield


def _call(engine: Engine, case: Case, inputs: Sequence[torch.Tensor], what: str, home: str) -> Any:
    given = _placed(inputs, home)
    _spoil(engine, given)
    found = engine(*given)
    case.judge(found, inputs, what)
    if not all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(given, inputs, strict=True)):
        raise Wrong(f"{what}: the inputs have changed")
    return found


def _spoil(engine: Engine, inputs: Sequence[torch.Tensor]) -> None:
    """Fill memory that a call could read unwritten with NaN: the arena, and reallocated memory."""
    program = engine.program(*inputs)
    if isinstance(program, KernelProgram):
        program._values.arena.fill_(0xFF)
    device = inputs[0].device
    del program
    for size in (256, 4096, 1 << 16, 1 << 20):
        torch.full((size,), 0xFF, dtype=torch.uint8, device=device)


def _placed(inputs: Iterable[torch.Tensor], home: str) -> tuple[torch.Tensor, ...]:
    """On the device, with the same strides."""
    return tuple(each if home == "cpu" else _moved(each, home) for each in inputs)


def _moved(tensor: torch.Tensor, home: str) -> torch.Tensor:
    whole = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=home)
    return whole.copy_(tensor)


def _strided(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The same numbers: images in channels_last, everything else as every second column of a wider tensor."""
    return tuple(
        each.contiguous(memory_format=torch.channels_last)
        if each.dim() == 4
        else each.repeat_interleave(2, -1)[..., ::2]
        for each in inputs
    )


# --- training


def check_training(text: Text, dtype: str, device: str, steps: int = 3) -> None:
    """Losses, parameters and buffers of a few steps, compared with float64."""
    home = "cuda" if device == "cuda" else "cpu"
    mine = text.module().to(home)
    optimizer = _optimizer(text.seed, mine)
    batches = [text.draw(size, number) for number, size in enumerate((4, 4, 3)[:steps])]
    # A small scale: with a large one gradients may overflow fp16, and then the first steps are skipped.
    scale = 8.0 if dtype == "fp16" else None
    given = (_placed(batches[0], home),)
    with mock.patch.object(planned, "CHECKS_PLANS", True):  # on the CPU, the nodes of plans
        if device in CARDS:
            step = TrainingStep(
                mine, _loss, optimizer, given, StepSettings(dtype, plan_only=CARDS[device]), scale
            )
        else:
            place = None if home == "cuda" else device
            step = escalade.training_step(
                mine, _loss, optimizer, given, dtype=dtype, device=place, loss_scale=scale
            )
        losses = [step(_placed(each, home)).detach().double().cpu() for each in batches]

    start, after = text.module().state_dict(), mine.state_dict()
    own: dict[str, float] = {}
    for number in range(1 + NUDGES):
        moved = [tuple(_nudged(each, dtype, number) for each in batch) for batch in batches]
        exact, theirs = (_trained(text, moved, each) for each in ("fp64", dtype))
        best = _changes(start, *exact)
        sizes = _sizes(best)
        for name, error in _errors(_changes(start, *theirs), best, sizes).items():
            own[name] = max(own.get(name, 0.0), error)
        if not number:
            errors = _errors(_changes(start, after, losses), best, sizes)
            for name, expected in exact[0].items():
                if not expected.is_floating_point() and not torch.equal(after[name].cpu(), expected):
                    raise Wrong(f"{name} is {after[name]}, not {expected}")
            # Precision left of a small change after adding it to a large number in fp32.
            floors = {name: 2.0**-23 * _norm(start[name]) / sizes[name] for name in errors if name in start}
        # A change of few elements may be right by chance: PyTorch's error on all of them is a better estimate.
        usual = math.hypot(*(own[name] for name in floors)) / max(1, len(floors)) ** 0.5
        wrong = ""
        for name, error in errors.items():
            pytorch = max(own[name], usual, floors[name]) if name in floors else own[name]
            allowed = (CPU_SLACK if device in CARDS else SLACK) * max(LEAST[dtype], TIMES[dtype] * pytorch)
            if not error <= allowed:
                wrong = f"{name} is off by {error:.2e}, more than {allowed:.2e}; PyTorch is by {pytorch:.2e}"
        if not wrong:
            return
    raise Wrong(wrong)


def _nudged(given: torch.Tensor, dtype: str, number: int) -> torch.Tensor:
    return nudged(given, dtype, number) if given.is_floating_point() else given


def _changes(
    start: dict[str, torch.Tensor], after: dict[str, torch.Tensor], losses: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The outcome of training: losses, and the change of every floating-point parameter and buffer."""
    found = {f"loss {number}": loss for number, loss in enumerate(losses)}
    for name, before in start.items():
        if before.is_floating_point():
            found[name] = after[name].cpu().double() - before.double()
    return found


def _sizes(best: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the scale of each change's error; zero changes, as of a bias before a norm, are skipped."""
    changes = [value for name, value in best.items() if not name.startswith("loss ")]
    typical = math.hypot(*map(_norm, changes)) / sum(value.numel() for value in changes) ** 0.5
    sizes = {}
    for name, value in best.items():
        least = 1e-30 if name.startswith("loss ") else typical * value.numel() ** 0.5
        if _norm(value) > _NONE * least:
            sizes[name] = max(_norm(value), least)
    return sizes


def _errors(
    found: dict[str, torch.Tensor], best: dict[str, torch.Tensor], sizes: dict[str, float]
) -> dict[str, float]:
    return {name: _norm(found[name] - best[name]) / size for name, size in sizes.items()}


def _norm(value: torch.Tensor) -> float:
    return float(value.double().norm())


def _loss(result: Any) -> torch.Tensor:
    parts = [each.float() for each in tensors(result) if each.is_floating_point()]
    total = parts[0].square().mean()
    for each in parts[1:]:
        total = total + (each - 0.5).square().mean()
    return total


def _optimizer(seed: int, model: nn.Module) -> torch.optim.Optimizer:
    match seed % 3:
        case 0:
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        case 1:
            # eps far above rounding: else a gradient that is zero up to rounding would be a whole step, of any sign.
            return torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-2)
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _trained(
    text: Text, batches: Sequence[Sequence[torch.Tensor]], dtype: str
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """The model's state after PyTorch's steps, and the losses."""
    model = text.module()
    if dtype == "fp64":
        model = model.double()
    optimizer = _optimizer(text.seed, model)
    low = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        if dtype == "fp64":
            with exactly():
                loss = _loss(model(*wide(batch)))
        else:
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                loss = _loss(model(*(each.clone() for each in batch)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().double())
    return model.state_dict(), losses
