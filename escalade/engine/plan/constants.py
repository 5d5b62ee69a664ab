"""A network's weights on a device, in the forms that kernels want, shared by the plans of all sizes."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from escalade.device.strides import aligned
from escalade.engine.graph.forms import STORAGE, is_finite
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import FP8, FP32, NHWC, OWN
from escalade.engine.plan.step import ConstantForm
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import to_e4m3


def require_finite(graph: Graph) -> None:
    """A NaN among the weights of a layer makes every result NaN: better to hear of it now. Other constants may be
    infinite, as masks in front of a softmax are."""
    for name in weights_of(graph):
        _require_finite(graph, name)


def _require_finite(graph: Graph, name: str) -> None:
    tensor = graph.constants[name]
    if tensor.is_floating_point() and not is_finite(tensor):
        raise UnsupportedError(
            f"the model's {readable(graph, name)} holds values that are not finite (NaN or infinity)"
        )


def weights_of(graph: Graph) -> set[str]:
    """The constants that layers take as weights, biases and statistics."""
    return {
        name
        for node in graph
        for role, name in node.inputs.items()
        if name in graph.constants and operator_of(node).is_weight(node, role)
    }


def readable(graph: Graph, name: str) -> str:
    """A constant as it is called in the model: `layer1.0.conv1.weight`. One that a pass has made has the name of the
    layer that reads it."""
    if name in graph.called:
        return graph.called[name]
    readers = (
        f"{node.source}.{role}"
        for node in graph
        for role, read in node.inputs.items()
        if read == name and node.source
    )
    return next(readers, name)


class Pool:
    """Constants of graphs for several sizes: those of one name that hold the same are one tensor, as long as somebody
    has it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[weakref.ref[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def share(self, graph: Graph) -> None:
        """Puts tensors that are here already in the place of the graph's own."""
        with self._lock:
            self._known = {
                key: known for key, known in self._known.items() if any(one() is not None for one in known)
            }
            graph.constants = {name: self._same(name, tensor) for name, tensor in graph.constants.items()}

    def _same(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        key = (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        known = [one for each in self._known.get(key, ()) if (one := each()) is not None]
        found = next((one for one in known if one is tensor or _same_bits(one, tensor)), None)
        if found is None:
            known.append(tensor)
        self._known[key] = [weakref.ref(one) for one in known]
        return tensor if found is None else found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Zeros of either sign are equal, and not the same."""
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


class Constants:
    """Made from a graph's tensors when first asked for, and kept as long as those are; plans ask while holding the
    engine's lock or their own."""

    def __init__(self, dtype: str, device: torch.device, typed: bool = False) -> None:
        """A `typed` graph has its constants in their own types."""
        self._typed = typed
        self._storage = STORAGE[dtype]
        self._dtype = dtype
        self._device = device
        self._made = WeakIdKeyDictionary()
        self._lock = threading.Lock()

    def get(self, entry: ConstantForm, graph: Graph) -> torch.Tensor:
        source = graph.constants[entry.name]
        with self._lock:
            made: dict[str, torch.Tensor] = self._made.setdefault(source, {})
            if entry.form not in made:
                # Another tensor object, for one that holds its own key would stay for ever.
                made[entry.form] = aligned(self._make(entry, graph)).detach()
            return made[entry.form]

    def _make(self, entry: ConstantForm, graph: Graph) -> torch.Tensor:
        tensor = graph.constants[entry.name]
        if not tensor.is_floating_point():
            return tensor.to(self._device).contiguous()
        if entry.form == FP8:
            return to_e4m3(tensor.to(self._device)).contiguous(memory_format=torch.channels_last)
        is_meant = self._typed or (entry.form == OWN and tensor.dtype is torch.float64)
        dtype = torch.float32 if entry.form == FP32 else tensor.dtype if is_meant else self._storage
        made = tensor.to(self._device, dtype)
        if not self._typed and not is_finite(made) and entry.name in weights_of(graph):
            _require_finite(graph, entry.name)
            raise UnsupportedError(
                f"{readable(graph, entry.name)} has values beyond the range of {self._dtype} "
                f"(largest {float(tensor.abs().max()):.3g}); compile with dtype='bf16' or 'fp32'"
            )
        # The filters of a volume without a batch have a dimension more than the images that it looks like.
        is_image = entry.form == NHWC and made.dim() == 4
        order = torch.channels_last if is_image else torch.contiguous_format
        return made.contiguous(memory_format=order)
