"""Deterministic calls: every batch is split into batches of one size, computed by the same plan.

An item's result then does not depend on the batch it is in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.engine.calls import Calls
from escalade.engine.graph.graph import Batch, Dimension, Graph, map_leaves
from escalade.engine.nodes.evaluate import compute, own_arithmetic
from escalade.engine.plan.program import OutTensors, PlanProgram, Tensors, copy_into
from escalade.errors import UnsupportedError

_TOLERANCE = 1e-3
"""Allowed difference relative to the largest result: PyTorch may round differently at another position in the batch."""
_SIZES = ("size", "shape", "sizes")
"""Arguments of PyTorch operators that give the shape of a result, and so may depend on the batch size."""


class FixedBatchCalls:
    """Computes a batch with the plan for batches of `size`. The last piece is padded by repeating its last item."""

    def __init__(self, calls: Calls, captured: Graph, size: int, batch: int) -> None:
        self.plan = calls.plan
        self._calls, self._size, self._batch = calls, size, batch
        self._rows_per_item = [_rows_per_item(entry.shape) for entry in captured.inputs]
        self._results = [_rows_per_item(captured.shape_of(name)) for name in captured.outputs]

    @property
    def program(self) -> PlanProgram:
        return self._calls.program

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        pieces = [
            self._calls.call(
                [
                    self._piece(tensor, times, first)
                    for tensor, times in zip(tensors, self._rows_per_item, strict=True)
                ]
            )
            for first in range(0, self._batch, self._size)
        ]
        results = [
            torch.cat(parts)[: times * self._batch]
            for parts, times in zip(zip(*pieces, strict=True), self._results, strict=True)
        ]
        return results if out is None else copy_into(out, results)

    def repack(self) -> None:
        self._calls.repack()

    def _piece(self, tensor: torch.Tensor, times: int, first: int) -> torch.Tensor:
        """Return the inputs of the batch that starts at item `first`; inputs without a batch are shared."""
        if not times:
            return tensor
        found = tensor[first * times : (first + self._size) * times]
        missing = self._size - len(found) // times
        return torch.cat([found, *[found[-times:]] * missing]) if missing else found


def _rows_per_item(shape: Sequence[Dimension]) -> int:
    """Return the number of rows per item of the batch; 0 if the shape has no batch."""
    return first.times if shape and isinstance(first := shape[0], Batch) else 0


def require_independent_items(graph: Graph) -> None:
    """Refuse a model whose results for an item depend on other items, on the batch size, or on its position."""
    for entry in graph.inputs:
        _require_items(entry.name, entry.shape, wanted=False)
    varying = {entry.name for entry in graph.inputs if _rows_per_item(entry.shape)}
    for node in graph:
        sizes = [value for name, value in node.attributes.get("arguments", {}).items() if name not in _SIZES]
        found: list[object] = []
        map_leaves(found.append, sizes)
        if any(isinstance(leaf, Batch) for leaf in found):
            raise UnsupportedError(f"{_ITEMS_ONLY}: {node.source or node.name} computes with the batch size")
        depends = not varying.isdisjoint(node.inputs.values())
        _require_items(node.source or node.name, node.shape, wanted=depends)
        if depends:
            varying.add(node.name)
    least, most = graph.batches
    if not varying or not set(graph.outputs) <= varying or least > 2 or (most is not None and most < 2):
        raise UnsupportedError(
            f"{_ITEMS_ONLY}: not all of its results have a batch dimension for every batch size"
        )
    _check_independence(graph)


_ITEMS_ONLY = "deterministic=True needs a model that computes every item of a batch independently"


def _require_items(name: str, shape: Sequence[Dimension], wanted: bool) -> None:
    if any(isinstance(size, Batch) for size in shape[1:]) or (wanted and not _rows_per_item(shape)):
        raise UnsupportedError(f"{_ITEMS_ONLY}: {name} combines several items")


def _check_independence(graph: Graph) -> None:
    """Run two items in both orders, and one next to an item of NaNs: its results must not change."""
    device = graph.device
    generator = torch.Generator().manual_seed(0)
    pair = [_random(entry.shape, entry.dtype, generator).to(device) for entry in graph.inputs]
    rows = [_rows_per_item(entry.shape) for entry in graph.inputs]
    swapped = [_swapped(tensor, times) for tensor, times in zip(pair, rows, strict=True)]
    spoiled = [_spoiled(tensor, times) for tensor, times in zip(pair, rows, strict=True)]
    results = [_run(graph, tensors) for tensors in (pair, swapped, spoiled)]
    for name, plain, other, next_to_nan in zip(graph.outputs, *results, strict=True):
        times = _rows_per_item(graph.shape_of(name))
        first, second = plain[:times], plain[times:]
        if not (
            _close(first, other[times:])
            and _close(second, other[:times])
            and _close(first, next_to_nan[:times])
        ):
            raise UnsupportedError(
                f"{_ITEMS_ONLY}: a result depends on other items or on the position in the batch"
            )


def _random(shape: Sequence[Dimension], dtype: str, generator: torch.Generator) -> torch.Tensor:
    """Return a batch of two items; integers are 0 or 1, so that they are valid as indices."""
    sizes = [2 * size.times if isinstance(size, Batch) else size for size in shape]
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        return torch.rand(sizes, generator=generator, device="cpu").to(kind)
    return torch.randint(0, 2, sizes, generator=generator, device="cpu").to(kind)


def _swapped(tensor: torch.Tensor, times: int) -> torch.Tensor:
    return torch.cat([tensor[times:], tensor[:times]]) if times else tensor


def _spoiled(tensor: torch.Tensor, times: int) -> torch.Tensor:
    """Replace the second item of a floating-point input by NaN."""
    if not times or not tensor.is_floating_point():
        return tensor
    return torch.cat([tensor[:times], torch.full_like(tensor[times:], torch.nan)])


def _run(graph: Graph, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    concrete = graph.at(2)
    values = dict(graph.constants)
    values |= {
        entry.name: tensor.float() if tensor.is_floating_point() else tensor
        for entry, tensor in zip(concrete.inputs, tensors, strict=True)
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
