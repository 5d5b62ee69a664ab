"""The networks of an engine: what the model does with inputs of each kind of sizes that has come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from escalade.engine.fixed_batch import require_apart
from escalade.engine.graph.graph import Graph
from escalade.engine.network import Network, Others, Shapes, call_of
from escalade.engine.nodes import operator_of
from escalade.engine.plan.constants import ConstantPool
from escalade.engine.settings import Settings
from escalade.errors import UnsupportedError

_IMAGE_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)


class Networks:
    """The network that was captured, and those for other sizes, of which constants are shared."""

    def __init__(self, graph: Graph, settings: Settings, others: Others | None) -> None:
        """Sizes that the graph is not for are asked of `others`."""
        self._settings = settings
        self._others = others
        self.pool = ConstantPool()
        self.first = self._network(graph)
        self.known = [self.first]
        """The first, and those that there are plans of."""

    def keep(self, used: Iterable[Network]) -> None:
        """Lets go of all but these and the first."""
        self.known = [*dict.fromkeys((self.first, *used))]

    def of(self, tensors: Sequence[torch.Tensor]) -> tuple[Network, int]:
        """What the model does with inputs that the engine can take, and their batch size."""
        if len(tensors) != len(self.first.captured.inputs):
            raise UnsupportedError(
                f"{len(tensors)} tensors; the engine takes {len(self.first.captured.inputs)}"
            )
        for given, tensor in zip(self.first.captured.inputs, tensors, strict=True):
            if tensor.device.type != self._settings.device.type:
                raise UnsupportedError(
                    f"{given.name} is on {tensor.device}, the engine runs on "
                    f"{'the twin (CPU tensors)' if self._settings.on_twin else self._settings.device}; move it there"
                )
            if tensor.device != tensors[0].device:
                raise UnsupportedError(
                    f"the inputs are on {tensors[0].device} and {tensor.device}; they must be on one device"
                )
            if tensor.dim() != len(given.shape):
                self.first.refuse([tuple(each.shape) for each in tensors])
            self._check_type(given.name, given.dtype, tensor)
        shapes = [tuple(tensor.shape) for tensor in tensors]
        for network in self.known:
            if (batch := network.batch_of(shapes)) is not None:
                return network, batch
        return self._another(shapes)

    def _another(self, shapes: Shapes) -> tuple[Network, int]:
        """What the model does with inputs of sizes that are new."""
        if self._others is None:
            self.first.refuse(shapes)
        assert self._others is not None
        try:
            network = self._network(self._others(shapes))
        except UnsupportedError as error:
            names = (given.name for given in self.first.captured.inputs)
            given = ", ".join(f"{name} {list(shape)}" for name, shape in zip(names, shapes, strict=True))
            raise UnsupportedError(
                f"the model, compiled with {call_of(self.first.captured)}, cannot be compiled with {given}: {error}"
            ) from error
        batch = network.batch_of(shapes)
        assert batch is not None, "it was captured for these"
        self.known = [*self.known, network]
        return network, batch

    def _network(self, graph: Graph) -> Network:
        if self._settings.pieces is not None:
            require_apart(graph)
        settings = self._settings
        made = Network(graph, settings.dtype, settings.fusion, settings.device, self.pool)
        made.optimised("nchw")
        return made

    def _check_type(self, name: str, expected: str, tensor: torch.Tensor) -> None:
        wanted = getattr(torch, expected)
        if not wanted.is_floating_point:
            if tensor.dtype != wanted:
                raise UnsupportedError(f"{name} is {tensor.dtype}; the model takes {wanted}")
            return
        if tensor.dtype == torch.uint8 and not any(
            node.inputs.get("x") == name and operator_of(node).normalises(node)
            for node in self.first.optimised("nchw")
        ):
            raise UnsupportedError(
                f"{name} is uint8; compile the model with normalize=(mean, std) and the engine will take images so"
            )
        if tensor.dtype not in _IMAGE_TYPES:
            raise UnsupportedError(
                f"{name} is {tensor.dtype}; an engine takes float32, float16, bfloat16 and uint8"
            )
