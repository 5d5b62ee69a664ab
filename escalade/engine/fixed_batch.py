"""Calls in pieces of one batch size: every item is computed by the same plan, so that its result is the same in every
batch, whatever else is in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.engine.calls import Calls
from escalade.engine.graph.graph import Batch, Dimension, Graph, map_leaves
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.nodes.evaluate import compute
from escalade.engine.plan.program import OutTensors, PlanProgram, copy_into
from escalade.errors import UnsupportedError

_TOLERANCE = 1e-3
"""The part of the largest result up to which PyTorch may round in another way for an item in another place."""
_SIZES = ("size", "shape", "sizes")
"""Arguments of PyTorch's operators that say how large a result is."""


class Pieces:
    """Calls of a batch by the plan of another: in pieces of that size, the last one filled up with its last item."""

    def __init__(self, calls: Calls, captured: Graph, size: int, batch: int) -> None:
        self.plan = calls.plan
        self._calls, self._size, self._batch = calls, size, batch
        self._times = [_times(given.shape) for given in captured.inputs]
        self._results = [_times(captured.shape_of(name)) for name in captured.outputs]

    @property
    def program(self) -> PlanProgram:
        return self._calls.program

    def call(self, tensors: Sequence[torch.Tensor], out: OutTensors = None) -> list[torch.Tensor]:
        pieces = [
            self._calls.call(
                [
                    self._piece(tensor, times, first)
                    for tensor, times in zip(tensors, self._times, strict=True)
                ]
            )
            for first in range(0, self._batch, self._size)
        ]
        results = [
            torch.cat(parts)[: times * self._batch]
            for parts, times in zip(zip(*pieces, strict=True), self._results, strict=True)
        ]
        return results if out is None else copy_into(out, results)

    def _piece(self, tensor: torch.Tensor, times: int, first: int) -> torch.Tensor:
        """So many items from the first on; what has no items is the same for all."""
        if not times:
            return tensor
        found = tensor[first * times : (first + self._size) * times]
        missing = self._size - len(found) // times
        return torch.cat([found, *[found[-times:]] * missing]) if missing else found


def _times(shape: Sequence[Dimension]) -> int:
    """How many rows each item has; none: it is not by items."""
    return first.times if shape and isinstance(first := shape[0], Batch) else 0


def require_apart(graph: Graph) -> None:
    """Refuses a model whose items depend on each other, or on how many or which they are."""
    for given in graph.inputs:
        _require_items(given.name, given.shape, wanted=False)
    varying = {given.name for given in graph.inputs if _times(given.shape)}
    for node in graph:
        sizes = [value for name, value in node.attributes.get("arguments", {}).items() if name not in _SIZES]
        found: list[object] = []
        map_leaves(found.append, sizes)
        if any(isinstance(leaf, Batch) for leaf in found):
            raise UnsupportedError(
                f"{_REFUSED}: {node.source or node.name} computes with the number of items"
            )
        depends = not varying.isdisjoint(node.inputs.values())
        _require_items(node.source or node.name, node.shape, wanted=depends)
        if depends:
            varying.add(node.name)
    least, most = graph.batches
    if not varying or not set(graph.outputs) <= varying or least > 2 or (most is not None and most < 2):
        raise UnsupportedError(f"{_REFUSED}: its results are not by items for every batch")
    _try(graph)


_REFUSED = "deterministic=True is for models that treat every item of a batch by itself"


def _require_items(name: str, shape: Sequence[Dimension], wanted: bool) -> None:
    if any(isinstance(size, Batch) for size in shape[1:]) or (wanted and not _times(shape)):
        raise UnsupportedError(f"{_REFUSED}: {name} is of several of them")


def _try(graph: Graph) -> None:
    """Two items in either order, and one beside another that is not finite, have to give the same."""
    device = graph.device
    generator = torch.Generator().manual_seed(0)
    pair = [_random(given.shape, given.dtype, generator).to(device) for given in graph.inputs]
    rows = [_times(given.shape) for given in graph.inputs]
    swapped = [_swapped(tensor, times) for tensor, times in zip(pair, rows, strict=True)]
    spoiled = [_spoiled(tensor, times) for tensor, times in zip(pair, rows, strict=True)]
    results = [_run(graph, tensors) for tensors in (pair, swapped, spoiled)]
    for name, plain, other, beside in zip(graph.outputs, *results, strict=True):
        times = _times(graph.shape_of(name))
        first, second = plain[:times], plain[times:]
        if not (
            _close(first, other[times:]) and _close(second, other[:times]) and _close(first, beside[:times])
        ):
            raise UnsupportedError(f"{_REFUSED}: a result of this one depends on the others, or on its place")


def _random(shape: Sequence[Dimension], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Two items of inputs; those of whole numbers are small, and may be indices."""
    sizes = [2 * size.times if isinstance(size, Batch) else size for size in shape]
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.rand(sizes, generator=generator).to(kind)
    return torch.randint(0, 2, sizes, generator=generator).to(kind)


def _swapped(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return torch.cat([tensor[times:], tensor[:times]]) if times else tensor


def _spoiled(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """The second item without a number, where that can be said."""
    if not times or not tensor.is_floating_point():
        return tensor
    return torch.cat([tensor[:times], torch.full_like(tensor[times:], torch.nan)])


def _run(graph: Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    concrete = graph.at(2)
    values = dict(graph.constants)
    values |= {
        given.name: tensor.float() if tensor.is_floating_point() else tensor
        for given, tensor in zip(concrete.inputs, tensors, strict=True)
    }
    with own_arithmetic("fp32", graph.device):
        for node in concrete:
            read = {role: values[name] for role, name in node.inputs.items()}
            values[node.name] = compute(node, read, graph.device)
    return [values[name] for name in graph.outputs]


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    allowed = _TOLERANCE * float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=allowed)
