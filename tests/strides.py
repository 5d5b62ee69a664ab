"""Tensors with every kind of strides, and every entry point of Escalade, for tests on the twin and on a GPU.

Each check compares with eager PyTorch on the same tensors.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.backend import escalade_backend
from escalade.engine.training.parts import compile_for_training
from escalade.errors import UnsupportedError

Case = tuple[str, torch.Tensor]
SHAPE = (2, 3, 4, 5)
"""All sizes differ: a tensor read in another order has different values everywhere."""


# --- tensors


def cases(
    shape: Sequence[int],
    seed: int,
    drawn: int = 8,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    positive: bool = False,
) -> Iterator[Case]:
    """Yield (description, tensor): every order of dimensions, gaps, offsets, broadcasts and overlapping windows.

    `drawn` more cases combine these at random. Integers are 0 or 1.
    """
    chance = random.Random(seed)

    def made(name: str, strides: Sequence[int], offset: int = 0) -> Case:
        reach = sum((size - 1) * step for size, step in zip(shape, strides, strict=True) if size)
        size = offset + reach + 1 + chance.randrange(4)
        generator = torch.Generator().manual_seed(chance.randrange(2**31))
        if dtype.is_floating_point:
            memory = torch.randn(size, generator=generator)
            memory = (memory.abs() + 0.1 if positive else memory).to(device, dtype)
        else:
            memory = torch.randint(2, (size,), generator=generator).to(device, dtype)
        return f"{name}: strides {tuple(strides)} from {offset}", memory.as_strided(shape, strides, offset)

    rank = len(shape)
    row_major = _strides(shape, range(rank))
    for order in itertools.permutations(range(rank)):
        yield made(f"order {order}", _strides(shape, order))
    for offset in (1, 4):
        yield made("offset", row_major, offset)
    for axis in range(rank):
        strides = _strides(shape, range(rank), {axis: 2})
        yield made("gaps", strides)
        yield made("broadcast", [0 if number == axis else step for number, step in enumerate(strides)])
    yield made("one element", [0] * rank, 1)
    yield made("windows", [1] * rank)
    yield made(
        "strides of size 1",
        [step + 3 * (size == 1) for size, step in zip(shape, row_major, strict=True)],
    )
    for _ in range(drawn):
        shuffled = chance.sample(range(rank), rank)
        strides = _strides(shape, shuffled, {axis: chance.choice((1, 1, 1, 2, 3)) for axis in range(rank)})
        drawn_strides = [chance.choice((step, step, step, step, 0, 1)) for step in strides]
        yield made("drawn", drawn_strides, chance.choice((0, 0, 1, 3, 4, 8)))
    name, tensor = made("negated", row_major)
    yield name, torch._neg_view(tensor) if dtype.is_floating_point and not positive else tensor


def _strides(shape: Sequence[int], order: Sequence[int], gaps: dict[int, int] | None = None) -> list[int]:
    """Strides for dimensions in that order in memory, the innermost last; `gaps` multiplies those of some."""
    found, step = [0] * len(shape), 1
    for axis in reversed(order):
        found[axis] = step * (gaps or {}).get(axis, 1)
        step = found[axis] * shape[axis]
    return found


def addresses(tensor: torch.Tensor) -> list[int]:
    """Return the address of every element, one by one."""
    steps = [step * tensor.element_size() for step in tensor.stride()]
    return [
        tensor.data_ptr() + sum(map(int.__mul__, place, steps))
        for place in itertools.product(*map(range, tensor.shape))
    ]


# --- entry points of inference


class Several(nn.Module):
    """A kernel, a fallback to PyTorch, a view of the input and a movement: results that read the input in each way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return F.relu(self.conv(x)), torch.cumsum(x, -1), x.flatten(1), (x * 2).transpose(1, 2)


Call = Callable[[torch.Tensor], Any]


def _engine(model: nn.Module, x: torch.Tensor, device: str) -> Any:
    return escalade.compile(model, (x,), device=device, dtype="fp32")


def _called(model: nn.Module, x: torch.Tensor, device: str) -> Call:
    return _engine(model, x, device)


def _submitted(model: nn.Module, x: torch.Tensor, device: str) -> Call:
    engine = _engine(model, x, device)
    return lambda given: engine.submit(given).result()


def _streamed(model: nn.Module, x: torch.Tensor, device: str) -> Call:
    engine = _engine(model, x, device)
    return lambda given: next(iter(engine.stream([given])))


def _streamed_arrays(model: nn.Module, x: torch.Tensor, device: str) -> Call:
    engine = _engine(model, x, device)
    return lambda given: next(iter(engine.stream([given.resolve_neg().cpu().numpy()])))


def _deterministic(model: nn.Module, x: torch.Tensor, device: str) -> Call:
    return escalade.compile(model, (x,), device=device, dtype="fp32", deterministic=True)


