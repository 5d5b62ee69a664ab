"""Calls from Python: one-time preparations, and the fast path past PyTorch's dispatcher."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from escalade import models, ops
from escalade.device.recipe import Recipe, Workspace
from escalade.device.run import Executable
from escalade.device.torch_private import FAST_PATHS, FastPaths, lookup
from escalade.errors import UnsupportedError
from escalade.ops.calling import call, casting, executables, operator
from escalade.ops.calling.casting import cast_parameter
from escalade.ops.calling.executables import PreparedRung, per_thread, prepare_rung
from escalade.ops.conv2d.op import OPERATOR
from escalade.ops.relu import OPERATOR as RELU
from tests.bench.fake import Scale, ScaleProblem, rung


@pytest.fixture
def by_pointers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls take the GPU's code path, but over the twin's launches: only pointers are set."""
    monkeypatch.setattr(Executable, "supports_pointer_updates", property(lambda self: True))
    monkeypatch.setattr(FAST_PATHS, "current_stream", lambda _: 0)
    monkeypatch.setattr(FAST_PATHS, "is_capturing", lambda: False)
    monkeypatch.setattr(per_thread, "calls", {})
    monkeypatch.setattr(per_thread, "guarded", {})


def tensors(last: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight, bias = torch.randn(2, 8, 6, 6), torch.randn(8, 8, 3, 3), torch.randn(8)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, weight, bias


@pytest.mark.parametrize("last", [False, True])
def test_a_call_again_gives_what_the_first_would(last: bool, by_pointers: None) -> None:
    for _ in range(3):
        x, weight, bias = tensors(last)
        expected = F.conv2d(x, weight, bias, padding=1)
        torch.testing.assert_close(ops.conv2d(x, weight, bias, padding=1), expected, rtol=1e-3, atol=1e-3)
        shifted = torch.cat((x.new_zeros(1), x.permute(0, 2, 3, 1).reshape(-1)))[1:]
        apart = shifted.view(2, 6, 6, 8).permute(0, 3, 1, 2)  # misaligned to 16 bytes
        torch.testing.assert_close(ops.conv2d(apart, weight, bias, padding=1), expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            ops.conv2d(x, weight, padding=(1, 1)), F.conv2d(x, weight, padding=1), rtol=1e-3, atol=1e-3
        )


def test_a_guard_tells_what_is_absent_and_what_is_too_much(by_pointers: None) -> None:
    x, weight, bias = tensors()
    for given in (None, None, None, bias, bias, bias, None):
        expected = F.conv2d(x, weight, given)
        torch.testing.assert_close(ops.conv2d(x, weight, given), expected, rtol=1e-3, atol=1e-3)
    rows, square = x[:, :, 0, 0].contiguous(), weight[:, :, 0, 0].contiguous()
    for _ in range(3):
        ops.mlp(rows, [square, bias], "8-8b")
    with pytest.raises(UnsupportedError, match="3 parameters"):
        ops.mlp(rows, [square, bias, bias], "8-8b")
    with pytest.raises(UnsupportedError, match=r"bias0 has shape \(7,\)"):
        ops.mlp(rows, [square, bias[:7]], "8-8b")


def test_nothing_is_planned_twice(monkeypatch: pytest.MonkeyPatch, by_pointers: None) -> None:
    x, weight, bias = tensors()
    for _ in range(2):
        ops.conv2d(x, weight, bias)

    def never(*_: object) -> None:
        raise AssertionError("this was made ready before")

    monkeypatch.setattr(OPERATOR, "_plan", never)
    monkeypatch.setattr(OPERATOR, "_packet", never)
    monkeypatch.setattr(OPERATOR, "_unguarded", never)
    y = ops.conv2d(torch.randn_like(x), torch.randn_like(weight), bias.clone())
    assert y.shape == (2, 8, 4, 4)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w, b: ops.conv2d(x, w, b, padding=1, relu=True),
        lambda x, w, b: ops.linear(ops.max_pool2d(x, 2).flatten(1), w.view(8, 72), b),
        lambda x, w, b: ops.cross_entropy(ops.upsample2d(ops.relu(x), 12).mean((2, 3)), b[:2].long() * 0),
        lambda x, w, b: ops.mse_loss(ops.avg_pool2d(x, 3), torch.zeros(2, 8, 2, 2)),
    ],
)
def test_gradients_are_those_of_the_dispatchers_way(layer, by_pointers: None) -> None:  # type: ignore[no-untyped-def]
    given = [tensor.requires_grad_() for tensor in tensors(last=True)]
    found = []
    for _ in range(3):
        y = layer(*given)
        found.append([y, *torch.autograd.grad(y.sum(), given, allow_unused=True)])
    for again in found[1:]:
        for one, other in zip(found[0], again, strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
    assert found[0][0].grad_fn.name() != found[-1][0].grad_fn.name(), "the last went the short way"


def test_threads_have_calls_of_their_own(by_pointers: None) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            x = torch.full((64,), float(number))
            if not torch.equal(ops.relu(x), x):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Noting(TorchDispatchMode):
    """Records the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Another mode, which may change results of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[object] = []

    def note(self, *arguments: object) -> None:
        self.seen += arguments

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_counters_are_kept_for_a_stream_but_not_for_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, capturing = 7, False
    monkeypatch.setattr(FAST_PATHS, "current_stream", lambda _: stream)
    monkeypatch.setattr(FAST_PATHS, "is_capturing", lambda: capturing)
    prepared = PreparedRung(None, Executable(Recipe(()), torch.device("cpu")))
    counters = Workspace("counters", 64, zeroed=True)
    first = prepared.zeroed(counters)
    assert not first.any() and prepared.zeroed(counters) is first
    capturing = True
    assert prepared.zeroed(counters) is not first
    stream, capturing = 8, False
    assert prepared.zeroed(counters) is not first
    assert prepared.zeroed(large := Workspace("large", 2**21, zeroed=True)) is not prepared.zeroed(large)


def test_workspaces_of_a_call_do_not_overlap() -> None:
    rooms = [Workspace(str(size), size) for size in (300, 0, 1, 256, 70)]
    places, end = call._offsets(rooms)
    assert list(places.values()) == [0, 512, 512, 768, 1024] and end == 1280


def test_executables_are_made_ready_once_for_each_operation_problem_rung_and_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Recipe, torch.device]] = []
    monkeypatch.setattr(executables, "Executable", lambda recipe, device, _: made.append((recipe, device)))
    monkeypatch.setattr(per_thread, "prepared", {})
    first, second = (Scale(rung("plain", slip=slip), rung("other", slip=slip + 1.0)) for slip in (1.0, 3.0))
    small, large, cpu = ScaleProblem(8), ScaleProblem(16), torch.device("cpu")
    for _ in range(2):
        for operation, problem, name in (
            (first, small, None),
            (first, small, "plain"),
            (first, small, "other"),
            (first, large, "other"),
            (second, small, "other"),
        ):
            prepare_rung(operation, problem, cpu, name)
    prepare_rung(first, small, torch.device("meta"), "other")
    recipes = [recipe for recipe, _ in made]
    assert len(made) == 6 and recipes[0] == recipes[1] and recipes[2] == recipes[5]
    assert len(set(recipes[1:5])) == 4 and [device.type for _, device in made] == ["cpu"] * 5 + ["meta"]


def test_negative_views_are_left_to_the_dispatcher(by_pointers: None) -> None:
    for x in (torch.randn(4, 4), torch._neg_view(torch.randn(4, 4))):
        for _ in range(4):  # the third call uses the fast path, if there is one
            assert torch.equal(ops.relu(x), x.relu())


def test_what_a_thread_keeps_ready_is_bounded(monkeypatch: pytest.MonkeyPatch, by_pointers: None) -> None:
    monkeypatch.setattr(executables, "_MAX_EXECUTABLES", 2)
    known: dict[tuple[Any, ...], int] = {}
    for number in range(4):
        executables.keep(known, (number,), number)
    assert list(known) == [(2,), (3,)], "the oldest goes first"
    monkeypatch.setattr(operator, "_MAX_KINDS", 2)
    for axes in ((0, 1), (1, 0), (0, 1), (1, 0)):
        for base in (torch.randn(4, 4), torch.randn(4, 8)[:, :4]):
            x = base.permute(axes)
            for _ in range(3):
                assert torch.equal(ops.relu(x), x.relu())
    assert max(map(len, per_thread.guarded.values())) == 2


def test_modes_and_other_devices_are_left_to_the_dispatcher() -> None:
    x = torch.randn(8)
    for _ in range(3):
        ops.relu(x)
    assert ops.relu(x.to("meta")).is_meta
    assert torch.equal(ops.relu(torch._neg_view(x)), (-x).relu())
    with Noting() as noted:
        ops.relu(x)
    assert torch.ops.escalade.relu.default in noted.seen
    with (
        torch.device("meta"),
        patch.object(RELU, "_packet", None),
    ):  # of new tensors; this creates none
        assert ops.relu(x).device == x.device
    with torch.device("meta"), Functions() as functions, patch.object(RELU, "_packet", functions.note):
        assert ops.relu(x) is None and functions.seen


def test_parameters_are_cast_once_a_step_and_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    used, unused = (torch.nn.Parameter(torch.randn(8, 8)) for _ in range(2))
    copied: list[int] = []
    together = casting._cast_together

    def noted(changed: Sequence[Any], dtype: torch.dtype, passes: int) -> None:
        copied.append(len(changed))
        together(changed, dtype, passes)

    monkeypatch.setattr(casting, "_cast_together", noted)
    monkeypatch.setattr(casting.thread_casts, "known", {})
    to = torch.bfloat16
    held = [cast_parameter(used, to), cast_parameter(unused, to)]
    assert cast_parameter(used, to) is held[0] and copied == [1, 1]
    for expected in (2, 1):  # operators without a call are freed
        with torch.no_grad():
            used.mul_(2)
            unused.mul_(2)
        held.append(cast_parameter(used, to))
        assert torch.equal(held[-1], used.to(to)) and copied.pop() == expected
    gone = [torch.utils.weak.TensorWeakRef(one) for one in held]
    del held
    gc.collect()
    assert [one() for one in gone] == [None] * 4, "nothing outlives its graph"
    cast_parameter(unused, to)
    with torch.no_grad():
        used.mul_(2)
        unused.mul_(2)
    cast_parameter(used, to)
    unused.data.mul_(2)  # no version counter shows it
    casting.thread_casts.passes[0] += 1
    assert torch.equal(cast_parameter(unused, to), unused.to(to)), (
        "a backward pass has come by since it was cast"
    )
    del unused
    gc.collect()
    assert len(casting.thread_casts.known) == 1


def test_a_parameter_is_cast_again_when_it_changes_without_a_new_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(casting.thread_casts, "known", {})
    parameter, to = torch.nn.Parameter(torch.randn(8, 8)), torch.bfloat16

    def move() -> None:
        parameter.data = parameter.data * 2

    def give_gradient() -> None:
        parameter.grad = torch.ones(8, 8)
        parameter.data.mul_(2)

    def change_gradient() -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2)
        parameter.data.mul_(2)

    for change in (move, give_gradient, change_gradient):
        held, version = cast_parameter(parameter, to), parameter._version
        change()
        again = cast_parameter(parameter, to)
        assert parameter._version == version and torch.equal(again, parameter.to(to)) and again is not held


def test_parameters_of_another_dtype_device_or_stream_are_not_cast_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(casting.thread_casts, "known", {})
    used, *others = (torch.nn.Parameter(torch.randn(2)) for _ in range(5))
    bf16, cpu = torch.bfloat16, torch.device("cpu")
    places = ((bf16, cpu, 0), (torch.half, cpu, 0), (bf16, torch.device("meta"), 0), (bf16, cpu, 1))
    for other, place in zip(others, places, strict=True):
        casting.thread_casts.known[id(other), place[0], place[2]] = casting._CachedCast(
            weakref.ref(other), *place
        )
    together = casting._used_and_changed(casting._CachedCast(weakref.ref(used), bf16, cpu, 0))
    assert [parameter is others[0] for parameter, _, _ in together] == [True]


def test_derivatives_under_autocast_are_those_of_the_dispatchers_way(by_pointers: None) -> None:
    x, weight, bias = tensors(last=True)
    x = x.requires_grad_()
    weight, bias = torch.nn.Parameter(weight / 9), torch.nn.Parameter(bias)
    found = []
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            y = ops.conv2d(x, weight, bias, padding=1)
            y = ops.conv2d(y, weight, bias, padding=1, relu=True)
        assert y.dtype == torch.bfloat16
        first = torch.autograd.grad(y.float().square().sum(), (x, weight, bias), create_graph=True)
        further = torch.autograd.grad(torch.cat([one.flatten() for one in first]).norm(), (x, weight, bias))
        assert {one.dtype for one in (*first, *further)} == {torch.float32}
        found.append([y, *first, *further])
    assert len({y.grad_fn.name() for y, *_ in found if y.grad_fn}) == 2, "the last went the short way"
    for one, again in zip(found[0], found[-1], strict=True):  # sums over several uses are rounded elsewhere
        assert (one - again).norm() < 0.02 * one.norm()


def test_lists_of_parameters_are_cast_under_autocast(by_pointers: None) -> None:
    x = torch.randn(5, 4)
    weight, bias = torch.nn.Parameter(torch.randn(3, 4)), torch.nn.Parameter(torch.randn(3))
    narrow = [one.detach().bfloat16().requires_grad_() for one in (weight, bias)]
    y = ops.mlp(x.bfloat16(), narrow, "4-3br")
    expected = [y, *torch.autograd.grad(y.float().square().sum(), narrow)]
    names = set()
    for _ in range(4):
        with torch.autocast("cpu", torch.bfloat16):
            y = ops.mlp(x, [weight, bias], "4-3br")
        assert y.grad_fn is not None
        names.add(y.grad_fn.name())
        found = [y, *torch.autograd.grad(y.float().square().sum(), (weight, bias))]
        assert [one.dtype for one in found] == [torch.bfloat16, torch.float32, torch.float32]
        torch.testing.assert_close(found, [y, *(one.float() for one in expected[1:])])
        torch.testing.assert_close(y, expected[0])
    assert len(names) == 2, "the last went the short way"


def test_a_chain_that_is_ready_trains_without_the_dispatcher(by_pointers: None) -> None:
    """Once calls are prepared, little Python runs in forward and backward."""
    torch.manual_seed(0)
    model = models.FusedSpectralAutoencoder(8, 2, 4)
    x = torch.randn(3, 16)
    for _ in range(4):
        model.anomaly_score(x).sum().backward()
    seen: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        folders = "/escalade/ops/", "/escalade/models/"  # and not the twin's, which runs kernels in Python
        if event == "call" and any(folder in frame.f_code.co_filename for folder in folders):
            seen.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        score = model.anomaly_score(x)
        score.sum().backward()
    finally:
        sys.setprofile(None)
    assert score.grad_fn is not None and score.grad_fn.name() == "mlp_recordedBackward"
    assert "_unguarded" not in seen and "run" not in seen and len(seen) < 40, seen


def test_without_words_that_are_not_public_calls_are_slower_and_not_wrong(
    monkeypatch: pytest.MonkeyPatch, by_pointers: None
) -> None:
    x, weight, bias = (tensor.requires_grad_() for tensor in tensors(last=True))

    def found() -> list[torch.Tensor]:
        y = ops.relu(ops.conv2d(x, weight, bias, padding=1))
        return [y, *torch.autograd.grad(y.square().sum(), (x, weight, bias))]

    expected = found()
    lacking = FastPaths(lambda path: None)
    # Without these, it is unknown whether the dispatcher can be bypassed; the others are tested with them too.
    needed = {name: getattr(FAST_PATHS, name) for name in ("function_modes", "dispatch_modes", "transforms")}
    for there in (needed, {}):
        for name, value in {**vars(lacking), **there}.items():
            if name not in ("current_stream", "is_capturing"):
                monkeypatch.setattr(FAST_PATHS, name, value)
        monkeypatch.setattr(FAST_PATHS, "recording", partial(FastPaths.recording, lacking))
        monkeypatch.setattr(per_thread, "calls", {})
        monkeypatch.setattr(per_thread, "guarded", {})
        for _ in range(3):
            again = found()
            assert all(torch.equal(one, other) for one, other in zip(expected, again, strict=True))
        assert bool(per_thread.guarded) == bool(there)


def test_words_that_mean_something_else_are_not_taken() -> None:
    def other(*_: object, **__: object) -> object:
        return torch.empty(1)

    odd = FastPaths(lambda path: other if "guards" in path else lookup(path))
    x = torch.randn(3, 3).t()  # its transpose has the same size: only strides tell them apart
    made = odd.allocator(x.device)(x.shape, x.stride(), torch.float16)
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), torch.float16)
    for words in (odd, FAST_PATHS):
        one, both = words.guard([x]), words.guard([x, x])
        assert one(x.clone()) and both(x, x) and both(x, x.clone())
        others = (x.half(), x.t(), x.clone().requires_grad_(), torch._neg_view(x), x.to("meta"), x[:1])
        assert not any(one(other) or both(x, other) for other in others)


def test_the_short_way_asks_for_what_pytorch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are private PyTorch APIs; without them calls would be slow."""
    assert not FAST_PATHS.dispatch_modes() and not FAST_PATHS.function_modes() and not FAST_PATHS.transforms()
    x = torch.randn(2, 3)
    assert FAST_PATHS.guard([x]).__name__ == "check"
    monkeypatch.setattr(FastPaths, "_python_guard", None)
    assert FAST_PATHS.guard([x, x])(x, x), "PyTorch's guards, one for each place of the tensor"
    assert FAST_PATHS.allocator(x.device).__name__ == "_empty_strided_cpu"
    assert FAST_PATHS.is_negative is not torch.Tensor.is_neg
    assert FastPaths(lambda path: None).is_negative is torch.Tensor.is_neg
