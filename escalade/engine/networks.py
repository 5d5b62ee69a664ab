"""The networks of an engine, one per set of input sizes that needed a capture of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from escalade.engine.fixed_batch import require_independent_items
from escalade.engine.graph.graph import Graph
from escalade.engine.network import GraphProvider, Network, Shapes, format_call
from escalade.engine.nodes.stem import normalizes_input
from escalade.engine.plan.constants import ConstantPool
from escalade.engine.settings import Settings
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted

_IMAGE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class Networks:
    """The network that was compiled, and those captured later for other sizes; they share constants."""

    def __init__(self, graph: Graph, settings: Settings, graph_provider: GraphProvider | None) -> None:
        self._settings = settings
        self._graph_provider = graph_provider
        self.pool = ConstantPool()
        self.first = self._network(graph)
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
            network = self._network(self._graph_provider(shapes))
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

    def _network(self, graph: Graph) -> Network:
        if self._settings.fixed_batch is not None:
            require_independent_items(graph)
        settings = self._settings
        return Network(graph, settings.dtype, settings.fusion, settings.device, self.pool)

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