def _behind_torch_compile(model: nn.Module, x: torch.Tensor, device: str) -> Call:
    return escalade_backend(torch.fx.symbolic_trace(model), [x])


ENTRIES: dict[str, Callable[[nn.Module, torch.Tensor, str], Call]] = {
    "call": _called,
    "submit": _submitted,
    "stream": _streamed,
    "stream of arrays": _streamed_arrays,
    "deterministic": _deterministic,
    "torch.compile": _behind_torch_compile,
}


def check_inference(entry: str, device: str, seed: int, drawn: int = 8, fresh: int = 2) -> None:
    """Check calls with every case of a plan made for a packed example, and of `fresh` plans made for a strided one."""
    torch.manual_seed(seed)
    place = "cpu" if device == "twin" else device
    models: list[nn.Module] = [nn.Conv2d(3, 4, 1)]
    if entry != "deterministic":  # for models that process items independently
        models.append(Several())
    for model in models:
        model.eval().to(place)
        every = list(cases(SHAPE, seed, drawn, device=place))
        call = ENTRIES[entry](model, every[0][1], device)
        with torch.no_grad():
            for name, x in every:
                _assert_close(call(x), model(x), f"{entry}, {name}")
            for name, x in random.Random(seed).sample(every, fresh):
                _assert_close(ENTRIES[entry](model, x, device)(x), model(x), f"{entry} made for {name}")


def check_out(device: str, seed: int, drawn: int = 8) -> None:
    """Check that results are written to exactly the elements of `out`, and overlapping ones are refused untouched."""
    torch.manual_seed(seed)
    place = "cpu" if device == "twin" else device
    for model in (nn.Conv2d(3, 3, 1).eval().to(place), nn.Sequential(nn.Softmax(1), nn.LogSoftmax(2))):
        x = torch.randn(SHAPE, device=place)
        engine = _engine(model, x, device)
        expected = engine(x)
        for name, out in cases(SHAPE, seed, drawn, device=place):
            memory = torch.empty(0, device=place).set_(out.untyped_storage())
            before = memory.clone()
            if len({*addresses(out)}) < out.numel():
                try:
                    engine(x, out=out)
                except UnsupportedError as error:
                    assert "elements overlap" in str(error), name
                    assert torch.equal(memory, before), name
                    continue
                raise AssertionError(f"out with {name} was accepted")
            assert engine(x, out=out) is out
            _assert_close(out, expected, f"out with {name}")
            written = torch.zeros_like(memory, dtype=torch.bool).as_strided(
                out.shape, out.stride(), out.storage_offset()
            )
            written.fill_(True)
            kept = ~torch.empty(0, dtype=torch.bool, device=place).set_(written.untyped_storage())
            assert torch.equal(memory[kept], before[kept]), name
            if device != "twin" or not out.is_neg():  # overwriting the input, in its own or in other strides
                given = x.clone()
                _assert_close(engine(given, out=given), expected, "out is the input")
                out.copy_(x)
                _assert_close(engine(out, out=out), expected, f"input and out with {name}")


def check_outs_among_each_other(device: str, seed: int) -> None:
    """Check pairs of results in one allocation: refused exactly if they share an element."""
    torch.manual_seed(seed)
    place = "cpu" if device == "twin" else device
    engine = escalade.compile(_Pair().eval(), (torch.ones(2, 3, device=place),), device=device)
    x = torch.randn(2, 3, device=place)
    expected = (x + 1, x)
    accepted = 0
    steps = ((3, 1), (1, 2), (6, 2), (4, 1))
    for one, other, offset in itertools.product(steps, steps, (1, 4, 9)):
        memory = torch.zeros(24, device=place)
        outs = [memory.as_strided((2, 3), one, 0), memory.as_strided((2, 3), other, offset)]
        places = [*addresses(outs[0]), *addresses(outs[1])]
        try:
            engine(x, out=tuple(outs))
        except UnsupportedError:
            assert len({*places}) < len(places), [(out.stride(), out.storage_offset()) for out in outs]
            continue
        accepted += 1
        assert len({*places}) == len(places), [(out.stride(), out.storage_offset()) for out in outs]
        _assert_close(tuple(outs), expected, "two results in one piece of memory")
    assert accepted > 3
    for number in range(2):  # a result that overwrites an input which is also returned
        given, apart = x.clone(), torch.empty_like(x)
        outs = [apart, apart]
        outs[number] = given
        engine(given, out=tuple(outs))
        _assert_close(tuple(outs), expected, f"out {number} is the input")


class _Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + 1, x


# --- training


