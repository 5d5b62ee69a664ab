"""The networks of an engine: captured graphs, one per set of input sizes that needed a capture of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.fixed_batch import require_independent_items
from escalade.engine.graph.graph import Batch, Graph, fixed_shape
from escalade.engine.nodes.evaluate import own_arithmetic
from escalade.engine.nodes.stem import normalizes_input
from escalade.engine.passes import optimize
from escalade.engine.plan.constants import ConstantPool
from escalade.engine.settings import Settings
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted

Shapes = Sequence[tuple[int, ...]]
GraphProvider = Callable[[Shapes], Graph]
"""Captures the graph for inputs of other sizes."""


class Network:
    """A captured graph, for the range of batch sizes that it is valid for, optimized for a dtype."""

    def __init__(self, captured: Graph, settings: Settings, pool: ConstantPool) -> None:
        if settings.fixed_batch is not None:
            require_independent_items(captured)
        self.captured = captured
        self._settings, self._pool = settings, pool
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
        with own_arithmetic("fp32", self._settings.device):
            return optimize(captured, self._settings.dtype, self._settings.fusion, images)

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


_IMAGE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class Networks:
    """The network that was compiled, and those captured later for other sizes; they share constants."""

    def __init__(self, graph: Graph, settings: Settings, graph_provider: GraphProvider | None) -> None:
        self._settings = settings
        self._graph_provider = graph_provider
        self.pool = ConstantPool()
        self.first = Network(graph, settings, self.pool)
        self.known = [self.first]
        """The first network, and those with cached plans."""

    def retain(self, used: Iterable[Network]) -> None:
        """Drop all networks but these and the first."""
        self.known = [*dict.fromkeys((self.first, *used))]

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[Network, int]:
        """Check the inputs, and return the network for them and their batch size."""
        if len(tensors) != len(self.first.captured.inputs):
            raise UnsupportedError(
                f"{counted(len(tensors), 'tensor')} passed; the engine takes {len(self.first.captured.inputs)}"
            )
        for entry, tensor in zip(self.first.captured.inputs, tensors, strict=True):
            if tensor.device.type != self._settings.device.type:
                raise UnsupportedError(
                    f"{entry.name} is on {tensor.device}, the engine runs on "
                    f"{'the twin (CPU tensors)' if self._settings.on_twin else self._settings.device}; move it there"
                )
            if tensor.device != tensors[0].device:
                raise UnsupportedError(
                    f"the inputs are on {tensors[0].device} and {tensor.device}; they must be on one device"
                )
            if tensor.dim() != len(entry.shape):
                self.first.raise_unsupported([tuple(each.shape) for each in tensors])
            self._check_type(entry.name, entry.dtype, tensor)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        for network in self.known:
            if (batch := network.batch_of(shapes)) is not None:
                return network, batch
        return self._capture(shapes)

    def _capture(self, shapes: Shapes) -> tuple[Network, int]:
        """Capture a network for new input sizes."""
        if self._graph_provider is None:
            self.first.raise_unsupported(shapes)
        assert self._graph_provider is not None
        try:
            network = Network(self._graph_provider(shapes), self._settings, self.pool)
        except UnsupportedError as error:
            names = (entry.name for entry in self.first.captured.inputs)
            passed = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
            raise UnsupportedError(
                f"the model was compiled with {format_call(self.first.captured)} and cannot be compiled with {passed}: "
                f"{error}"
            ) from error
        batch = network.batch_of(shapes)
        assert batch is not None, "it was captured for these shapes"
        self.known = [*self.known, network]
        return network, batch

    def _check_type(self, name: str, expected: str, tensor: torch.Tensor) -> None:
        wanted = getattr(torch, expected)
        if not wanted.is_floating_point:
            if tensor.dtype != wanted:
                raise UnsupportedError(f"{name} is {tensor.dtype}; pass {wanted} as the model takes")
            return
        if tensor.dtype == torch.uint8 and not any(
            node.inputs.get("x") == name and normalizes_input(node) for node in self.first.optimized("nchw")
        ):
            raise UnsupportedError(
                f"{name} is uint8; compile the model with normalize=(mean, std) to pass uint8 images"
            )
        if tensor.dtype not in _IMAGE_TYPES:
            raise UnsupportedError(
                f"{name} is {tensor.dtype}; engines support float32, float16, bfloat16 and uint8 inputs"
            )
