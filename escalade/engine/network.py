"""A captured graph for one set of input sizes, and its optimized versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.graph.graph import Batch, Graph, fixed_shape
from escalade.engine.nodes.evaluate import own_arithmetic
from escalade.engine.passes import FusionLevel, optimize
from escalade.engine.plan.constants import ConstantPool
from escalade.errors import UnsupportedError

Shapes = Sequence[tuple[int, ...]]
GraphProvider = Callable[[Shapes], Graph]
"""Captures the graph for inputs of other sizes."""


class Network:
    """A captured graph, for the range of batch sizes that it is valid for, optimized for a dtype."""

    def __init__(
        self, captured: Graph, dtype: str, fusion: FusionLevel, device: torch.device, pool: ConstantPool
    ) -> None:
        self.captured = captured
        self.output_types = tuple(getattr(torch, name) for name in captured.output_types)
        self._dtype, self._fusion, self._device, self._pool = dtype, fusion, device, pool
        self._optimized: dict[str, Graph] = {}

    def optimized(self, images: str) -> Graph:
        """Return the optimized graph for input images in this layout (`nchw` or `nhwc`)."""
        if images not in self._optimized:
            graph = self.optimize(self.captured, images)
            self._pool.share(graph)
            self._optimized[images] = graph
        return self._optimized[images]

    @property
    def known_layouts(self) -> tuple[str, ...]:
        """Layouts of input images that the graph has been optimized for."""
        return tuple(self._optimized)

    def optimize(self, captured: Graph, images: str) -> Graph:
        """Optimize the captured graph, or the same graph with other weights."""
        with own_arithmetic("fp32", self._device):
            return optimize(captured, self._dtype, self._fusion, images)

    def batch_of(self, shapes: Shapes) -> int | None:
        """Return the batch size of inputs of these shapes, or None if the network does not cover them.

        An empty batch is covered if every result is empty, too.
        """
        batch = self._batch_size(shapes)
        least, most = self.captured.batches
        if not batch:
            least = (
                0
                if all(0 in fixed_shape(self.captured.shape_of(name), 0) for name in self.captured.outputs)
                else 1
            )
        if batch < least or (most is not None and batch > most):
            return None
        wanted = [fixed_shape(entry.shape, batch) for entry in self.captured.inputs]
        return batch if wanted == [*map(tuple, shapes)] else None

    def raise_unsupported(self, shapes: Shapes) -> None:
        """Raise UnsupportedError with the reason why the network does not cover these shapes."""
        batch = self._batch_size(shapes)
        for entry, shape in zip(self.captured.inputs, shapes, strict=True):
            if tuple(shape) == fixed_shape(entry.shape, batch):
                continue
            expected = format_shape(entry.shape)
            if len(shape) == len(entry.shape) - 1 and isinstance(entry.shape[0], Batch):
                raise UnsupportedError(
                    f"{entry.name} has shape {tuple(shape)}, without the batch dimension of {expected}; add it with "
                    f"{entry.name}.unsqueeze(0)"
                )
            if self.captured.is_trusted:
                raise UnsupportedError(
                    f"{entry.name} has shape {tuple(shape)}; the engine was compiled for {expected}. Compile the model "
                    "again for other sizes"
                )
            raise UnsupportedError(
                f"{entry.name} has shape {tuple(shape)}; this engine comes from a file, which serves {expected} for "
                f"{self._batch_range}. Only compile captures a model for other sizes"
            )
        if not batch:
            raise UnsupportedError(
                "batch size 0: not every result has a batch dimension, so there is no empty result"
            )
        raise UnsupportedError(
            f"batch size {batch}: this graph was specialized for {self._batch_range}; recompile with an example of "
            "this size"
        )

    @property
    def _batch_range(self) -> str:
        least, most = self.captured.batches
        if not self.captured.is_batched:
            return "this batch size"
        return f"batch sizes {f'{least} to {most}' if most else f'>= {least}'}"

    def _batch_size(self, shapes: Shapes) -> int:
        batch = 1
        for entry, shape in zip(self.captured.inputs, shapes, strict=True):
            if entry.shape and isinstance(first := entry.shape[0], Batch) and len(shape) == len(entry.shape):
                batch = shape[0] // first.times
        return batch


def format_shape(shape: Sequence[object]) -> str:
    return "[" + ", ".join("batch" if isinstance(size, Batch) else str(size) for size in shape) + "]"


def format_call(graph: Graph) -> str:
    """Return the arguments of a call as text: tensors by name and shape, other values by their repr."""
    inputs = [_Unquoted(f"{entry.name} {format_shape(entry.shape)}") for entry in graph.inputs]
    positional, keywords = pytree.tree_unflatten(inputs, graph.arguments)
    return ", ".join([*map(repr, positional), *(_format_keyword(*item) for item in keywords.items())])


class _Unquoted(str):
    """A description of a tensor, printed without quotes among the reprs of other arguments."""

    __repr__ = str.__str__


def _format_keyword(name: str, value: Any) -> str:
    return repr(value) if isinstance(value, _Unquoted) else f"{name}={value!r}"
