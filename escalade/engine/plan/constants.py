"""A network's weights on a device, in the layouts and types that kernels read, shared by the plans of all sizes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from escalade.device.strides import aligned
from escalade.engine.graph.forms import STORAGE, is_finite
from escalade.engine.graph.graph import Graph, Node, Reference
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.lowering import FP32, NHWC, OWN
from escalade.engine.plan.plan import ConstantForm
from escalade.errors import UnsupportedError
from escalade.ops.base import dtypes


def check_finite_weights(graph: Graph) -> None:
    """Refuse weights with NaN or infinity, which would make every result NaN.

    Other constants may be infinite: the mask added before a softmax, for example.
    """
    for name in weights_of(graph):
        _require_finite(graph, name)


def _require_finite(graph: Graph, name: str) -> None:
    tensor = graph.constants[name]
    if tensor.is_floating_point() and not is_finite(tensor):
        raise UnsupportedError(
            f"the model's {display_name(graph, name)} holds values that are not finite (NaN or infinity); "
            "load or initialize finite weights before compiling"
        )


def weights_of(graph: Graph) -> set[str]:
    """Return the constants that layers read as weights, biases and statistics."""
    return {
        name
        for node in graph
        for role, name in node.inputs.items()
        if name in graph.constants and _is_weight(node, role)
    }


def _is_weight(node: Node, role: str) -> bool:
    """Return True if an input is a weight, bias or statistic of a layer, not an operand."""
    if Aten.matches(node):
        arguments = node.attributes["arguments"]
        return Reference(role) in (arguments.get("weight"), arguments.get("bias"))
    operator = operator_of(node)
    if operator.signature is None:
        return role not in operator.values
    declared = operator.signature.role(role)
    return declared is not None and declared.constant


def display_name(graph: Graph, name: str) -> str:
    """Return a constant's name in the model, such as `layer1.0.conv1.weight`.

    A constant created by a pass is named after the layer that reads it.
    """
    if name in graph.weight_names:
        return graph.weight_names[name]
    readers = (
        f"{node.source}.{role}"
        for node in graph
        for role, read in node.inputs.items()
        if read == name and node.source
    )
    return next(readers, name)


class ConstantPool:
    """Deduplicates constants of graphs for several sizes: equal tensors of one name become one.

    References are weak, so a constant is freed with the last graph that uses it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[weakref.ref[torch.Tensor]]] = {}
        self._lock = threading.Lock()

    def share(self, graph: Graph) -> None:
        """Replace the graph's constants with equal tensors from earlier graphs."""
        with self._lock:
            self._known = {
                key: known for key, known in self._known.items() if any(one() is not None for one in known)
            }
            graph.constants = {name: self._shared(name, tensor) for name, tensor in graph.constants.items()}

    def _shared(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        key = (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        known = [one for each in self._known.get(key, ()) if (one := each()) is not None]
        found = next((one for one in known if one is tensor or equal_bits(one, tensor)), None)
        if found is None:
            known.append(tensor)
        self._known[key] = [weakref.ref(one) for one in known]
        return tensor if found is None else found


def equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one shape and dtype hold the same bits."""
    # Comparing values would merge +0.0 with -0.0 and never merge NaNs.
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def write_tensor(target: torch.Tensor, values: torch.Tensor) -> None:
    """Write values into a tensor in place; dimensions that repeat one element (stride 0) are written once."""
    if (target.data_ptr(), target.stride()) == (values.data_ptr(), values.stride()):
        return
    for dimension, stride in enumerate(target.stride()):
        if not stride and target.shape[dimension] > 1:
            target, values = target.narrow(dimension, 0, 1), values.narrow(dimension, 0, 1)
    # PyTorch refuses writes to an inference tensor outside inference mode.
    with torch.no_grad(), torch.inference_mode() if target.is_inference() else nullcontext():
        target.copy_(values)


class ConstantCache:
    """Constants converted for kernels on first use, and kept as long as the tensors they were converted from."""

    def __init__(self, dtype: str, device: torch.device, typed: bool = False) -> None:
        """Keep each constant's own dtype if the graph is `typed`."""
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
                # `detach` returns a new tensor object: a value that is its own weak key would never be freed.
                made[entry.form] = aligned(self._make(entry, graph)).detach()
            return made[entry.form]

    def reconvert(self, old: Graph, name: str, new: Graph) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each form of a constant in use, with its value in another graph of the same structure."""
        with self._lock:
            made = dict(self._made.get(old.constants[name], {}))
        for form, tensor in made.items():
            yield tensor, self._make(ConstantForm(name, form), new)

    def _make(self, entry: ConstantForm, graph: Graph) -> torch.Tensor:
        tensor = graph.constants[entry.name]
        if not tensor.is_floating_point():
            return tensor.to(self._device).contiguous()
        if entry.form in dtypes.QUANTIZED:
            quantized = dtypes.stored_as(tensor.to(self._device), dtypes.STORAGE[entry.form])
            return quantized.contiguous(memory_format=torch.channels_last)
        keeps_dtype = self._typed or (entry.form == OWN and tensor.dtype is torch.float64)
        dtype = torch.float32 if entry.form == FP32 else tensor.dtype if keeps_dtype else self._storage
        made = tensor.to(self._device, dtype)
        if not self._typed and not is_finite(made) and entry.name in weights_of(graph):
            _require_finite(graph, entry.name)
            raise UnsupportedError(
                f"{display_name(graph, entry.name)} has values beyond the range of {self._dtype} "
                f"(largest {float(tensor.abs().max()):.3g}); compile with dtype='bf16' or 'fp32'"
            )
        # An unbatched volume has the rank of a batch of images, but its filters have five dimensions.
        is_image = entry.form == NHWC and made.dim() == 4
        order = torch.channels_last if is_image else torch.contiguous_format
        return made.contiguous(memory_format=order)
