"""Plans over the caller's tensors, with a stand-in for the CUDA graph over the twin's kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.device.arguments import ArgumentList
from escalade.device.recipe import Workspace
from escalade.device.run import Executable, _TwinLaunch
from escalade.engine import Engine, compile
from escalade.engine.calls import BufferedCalls
from escalade.engine.passes.layout import MANY_NODES
from escalade.engine.plan.kernel_program import KernelProgram


class Frozen:
    """Replays launches with the arguments recorded at its creation, unless updated, like an executable CUDA
    graph.
    """

    def __init__(self, program: KernelProgram) -> None:
        self._program = program
        self._launches = [
            step.arguments
            for call in program.calls
            if isinstance(call, Executable)
            for step in call._steps
            if isinstance(step, _TwinLaunch)
        ]
        self._held = {id(launch): _contents(launch) for launch in self._launches}
        self._changed: dict[int, ArgumentList] = {}
        self.copied = 0

    def change(self, launches: Iterable[ArgumentList]) -> None:
        self._changed.update({id(launch): launch for launch in launches})

    def replay(self) -> None:
        self._held.update({number: _contents(launch) for number, launch in self._changed.items()})
        self.copied += len(self._changed)
        self._changed.clear()
        now = {id(launch): _contents(launch) for launch in self._launches}
        for launch in self._launches:
            _fill(launch, self._held[id(launch)])
        self._program.run_steps()
        for launch in self._launches:
            _fill(launch, now[id(launch)])


def _contents(launch: ArgumentList) -> list[bytes]:
    return [ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value)) for value in launch.values]


def _fill(launch: ArgumentList, contents: list[bytes]) -> None:
    for value, each in zip(launch.values, contents, strict=True):
        ctypes.memmove(ctypes.addressof(value), each, len(each))


class Network(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.again = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(8, 5)
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def trunk(p: Any, x: torch.Tensor) -> torch.Tensor:
    """At least four launches, so it is not called directly."""
    return F.relu(p.again(F.max_pool2d(F.relu(p.conv(x)), 2)))


def scores(p: Any, x: torch.Tensor) -> torch.Tensor:
    return p.fc(trunk(p, x).mean((2, 3)))


def many_steps(p: Network, x: torch.Tensor) -> torch.Tensor:
    y = scores(p, x)
    for _ in range(MANY_NODES):
        y = torch.softmax(y, -1)
    return y


def made(
    function: Callable[..., Any], *examples: torch.Tensor, **options: Any
) -> tuple[nn.Module, Engine, KernelProgram, Frozen]:
    torch.manual_seed(4)
    model = Network(function).eval()
    inputs = examples or (torch.randn(2, 8, 6, 6),)
    engine = compile(model, inputs, **{"device": "twin", "dtype": "fp32", **options})
    calls = engine.calls(inputs)
    assert isinstance(calls, BufferedCalls) and isinstance(calls.program, KernelProgram)
    frozen = Frozen(calls.program)
    calls.program._graph = frozen  # type: ignore[assignment]
    for end in calls.program._outside_pointers.values():
        end._graph = frozen  # type: ignore[assignment]
    return model, engine, calls.program, frozen


def check(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("function", [trunk, scores])
def test_kernels_follow_the_callers_tensors(function: Callable[..., Any]) -> None:
    model, engine, program, frozen = made(function)
    assert program.plan.inputs_outside and program.plan.outputs_outside
    inputs = [torch.randn(2, 8, 6, 6) for _ in range(4)]
    results = [engine(x) for x in inputs]
    assert frozen.copied
    for x, found in zip(inputs, results, strict=True):
        check(found, model(x))
    assert len({result.data_ptr() for result in results}) == len(results), "they are the caller's own"


@torch.no_grad()
def test_results_of_short_plans_that_need_a_cast_are_in_the_arena() -> None:
    """The cast writes the returned value."""
    model, engine, program, _ = made(scores, dtype="fp16")
    assert program.plan.inputs_outside and not program.plan.outputs_outside
    inputs = [torch.randn(2, 8, 6, 6) for _ in range(3)]
    for x, found in zip(inputs, [engine(x) for x in inputs], strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, model(x), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_pointers_to_unchanged_addresses_are_not_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    model, engine, program, frozen = made(scores)
    x, room = torch.randn(2, 8, 6, 6), torch.empty(2, 5)
    (output,) = program._outputs.values()
    output._empty = lambda: room  # type: ignore[method-assign]
    engine(x)
    before = frozen.copied
    for _ in range(3):
        x.copy_(torch.randn(2, 8, 6, 6))
        check(engine(x), model(x))
    assert frozen.copied == before
    moved = x.clone()
    check(engine(moved), model(x))
    assert frozen.copied == before + 1, "the first kernel alone"


@torch.no_grad()
def test_a_plan_over_memory_of_its_own_beside_calls() -> None:
    model, engine, program, _ = made(scores)
    for _ in range(3):
        x, own = torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6)
        found = engine(x)
        program.inputs[0].copy_(own)
        program.run()
        check(program.outputs[0], model(own))
        check(engine(x), model(x))
        check(program.outputs[0], model(own))
        check(found, model(x))
        program.bind_own_memory()
        program.run_steps()
        check(program.outputs[0], model(own))


def test_separate_memory_is_allocated_on_request() -> None:
    _, engine, program, _ = made(scores)
    engine(torch.randn(2, 8, 6, 6))
    assert program._values._outside is None
    assert program.inputs[0].shape == (2, 8, 6, 6) and program.outputs[0].shape == (2, 5)
    assert (
        program._values._outside is not None and program._values._outside.nbytes == program.plan.outside_bytes
    )


@torch.no_grad()
def test_inputs_that_kernels_cannot_read_are_copied() -> None:
    model, engine, _, _ = made(scores)
    x = torch.randn(2, 8, 6, 6)
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    strided = torch.stack([x, x], -1)[..., 0]
    for given in (shifted, strided, torch._neg_view(-x), x.transpose(2, 3), x[:1].expand(2, 8, 6, 6)):
        before = given.clone()
        check(engine(given), model(given))
        assert torch.equal(given, before)


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "inputs", "outputs"),
    [
        (lambda p, x, z: scores(p, x) + torch.cumsum(z, 1), 1, 0),
        (lambda p, x, z: p.fc(trunk(p, torch.cumsum(x, 3)).mean((2, 3)) + torch.cumsum(z, 1)[:, :1]), 0, 1),
        (lambda p, x, z: torch.cumsum(scores(p, x), 1) + z, 1, 0),
        (lambda p, x, z: (scores(p, x), z), 1, 1),
        (lambda p, x, z: (scores(p, x), z.view(-1, 5, 1), F.relu(z)), 1, 2),
        (lambda p, x, z: (scores(p, x), p.fc.weight * 2, F.relu(z)), 2, 2),
        (lambda p, x, z: (lambda y: (y, y, F.relu(y) + z))(scores(p, x)), 2, 1),
        (lambda p, x, z: (lambda y: (y, y.view(-1, 5, 1), F.relu(y) + z))(scores(p, x)), 2, 1),
        (lambda p, x, z: (lambda y: (y, torch.cumsum(y, 1), F.relu(y) + z))(scores(p, x)), 2, 1),
        (lambda p, x, z: (lambda y: (y, F.relu(y) + z))(scores(p, x)), 2, 2),
    ],
)  # fmt: skip
def test_inputs_and_outputs_bound_in_place(function: Callable[..., Any], inputs: int, outputs: int) -> None:
    """PyTorch's steps at either end, results that are inputs or constants, and duplicate results."""
    model, engine, program, _ = made(function, torch.randn(2, 8, 6, 6), torch.randn(2, 5))
    assert (len(program.plan.inputs_outside), len(program.plan.outputs_outside)) == (inputs, outputs)
    given = [(torch.randn(2, 8, 6, 6), torch.randn(2, 5)) for _ in range(3)]
    results = [engine(*each) for each in given]
    for each, found in zip(given, results, strict=True):
        check(found, model(*each))
    tensors = [t for each in (*given, *results) for t in (each if isinstance(each, tuple) else (each,))]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)