def check_training(device: str, seed: int, drawn: int = 4, dtype: str = "fp32", fresh: int = 10) -> None:
    """Check one step called with every case, as input and as target, and `fresh` steps built for strided examples."""
    torch.manual_seed(seed)
    place = "cpu" if device == "twin" else device
    model = nn.Conv2d(3, 2, 1).to(place)
    chance = random.Random(seed)
    inputs = list(cases(SHAPE, seed, drawn, device=place))
    targets = list(cases((2, 2, 4, 5), seed + 1, drawn, device=place))
    kept = _Trained(model, F.mse_loss, (inputs[0][1], targets[0][1]), device, dtype)
    pairs = [*zip(inputs, chance.sample(targets, len(targets)), strict=True)]
    for (name, x), (other, target) in pairs:
        kept.check(x, target, note=f"called with input {name}, target {other}")
    for (name, x), (other, target) in chance.sample(pairs, min(fresh, len(pairs))):
        made = _Trained(model, F.mse_loss, (x, target), device, dtype)
        made.check(x, target, note=f"made for input {name}, target {other}")


def check_classes(device: str, seed: int, drawn: int = 2, most: int = 6) -> None:
    """Check strided class indices, and strided class weights held by the loss."""
    torch.manual_seed(seed)
    place = "cpu" if device == "twin" else device
    model = nn.Conv2d(3, 4, 1).to(place)
    x = torch.randn(SHAPE, device=place)
    weights = list(cases((4,), seed, drawn, device=place, positive=True))
    targets = list(cases((2, 4, 5), seed, drawn, dtype=torch.int64, device=place))
    random.Random(seed).shuffle(targets)
    for (name, target), (other, weight) in zip(targets[:most], itertools.cycle(weights), strict=False):
        made = _Trained(model, partial(F.cross_entropy, weight=weight), (x, target), device, "fp32")
        made.check(x, target, note=f"target {name}, weights {other}")


class _Trained:
    """A training step on a copy of a model, beside PyTorch's on another."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
        example: tuple[torch.Tensor, ...],
        device: str,
        dtype: str,
    ) -> None:
        self._own, self._theirs, self._loss = copy.deepcopy(model), copy.deepcopy(model), loss
        self._steps = [torch.optim.SGD(one.parameters(), 0.05) for one in (self._own, self._theirs)]
        self._step = escalade.training_step(
            self._own, loss, self._steps[0], example, device=device, dtype=dtype
        )
        self._wide = dtype == "fp32"
        self._autocast = partial(
            torch.autocast, "cpu" if device == "twin" else device, torch.bfloat16, enabled=not self._wide
        )

    def check(self, *given: torch.Tensor, note: str) -> None:
        before = [one.clone() for one in given]
        self._steps[1].zero_grad()
        with self._autocast():
            expected = self._loss(self._theirs(given[0]), *given[1:])
        expected.backward()
        self._steps[1].step()
        close = 1e-5 if self._wide else 2e-2
        _assert_close(self._step(*given), expected.detach(), note, close)
        _assert_close(self._own.state_dict(), self._theirs.state_dict(), note, close)
        _assert_close(given, tuple(before), f"inputs after {note}")


def check_training_behind_torch_compile(device: str, seed: int, drawn: int = 2, most: int = 8) -> None:
    """Check the plans of AOTAutograd's graphs, with strided inputs and strided gradients of results."""
    torch.manual_seed(seed)
    place = "cpu" if device == "twin" else device
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sigmoid()).to(place)
    traced = torch.fx.symbolic_trace(_Single(model))
    said: list[str] = []
    inputs = list(cases(SHAPE, seed, drawn, device=place))
    gradients = list(cases((2, 2, 4, 5), seed + 1, drawn, device=place))
    chance = random.Random(seed)
    for (name, x), (other, gradient) in zip(
        chance.sample(inputs, most), chance.sample(gradients, most), strict=True
    ):
        given = x.detach().requires_grad_()
        compiled = compile_for_training(traced, [given], "fp32", said.append, on_twin=device == "twin")
        found = []
        for one in (compiled, _Single(model)):
            (y,) = one(given)
            found.append((y.detach(), *torch.autograd.grad(y, [given, *model.parameters()], gradient)))
        _assert_close(found[0], found[1], f"input {name}, gradient {other}")
    assert not said


class _Single(nn.Module):
    """A model with a tuple as its only result, as AOTAutograd requires."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.model(x),)


def _assert_close(found: Any, expected: Any, note: str, close: float = 1e-5) -> None:
    def on_host(tensors: Any) -> Any:
        return torch.utils._pytree.tree_map(lambda one: one.detach().resolve_neg().cpu(), tensors)

    torch.testing.assert_close(
        on_host(found), on_host(expected), rtol=close, atol=close, msg=lambda text: f"{note}: {text}"
    )
    assert not math.isnan(float(sum(one.sum() for one in torch.utils._pytree.tree_leaves(on_host(found)))))
