"""Recurrent layers (LSTM, GRU, RNN) as one operator with one gradient operator, both computed by PyTorch.

Autograd would trace them time step by time step, as thousands of small operators. On a GPU both call cuDNN, which keeps
what the gradient needs in a *reserve*; elsewhere the gradient runs the layers again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import _VF

from escalade.device.strides import ALIGNMENT
from escalade.engine.graph.graph import Graph, Node, Reference
from escalade.engine.nodes.aten import call_of
from escalade.ops.calling.library import define

Tensor = torch.Tensor
_CUDNN_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_LSTM = "lstm"
_GATES = {"rnn_relu": 1, "rnn_tanh": 1, "lstm": 4, "gru": 3}
_ALIGNED = ALIGNMENT // torch.float16.itemsize
"""Elements."""
_LAYERS = "str kind, bool has_biases, int num_layers, bool bidirectional"


@dataclass(frozen=True)
class Layers:
    """Recurrent layers of one kind, whose values are [time][batch][features]."""

    kind: str
    has_biases: bool
    num_layers: int
    bidirectional: bool

    def per_direction(self, weights: Sequence[Tensor]) -> int:
        """Return the number of weights of each layer and direction."""
        return len(weights) // (self.num_layers * (1 + self.bidirectional))

    def places(self, weights: Sequence[Tensor]) -> tuple[dict[int, int], int]:
        """Return where the gradient of each weight starts in one tensor, by index in memory order, and its size.

        That is the order in which cuDNN stores weights, first all matrices and then all biases, so that its own results
        are returned without a copy. Each starts at an aligned address.
        """
        order = sorted(range(len(weights)), key=lambda index: weights[index].dim() == 1)
        *begins, end = accumulate(
            (-(-weights[index].numel() // _ALIGNED) * _ALIGNED for index in order), initial=0
        )
        return dict(zip(order, begins, strict=True)), end

    def run(self, x: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the results of PyTorch's own operator; on a CPU in fp32 at least, which has no LSTM in fp16."""
        dtype = torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
        given = [value.to(dtype) for value in ((x, h) if c is None else (x, h, c))]
        state = given[1] if c is None else tuple(given[1:])
        function = getattr(_VF, self.kind)
        own = [weight.to(dtype) for weight in weights]
        results = function(
            given[0], state, own, self.has_biases, self.num_layers, 0.0, False, self.bidirectional, False
        )
        return tuple(result.to(x.dtype) for result in results)


