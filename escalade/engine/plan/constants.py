"""A network's weights on a device, in the forms that kernels want, shared by the plans of all batch sizes."""

from __future__ import annotations

import threading

import torch

from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.lowering import FP8, FP32, NHWC
from escalade.engine.plan.plan import ConstantForm
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import to_e4m3
from escalade.ops.calling.executables import aligned


def require_finite(graph: Graph) -> None:
    """A NaN among the weights makes every result NaN: better to hear of it now."""
    for name, tensor in graph.constants.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UnsupportedError(
                f"the model's {readable(name)} holds values that are not finite (NaN or infinity)"
            )


def readable(name: str) -> str:
    """`p_layer1_0_conv1_weight` as it is called in the model."""
    return name.removeprefix("p_").removeprefix("b_")


class Constants:
    """Made from the graph when first asked for; plans ask while holding the engine's lock or their own."""

    def __init__(self, dtype: str, device: torch.device, typed: bool = False) -> None:
        """A `typed` graph has its constants in their own types."""
        self._typed = typed
        self._storage = STORAGE[dtype]
        self._dtype = dtype
        self._device = device
        self._made: dict[ConstantForm, torch.Tensor] = {}
        self._lock = threading.Lock()

    def get(self, entry: ConstantForm, graph: Graph) -> torch.Tensor:
        with self._lock:
            if entry not in self._made:
                self._made[entry] = aligned(self._make(entry, graph.constants[entry.name]))
            return self._made[entry]

    def _make(self, entry: ConstantForm, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor.to(self._device).contiguous()
        if entry.form == FP8:
            return to_e4m3(tensor.to(self._device)).contiguous(memory_format=torch.channels_last)
        dtype = torch.float32 if entry.form == FP32 else tensor.dtype if self._typed else self._storage
        made = tensor.to(self._device, dtype)
        if not self._typed and not bool(torch.isfinite(made).all()):
            raise UnsupportedError(
                f"{readable(entry.name)} has values beyond the range of {self._dtype} "
                f"(largest {float(tensor.abs().max()):.3g}); compile with dtype='bf16' or 'fp32'"
            )
        order = torch.channels_last if entry.form == NHWC else torch.contiguous_format
        return made.contiguous(memory_format=order)