@torch.no_grad()
@pytest.mark.parametrize("function", [scores, lambda p, x: torch.cumsum(scores(p, torch.cumsum(x, 3)), 1)])
def test_calls_apart_write_nothing_that_others_do(function: Callable[..., Any]) -> None:
    model, engine, program, _ = made(function)
    x, other = torch.randn(2, 8, 6, 6), torch.randn(2, 8, 6, 6)
    engine(x)
    arena = program._values.arena
    arena.fill_(0xFF)
    (found,) = program.call_isolated([other])
    assert program._values.arena is arena and bool((arena == 0xFF).all())
    check(found, model(other))
    check(engine(x), model(x))


def test_calls_apart_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are zero before each call, wherever the plan's own memory is."""
    _, _, program, _ = made(scores)
    seen: list[dict[str, int]] = []
    counter = Workspace("tickets", 64, zeroed=True)
    program.plan.persistent["fc/tickets"] = counter  # type: ignore[index]
    program._memory.persistent["fc/tickets"] = own = counter.allocate(torch.device("cpu")).fill_(1)
    program._pointers.counters["fc/tickets"] = Watching(seen)  # type: ignore[index]
    program.call_isolated([torch.randn(2, 8, 6, 6)])
    first, last = (entry["address"] for entry in seen)
    assert first != last == own.data_ptr() and bool((own == 1).all())


class Watching:
    """Pointers to a counter."""

    def __init__(self, seen: list[dict[str, int]]) -> None:
        self._seen = seen

    def point(self, address: int) -> bool:
        self._seen.append({"address": address})
        return True


@pytest.mark.share(7)
@torch.no_grad()
@pytest.mark.parametrize("returned", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    ("function", "layout"),
    [(trunk, "nchw"), (many_steps, "flat"), (lambda p, x: many_steps(p, x).flatten(), "flat")],
)
def test_the_last_conversion_writes_the_result(
    function: Callable[..., Any], layout: str, returned: torch.dtype, dtype: str
) -> None:
    """In the model's own dtype and PyTorch's layout, whatever the plan's precision: no cast is left."""
    model, engine, program, _ = made(lambda p, x: function(p, x).to(returned), dtype=dtype)
    (output,) = program.plan.outputs_outside
    form = program.plan.forms[output]
    x = torch.randn(2, 8, 6, 6)
    found, written = engine(x), program._pointers.outside[output]._address
    assert (form.dtype, form.layout) == (returned, layout) and found.data_ptr() == written
    assert found.dtype == returned and found.is_contiguous()
    torch.testing.assert_close(found.float(), model(x).float(), rtol=2e-2, atol=2e-2)