@dataclass(frozen=True)
class _Buffer:
    """Where cuDNN expects the weights of some layers: offsets in one buffer, and its size, in elements."""

    offsets: tuple[int, ...]
    size: int

    def of(self, weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the weights in one buffer: the memory that they are in, or a copy."""
        first = weights[0]
        base = first.data_ptr()
        if all(
            weight.dtype is dtype
            and weight.is_contiguous()
            and weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and weight.data_ptr() == base + (offset - self.offsets[0]) * weight.itemsize
            for weight, offset in zip(weights, self.offsets, strict=True)
        ):
            begin = first.storage_offset() - self.offsets[0]
            if begin >= 0 and (begin + self.size) * first.itemsize <= first.untyped_storage().nbytes():
                return first.as_strided((self.size,), (1,), begin)
        is_full = sum(weight.numel() for weight in weights) == self.size
        made = (torch.empty if is_full else torch.zeros)(self.size, dtype=dtype, device=first.device)
        torch._foreach_copy_(self.views(made, weights), list(weights))  # one launch, casts included
        return made

    def views(self, buffer: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(weights, self.offsets, strict=True)
        return [buffer[begin : begin + each.numel()].view(each.shape) for each, begin in pairs]


@lru_cache(maxsize=64)
def _buffer(
    layers: Layers,
    shapes: tuple[torch.Size, ...],
    hidden_size: int,
    proj_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Buffer | None:
    """Return where cuDNN expects the weights; None if it does not compute layers of this kind."""
    weights = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    try:
        buffer = torch._cudnn_rnn_flatten_weight(
            weights, layers.per_direction(weights), shapes[0][1], _CUDNN_MODES[layers.kind], hidden_size,
            proj_size, layers.num_layers, False, layers.bidirectional,
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return None
    return _Buffer(tuple(int(weight.storage_offset()) for weight in weights), buffer.numel())


def _calls_cudnn(x: Tensor) -> bool:
    """Return True if cuDNN is to compute. Whether PyTorch uses it does not matter: captures of models turn it off."""
    return x.is_cuda and torch.backends.cudnn.is_available() and x.numel() > 0


def _cudnn_buffer(
    layers: Layers, x: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor]
) -> tuple[_Buffer, tuple[int, int]] | None:
    """Return the buffer for cuDNN with hidden and projection size; None where PyTorch does not call cuDNN."""
    if not _calls_cudnn(x):
        return None
    sizes = (h.shape[2], 0) if c is None or c.shape[2] == h.shape[2] else (c.shape[2], h.shape[2])
    found = _buffer(layers, tuple(weight.shape for weight in weights), *sizes, x.dtype, x.device)
    return None if found is None else (found, sizes)


def _run(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    kind: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    train: bool,
) -> tuple[Tensor, ...]:
    layers = Layers(kind, has_biases, num_layers, bidirectional)
    x, h, c = x.contiguous(), h.contiguous(), None if c is None else c.contiguous()
    found = _cudnn_buffer(layers, x, h, c, weights)
    if found is None:
        y, h, *rest = layers.run(x, h, c, weights)
        return y, h, rest[0] if rest else x.new_empty(0), x.new_empty(0, dtype=torch.uint8)
    buffer, sizes = found
    flat = buffer.of(weights, x.dtype)
    y, h, new_c, reserve, _ = torch.ops.aten._cudnn_rnn(
        x, buffer.views(flat, weights), layers.per_direction(weights), flat, h, c, _CUDNN_MODES[kind], *sizes,
        num_layers, False, 0.0, train, bidirectional, [], None,
    )  # fmt: skip
    return y, h, x.new_empty(0) if c is None else new_c, reserve


def _run_backward(
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    y: Tensor,
    reserve: Tensor,
    dy: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    kind: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    trained: bool,
) -> tuple[Tensor, ...]:
    layers = Layers(kind, has_biases, num_layers, bidirectional)
    x, h, c = x.contiguous(), h.contiguous(), None if c is None else c.contiguous()
    found = _cudnn_buffer(layers, x, h, c, weights) if reserve.numel() else None
    none = x.new_empty(0)
    if found is None:
        dx, dh, dc, dw = _differentiate(layers, x, h, c, weights, (dy, dh, dc), trained)
    else:
        buffer, sizes = found
        flat = buffer.of(weights, x.dtype)
        given = (None if each is None else each.contiguous() for each in (dy, dh, dc))
        dx, dh, dc, dw = torch.ops.aten._cudnn_rnn_backward(
            x, buffer.views(flat, weights), layers.per_direction(weights), flat, h, c, y.contiguous(), *given,
            _CUDNN_MODES[kind], *sizes, num_layers, False, 0.0, True, bidirectional, [], None, reserve,
            (True, True, c is not None, trained),
        )  # fmt: skip
    assert dx is not None and dh is not None
    return dx, dh, none if dc is None else dc, _joined(dw, *layers.places(weights)) if trained else none


def _joined(parts: Sequence[Tensor], places: Mapping[int, int], size: int) -> Tensor:
    """Return one tensor with parts at these places: the memory that they are in, or a copy."""
    memory = parts[next(iter(places))]
    storage, begin = memory.untyped_storage(), memory.storage_offset()
    if (begin + size) * memory.itemsize <= storage.nbytes() and all(
        part.is_contiguous()
        and part.untyped_storage().data_ptr() == storage.data_ptr()
        and part.storage_offset() == begin + places[index]
        for index, part in enumerate(parts)
    ):
        return memory.as_strided((size,), (1,))
    joined = memory.new_empty(size)
    own = [joined[places[index] :][: part.numel()].view(part.shape) for index, part in enumerate(parts)]
    torch._foreach_copy_(own, list(parts))
    return joined


def _differentiate(
    layers: Layers,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    """Run the layers again, with autograd."""
    with torch.enable_grad():
        values = [x, h] if c is None else [x, h, c]
        values = [value.detach().requires_grad_() for value in values]
        own = [weight.detach().to(x.dtype).requires_grad_(trained) for weight in weights]
        results = layers.run(values[0], values[1], None if c is None else values[2], own)
        pairs = [pair for pair in zip(results, gradients, strict=False) if pair[1] is not None]
        found = torch.autograd.grad(
            [result for result, _ in pairs], [*values, *(own if trained else ())],
            [gradient.to(result.dtype) for result, gradient in pairs],  # type: ignore[union-attr]
            allow_unused=True, materialize_grads=True,
        )  # fmt: skip
    dx, dh, *rest = found[: len(values)]
    return dx, dh, rest[0] if rest else None, list(found[len(values) :])


def _fake(
    x: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor], kind: str, has_biases: bool,
    num_layers: int, bidirectional: bool, train: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    directions = 1 + bidirectional
    y = x.new_empty((*x.shape[:-1], h.shape[2] * directions))
    # cuDNN does not tell the size of its reserve. It has the gates, the cells, and the results of each layer.
    kept = prod(x.shape[:-1]) * (h if c is None else c).shape[2] * directions * num_layers
    bytes = kept * (_GATES[kind] + 2) * x.element_size()
    reserve = x.new_empty(max(bytes, 1), dtype=torch.uint8)
    return y, torch.empty_like(h, memory_format=torch.contiguous_format), _like(x, c), reserve


def _fake_backward(
    x: Tensor, h: Tensor, c: Tensor | None, weights: Sequence[Tensor], y: Tensor, reserve: Tensor,
    dy: Tensor | None, dh: Tensor | None, dc: Tensor | None, kind: str, has_biases: bool, num_layers: int,
    bidirectional: bool, trained: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    layers = Layers(kind, has_biases, num_layers, bidirectional)
    dw = x.new_empty(layers.places(weights)[1] if trained else 0)
    return _like(x, x), _like(x, h), _like(x, c), dw


def _like(x: Tensor, value: Tensor | None) -> Tensor:
    return x.new_empty(0 if value is None else value.shape)


recurrent = define(
    f"recurrent(Tensor x, Tensor h, Tensor? c, Tensor[] weights, {_LAYERS}, bool train)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
"""Returns y, the last states h and c, and the reserve. Weights may have another dtype than x."""
recurrent_backward = define(
    "recurrent_backward(Tensor x, Tensor h, Tensor? c, Tensor[] weights, Tensor y, Tensor reserve, Tensor? dy,"
    f" Tensor? dh, Tensor? dc, {_LAYERS}, bool trained) -> (Tensor, Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
"""Returns the gradients of x, h and c, and those of all weights one after another, at `Layers.places`."""


class _Recurrent(torch.autograd.Function):
    """The layers as they are traced: arguments are the layers, x, h, c, and weights."""

    @staticmethod
    def forward(
        ctx: Any, layers: Layers, x: Tensor, h: Tensor, c: Tensor | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.layers = layers
        y, new_h, new_c, reserve = recurrent(
            x, h, c, list(weights), *vars(layers).values(), any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(x, h, c, y, reserve, *weights)
        return (y, new_h) if c is None else (y, new_h, new_c)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None = None) -> tuple[Any, ...]:
        x, h, c, y, reserve, *weights = ctx.saved_tensors
        layers: Layers = ctx.layers
        needed = ctx.needs_input_grad[4:]
        dx, dh, dc, dw = recurrent_backward(
            x, h, c, weights, y, reserve, dy, dh, dc, *vars(layers).values(), any(needed)
        )
        places, _ = layers.places(weights)
        gradients = (
            dw[places[index] : places[index] + weight.numel()].view(weight.shape).to(weight.dtype)
            if needed[index]
            else None
            for index, weight in enumerate(weights)
        )
        return None, dx, dh, None if c is None else dc, *gradients


def pack_weights(node: Node, graph: Graph, constants: Mapping[str, Tensor]) -> None:
    """Move the weights of a recurrent layer into one buffer; otherwise cuDNN's caller copies them at every call."""
    if node.calls not in _CUDNN_MODES:
        return
    a = node.attributes["arguments"]
    roles = [one.role for one in a["params"] if isinstance(one, Reference)]
    names = [node.inputs[role] for role in roles]
    if len(roles) < len(a["params"]) or not constants.keys() >= {*roles}:
        return
    readers = {call_of(reader) for name in names for reader in graph.readers(name)}
    if len({*names}) < len(names) or len(readers) > 1:
        return  # others may have their addresses
    weights = [constants[role] for role in roles]
    if not _calls_cudnn(weights[0]):
        return
    layers = Layers(node.calls, a["has_biases"], a["num_layers"], a["bidirectional"])
    hidden_size, state_size = weights[0].shape[0] // _GATES[node.calls], weights[1].shape[1]
    shapes, first = tuple(weight.shape for weight in weights), weights[0]
    proj_size = state_size if state_size != hidden_size else 0
    found = _buffer(layers, shapes, hidden_size, proj_size, first.dtype, first.device)
    if found is None:
        return
    views = found.views(found.of(weights, first.dtype), weights)
    for weight, view in zip(weights, views, strict=True):
        weight.data = view


def _traced(kind: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return the layers as a function with the arguments of PyTorch's operator."""

    def layers_of(
        x: Tensor, state: Any, params: Sequence[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        states = tuple(state) if kind == _LSTM else (state,)
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
            dtype = torch.get_autocast_dtype(device)
            x, states = x.to(dtype), tuple(value.to(dtype) for value in states)
        x = x.transpose(0, 1) if batch_first else x
        # PyTorch draws the zeros between layers, from its own generator.
        calls = num_layers if dropout and train else 1
        each, directions = num_layers // calls, 1 + bidirectional
        layers = Layers(kind, has_biases, each, bidirectional)
        count = len(params) // calls
        finals: list[tuple[Tensor, ...]] = []
        for number in range(calls):
            own = [value[number * each * directions : (number + 1) * each * directions] for value in states]
            weights = params[number * count : (number + 1) * count]
            c = own[1] if kind == _LSTM else None
            x, *last = _Recurrent.apply(layers, x, own[0], c, *weights)
            finals.append(tuple(last))
            if number + 1 < calls:
                x = F.dropout(x, dropout)
        y = x.transpose(0, 1) if batch_first else x
        return y, *(torch.cat(parts) if calls > 1 else parts[0] for parts in zip(*finals, strict=True))

    return layers_of


AS_ONE_OPERATOR: Mapping[torch._ops.OpOverload, Callable[..., tuple[Tensor, ...]]] = {
    getattr(torch.ops.aten, kind).input: _traced(kind) for kind in _CUDNN_MODES
}
"""PyTorch's recurrent layers as functions whose gradients are traced as one operator."""
