"""Every public operator with strided tensors: its kernels get the same bytes as with packed ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from escalade import ops
from escalade.device.strides import layout_of, packed
from escalade.errors import UnsupportedError
from escalade.ops.calling import executables
from tests.ops.misuse import RIGHT
from tests.strides import cases

IN_ANY_ORDER = {
    "add", "attention", "mse_loss", "optimizer_step", "pointwise", "pointwise_loss", "pointwise_loss_with_gradient",
    "quantise", "relu", "relu_",
}  # fmt: skip
"""Pointwise operators, which kernels compute in memory order, and those that read strided tensors in place: compared by
their results."""
WRITES = ("relu_", "optimizer_step")
"""Operators that write to their arguments, and may refuse gaps or overlapping elements."""
_SMALL = 7
"""Cases per argument, of about sixty."""


class _Recorded:
    """An executable that records the memory of its kernels' arguments, and launches nothing."""

    launched: list[dict[str, bytes]]
    supports_pointer_updates = False

    def __init__(self, recipe: Any, device: torch.device, label: str = "") -> None:
        self.recipe, self.device = recipe, device
        self._tensors: dict[str, Any] = {}

    def bind(self, tensors: dict[str, Any]) -> None:
        self._tensors = tensors

    def __call__(self) -> None:
        type(self).launched.append(
            {name: _memory(one) for name, one in self._tensors.items() if one is not None}
        )

    def release(self) -> None:
        self._tensors = {}


def _memory(tensor: torch.Tensor) -> bytes:
    """The bytes from the tensor's address on, for its number of elements."""
    assert tensor.data_ptr() % 16 == 0
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, bytes]]]:
    """Return the bytes that kernels would read; unwritten memory is the same each time."""
    _Recorded.launched = []
    monkeypatch.setattr(executables, "Executable", _Recorded)
    monkeypatch.setattr(executables, "per_thread", fresh := executables.PerThread())
    monkeypatch.setattr("escalade.ops.calling.operator.per_thread", fresh)
    torch._C._set_deterministic_algorithms(True)  # the public function imports a compiler, for seconds
    yield _Recorded.launched
    torch._C._set_deterministic_algorithms(False)


@pytest.mark.parametrize("name", sorted(RIGHT.keys() - IN_ANY_ORDER))
def test_kernels_are_given_the_same_bytes(name: str, launches: list[dict[str, bytes]], seed: int) -> None:
    function, right = getattr(ops, name), RIGHT[name]
    for argument, tensor in _tensors(right):
        dtype, positive = tensor.dtype, "var" in argument
        every = list(cases(tensor.shape, seed, dtype=dtype, positive=positive))
        for what, given in random.Random(seed).sample(every, min(_SMALL, len(every))):
            plain = packed(given, layout_of(given)).clone()
            found: list[list[dict[str, bytes]]] = []
            for one in (plain, given):
                launches.clear()
                try:
                    function(**_replaced(right, argument, one))
                except UnsupportedError as error:
                    assert name in WRITES and one is given, error
                    found.append(found[0])
                else:
                    found.append([*launches])
            assert found[0] == found[1], f"{name}, {argument} with {what}"
            assert found[0], "nothing was launched"


@pytest.mark.parametrize("name", sorted(IN_ANY_ORDER))
def test_results_are_those_of_packed_tensors(name: str, seed: int) -> None:
    check_results(name, torch.device("cpu"), seed, _SMALL)


def test_results_of_pointwise_may_be_called_as_its_tensors_are() -> None:
    y, y1 = torch.randn(4, 8), torch.randn(4, 8)
    found = ops.pointwise("y - y1, y * y1", y=y, y1=y1)
    torch.testing.assert_close(found, (y - y1, y * y1))


def check_results(name: str, device: torch.device, seed: int, most: int) -> None:
    """Check that an operator returns the same for strided tensors as for packed ones, or refuses to write to them."""
    function = getattr(ops, name)
    right = torch.utils._pytree.tree_map(
        lambda one: one.to(device) if isinstance(one, torch.Tensor) else one, RIGHT[name]
    )
    for argument, tensor in _tensors(right):
        positive = "var" in argument
        every = list(cases(tensor.shape, seed, dtype=tensor.dtype, device=device, positive=positive))
        for what, given in random.Random(seed).sample(every, min(most, len(every))):
            plain = given.clone(memory_format=torch.contiguous_format)
            expected = _results(function, right, argument, plain)
            try:
                found = _results(function, right, argument, given)
            except UnsupportedError:
                assert name in WRITES and (given.is_neg() or not given.is_contiguous()), what
                continue
            note = partial("{} with {}: {}".format, argument, what)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True, msg=note)


def _results(function: Any, right: dict[str, Any], argument: str, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a call and the contents of its arguments afterwards."""
    arguments = _replaced(right, argument, tensor)
    returned = function(**arguments)
    left = [one for _, one in _tensors(arguments)]
    return [one.float() for one in torch.utils._pytree.tree_leaves([returned, left]) if one is not None]


def _tensors(arguments: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a call, or the first of a list of them."""
    for argument, value in arguments.items():
        one = value[0] if isinstance(value, list) else value
        if isinstance(one, torch.Tensor) and one.dim():
            yield argument, one


def _replaced(arguments: dict[str, Any], argument: str, tensor: torch.Tensor) -> dict[str, Any]:
    replaced = copy.deepcopy(arguments)
    replaced[argument] = [tensor] if isinstance(arguments[argument], list) else tensor
    return replaced
