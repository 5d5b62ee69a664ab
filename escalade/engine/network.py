"""What a model does with inputs of some sizes: the graph as it was captured, and what passes make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.graph.graph import Batch, Graph, fixed_shape
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.passes import optimize
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.constants import ConstantPool
from escalade.errors import UnsupportedError

Shapes = Sequence[tuple[int, ...]]
Others = Callable[[Shapes], Graph]
"""Gives the graph for inputs of other sizes."""


class Network:
    """A graph for any batch, or for those that it holds for, made ready for a dtype."""

    def __init__(
        self, captured: Graph, dtype: str, fusion: FusionLevel, device: torch.device, pool: ConstantPool
    ) -> None:
        """Constants are those of the `pool` where it has the same."""
        self.captured = captured
        self.output_types = tuple(getattr(torch, name) for name in captured.output_types)
        self._dtype, self._fusion, self._device, self._pool = dtype, fusion, device, pool
        self._optimised: dict[str, Graph] = {}

    def optimised(self, images: str) -> Graph:
        """The graph that plans are made of where images come so."""
        if images not in self._optimised:
            with own_arithmetic("fp32", self._device):
                graph = optimize(self.captured, self._dtype, self._fusion, images)
            self._pool.share(graph)
            self._optimised[images] = graph
        return self._optimised[images]

    def batch_of(self, shapes: Shapes) -> int | None:
        """The batch of inputs of these sizes; None if the network is for others. Without an item there are no results,
        where all of them are by items."""
        batch = self._counted(shapes)
        least, most = self.captured.batches
        if not batch:
            least = (
                0
                if all(0 in fixed_shape(self.captured.shape_of(name), 0) for name in self.captured.outputs)
                else 1
            )
        if batch < least or (most is not None and batch > most):
            return None
        wanted = [fixed_shape(given.shape, batch) for given in self.captured.inputs]
        return batch if wanted == [*map(tuple, shapes)] else None

    def refuse(self, shapes: Shapes) -> None:
        """Says why it is not for these."""
        batch = self._counted(shapes)
        for given, shape in zip(self.captured.inputs, shapes, strict=True):
            if tuple(shape) != fixed_shape(given.shape, batch):
                raise UnsupportedError(
                    f"{given.name} has shape {tuple(shape)}; the engine was compiled for {spell(given.shape)}. "
                    "Compile the model again for other sizes"
                )
        if not batch:
            raise UnsupportedError(
                "a batch of 0: there is nothing to run, and not all results are by items, so that there would be none"
            )
        least, most = self.captured.batches
        raise UnsupportedError(
            f"a batch of {batch}: the model does something else than for the batches of {least} to "
            f"{most or 'any size'} that it was compiled for. Compile it again with an example of this size"
        )

    def _counted(self, shapes: Shapes) -> int:
        batch = 1
        for given, shape in zip(self.captured.inputs, shapes, strict=True):
            if given.shape and isinstance(first := given.shape[0], Batch) and len(shape) == len(given.shape):
                batch = shape[0] // first.times
        return batch


def spell(shape: Sequence[object]) -> str:
    return "[" + ", ".join("batch" if isinstance(size, Batch) else str(size) for size in shape) + "]"


def call_of(graph: Graph) -> str:
    """What a call gives, as a reader wants to hear it: tensors by name and sizes, other values as they are."""
    inputs = [_Spelled(f"{given.name} {spell(given.shape)}") for given in graph.inputs]
    given, named = pytree.tree_unflatten(inputs, graph.arguments)
    return ", ".join([*map(repr, given), *(_by_name(name, value) for name, value in named.items())])


class _Spelled(str):
    """Words that are no text of the caller's, and stand without quotes."""

    __repr__ = str.__str__


def _by_name(name: str, value: Any) -> str:
    return repr(value) if isinstance(value, _Spelled) else f"{name}={value!r}"
