"""PyTorch's operators that give no view, but only move elements: where each of them goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from escalade.engine.nodes.lowering import Moved

Arguments = Mapping[str, Any]
Movement = Callable[[Arguments, torch.Tensor], Sequence[Moved] | None]
"""What the arguments of an operator, tensors without contents among them, move to such a result."""


def _several(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _roll(arguments: Arguments, result: torch.Tensor) -> Sequence[Moved] | None:
    """Two parts for each dimension that goes round."""
    x, shifts = arguments["self"], _several(arguments["shifts"])
    axes = [dim % x.dim() for dim in _several(arguments.get("dims"))]
    if len(axes) != len(shifts) or len({*axes}) != len(axes):  # all elements in a row, or one dimension twice
        return None
    pairs = [(x, result)]
    for axis, shift in zip(axes, shifts, strict=True):
        size = x.shape[axis]
        ahead = shift % size
        pairs = [
            (source.narrow(axis, first, length), target.narrow(axis, to, length))
            for source, target in pairs
            for first, to, length in ((0, ahead, size - ahead), (size - ahead, 0, ahead))
            if length
        ]
    return [Moved(*pair) for pair in pairs]


def _flip(arguments: Arguments, result: torch.Tensor) -> Sequence[Moved]:
    x = arguments["self"]
    return (Moved(x, result, tuple(dim % x.dim() for dim in _several(arguments["dims"]))),)


def _stack(arguments: Arguments, result: torch.Tensor) -> Sequence[Moved]:
    dim = arguments.get("dim", 0)
    return [Moved(one, result.select(dim, number)) for number, one in enumerate(arguments["tensors"])]


def _repeat(arguments: Arguments, result: torch.Tensor) -> Sequence[Moved]:
    """All of x, as often along each dimension as it says."""
    x, times = arguments["self"], _several(arguments["repeats"])
    x = x.reshape((1,) * (len(times) - x.dim()) + tuple(x.shape))
    for axis in reversed(range(len(times))):
        result = result.unflatten(axis, (times[axis], x.shape[axis]))
        x = x.unsqueeze(axis)
    return (Moved(x.expand(result.shape), result),)


def _repeat_interleave(arguments: Arguments, result: torch.Tensor) -> Sequence[Moved] | None:
    """Each element of a dimension several times in a row."""
    x, times, axis = arguments["self"], arguments.get("repeats"), arguments.get("dim")
    if not isinstance(times, int) or not isinstance(axis, int):
        return None
    axis %= x.dim()
    result = result.unflatten(axis, (x.shape[axis], times))
    return (Moved(x.unsqueeze(axis + 1).expand(result.shape), result),)


MOVEMENTS: Mapping[str, Movement] = {
    "roll": _roll,
    "flip": _flip,
    "stack": _stack,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
}
"""What each of PyTorch's operators moves, by its name."""
