"""Lightweight fake tensors used for tracing, and the modes that record what a model does with them.

PyTorch's own fake tensors load its compiler, which takes seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from escalade.engine.capture.meta_rules import meta_result
from escalade.engine.capture.reader import mutates
from escalade.engine.graph.aten import is_random_call, updates_statistics
from escalade.errors import EscaladeError


class NotTraceable(EscaladeError):
    """The model does something that only `torch.export` can capture."""


class BatchSizeFormatted(NotTraceable):
    """The model formats its batch size as text, for which `torch.export` would insert the name of a symbol."""


class BatchCount(int):
    """The batch size times a constant.

    Supports only arithmetic whose result is again such a multiple, or the same for every batch size. Everything else,
    such as a comparison with a number, could differ for another batch size and raises.
    """

    times: int
    """The constant factor, i.e. the size for one item."""

    @staticmethod
    def of(times: int, batch: int) -> BatchCount:
        count = BatchCount(times * batch)
        count.times = times
        return count

    def _with(self, times: int) -> BatchCount:
        return BatchCount.of(times, int.__floordiv__(self, self.times))

    def __mul__(self, other: Any) -> Any:
        return self._with(self.times * _number(other))

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        if type(other) is int and not other:  # the start value of `sum`
            return self
        return self._with(self.times + _times(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        left = self.times - _times(other)
        return self._with(left) if left > 0 else 0 if not left else _reject()

    def __floordiv__(self, other: Any) -> Any:
        whole, rest = divmod(self.times, _divisor(other))
        if rest:
            _reject()
        return whole if isinstance(other, BatchCount) else self._with(whole)

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, BatchCount):
            return self.times / other.times
        if type(other) not in (int, float) or not other or not (each := self.times / other).is_integer():
            _reject()
        return BatchQuotient(int.__truediv__(self, self.times) * each)

    def __mod__(self, other: Any) -> Any:
        return _reject() if self.times % _divisor(other) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchCount):
            raise NotTraceable("the model branches on its batch size")
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return True


class BatchQuotient(float):
    """An exact quotient of a count and a number: it may only be converted to an integer."""


def _number(value: Any) -> int:
    return value if type(value) is int else _reject()


def _times(value: Any) -> int:
    return value.times if isinstance(value, BatchCount) else _reject()


def _divisor(value: Any) -> int:
    number = _times(value) if isinstance(value, BatchCount) else _number(value)
    return number if number > 0 else _reject()


def _reject(*_: Any) -> Any:
    raise NotTraceable("the model computes with its batch size")


def _reject_formatting(*_: Any) -> Any:
    raise BatchSizeFormatted("the model formats its batch size as text")


# Every other method inherited from int and float raises.


_ALLOWED = {"__new__", "__getattribute__", "__index__", "__sizeof__", *vars(BatchCount)}
for _name in [name for name, value in vars(int).items() if callable(value) and name not in _ALLOWED]:
    setattr(BatchCount, _name, _reject)
_ALLOWED = {"__new__", "__getattribute__", "__int__", "__trunc__", "__floor__", "__ceil__"}
for _name in [name for name, value in vars(float).items() if callable(value) and name not in _ALLOWED]:
    setattr(BatchQuotient, _name, _reject)
BatchCount.__hash__ = BatchQuotient.__hash__ = _reject  # type: ignore[method-assign,assignment]
for _name in ("__str__", "__repr__", "__format__"):
    setattr(BatchCount, _name, _reject_formatting)
    setattr(BatchQuotient, _name, _reject_formatting)


class TraceTensor(torch.Tensor):
    """Tensor with sizes, strides, dtype and device, but no data."""

    meta: torch.Tensor
    node: torch.fx.Node
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> TraceTensor:
        tensor: TraceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
        )
        tensor.meta = meta
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotTraceable("a trace tensor is used outside of the traced call")


class CallRecorder(TorchDispatchMode):
    """Records operator calls as a `torch.fx` graph. In inference mode PyTorch dispatches composite operators whole."""

    def __init__(self, batch: int, max_calls: int) -> None:
        """`batch` is the batch size of the inputs; more than `max_calls` calls raise."""
        super().__init__()
        self.graph = torch.fx.Graph()
        self.constants: dict[torch.fx.Node, torch.Tensor] = {}
        self.modules: list[str] = [""]
        """Stack of running modules, innermost last."""
        self._batch, self._calls_left = batch, max_calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise PyTorch loads Dynamo just to disable it in this mode."""
        return False

    def input(self, name: str, meta: torch.Tensor, device: torch.device) -> TraceTensor:
        return self._node(TraceTensor(meta, device), self.graph.placeholder(name))

    def constant(self, tensor: torch.Tensor) -> TraceTensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise NotTraceable("a weight that is not a dense tensor")
        with torch.inference_mode():
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            traced = self._node(TraceTensor(meta, tensor.device), self.graph.placeholder("constant"))
        self.constants[traced.node] = tensor
        return traced

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        tensors: list[Any] = [
            leaf for leaf in _leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)
        ]
        self._check(function, tensors, arguments, keywords)
        result = meta_result(function, _to_meta(arguments), _to_meta(keywords))
        for tensor in tensors:
            if result is tensor.meta and not function._schema.is_mutable:
                return tensor  # a no-op, such as dropout in evaluation or a conversion to the same dtype
        if is_random_call(function, _bound(function, arguments, keywords)):
            raise NotTraceable(f"{function} draws random numbers")
        self._calls_left -= 1
        if self._calls_left < 0:
            raise NotTraceable("the number of calls grows with the batch")
        node = self.graph.create_node(
            "call_function",
            function,
            _to_nodes(arguments),
            _to_nodes(keywords),
            function.overloadpacket.__name__,
        )
        node.meta["source"] = self.modules[-1]
        device = _result_device(tensors, arguments, keywords)
        if mutates(node):
            return self._record_write(node, result, tensors)
        if function._schema.is_mutable:
            raise NotTraceable(f"{function} writes to its arguments")
        if isinstance(result, torch.Tensor):
            return self._node(TraceTensor(result, device), node)
        if not isinstance(result, tuple | list) or not all(isinstance(part, torch.Tensor) for part in result):
            raise NotTraceable(f"{function} returns {type(result).__name__}")
        node.meta["val"] = tuple(result)
        parts = [
            self._node(TraceTensor(part, device), self.graph.call_function(operator.getitem, (node, index)))
            for index, part in enumerate(result)
        ]
        for part in parts:
            part.node.meta["source"] = self.modules[-1]
        return type(result)(parts) if type(result) in (tuple, list) else tuple(parts)

    @staticmethod
    def _node(tensor: TraceTensor, node: torch.fx.Node) -> TraceTensor:
        tensor.node = node
        node.meta["val"] = tensor.meta
        return tensor

    def _record_write(self, node: torch.fx.Node, result: Any, tensors: list[Any]) -> Any:
        """Record an in-place operation, which returns the tensor it writes to."""
        first = tensors[0]
        if first.node is not node.args[0] or result is not first.meta or first.node in self.constants:
            raise NotTraceable(f"{node.target} writes to a tensor of the model")
        if (result.shape, result.stride()) != (first.shape, first.stride()):
            raise NotTraceable(f"{node.target} changes sizes")
        node.meta["val"] = result
        return first

    def _check(self, function: Any, tensors: list[torch.Tensor], arguments: Any, keywords: Any) -> None:
        if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
            raise NotTraceable(f"{function} is not an ATen operator")
        if not all(isinstance(tensor, TraceTensor) for tensor in tensors):
            raise NotTraceable("a tensor from outside the model")
        bound = _bound(function, arguments, keywords)
        if updates_statistics(bound):
            raise NotTraceable(f"{function} updates running statistics")
        if function.overloadpacket.__name__ in _PARTIAL_OPERATORS and tensors and self._batch > 1:
            dimension = bound.get("dim")
            size = 0 if dimension is None else tensors[0].shape[dimension]
            if size % self._batch == 0 and not (
                _is_full_range(bound) or _is_per_item(bound, size, self._batch)
            ):
                raise NotTraceable("the model selects some items of the batch")


# Operators that select part of a dimension, clipped to its size: they may return something else for a smaller batch.
_PARTIAL_OPERATORS = (
    "slice", "select", "narrow", "narrow_copy", "split", "split_with_sizes", "chunk", "tensor_split", "unbind",
    "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "hsplit", "vsplit", "dsplit", "slice_scatter",
    "select_scatter", "slice_copy", "select_copy", "split_copy", "unbind_copy",
)  # fmt: skip


def _is_full_range(bound: dict[str, Any]) -> bool:
    """Return True if a slice selects its whole dimension, whatever the size."""
    is_unbounded = bound.get("end") is None or bound["end"] == torch.iinfo(torch.int64).max
    return "step" in bound and bound["step"] == 1 and bound.get("start") in (None, 0) and is_unbounded


def _is_per_item(bound: dict[str, Any], size: int, batch: int) -> bool:
    """Return True if all bounds are multiples of the batch, so that the same slices apply per item."""
    if not size or bound.get("step", 1) != 1:
        return False
    if "chunks" in bound:
        return size // batch % bound["chunks"] == 0
    ends = [bound[name] for name in ("start", "end", "length", "split_size", "split_sizes") if name in bound]
    numbers = [number for number in pytree.tree_leaves(ends) if number is not None]
    return bool(numbers) and all(type(n) in (int, BatchCount) and _is_multiple(n, batch) for n in numbers)


def _is_multiple(number: int, batch: int) -> bool:
    is_unbounded = int.__index__(number) == torch.iinfo(torch.int64).max
    return is_unbounded or (int.__ge__(number, 0) and int.__mod__(number, batch) == 0)


def _bound(function: Any, arguments: Any, keywords: Any) -> dict[str, Any]:
    names, defaults = _signature(function)
    return defaults | dict(zip(names, arguments, strict=False)) | keywords


@lru_cache(1024)
def _signature(function: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of an operator's arguments, and defaults; PyTorch builds a schema's arguments at every read."""
    schema = function._schema.arguments
    defaults = {entry.name: entry.default_value for entry in schema if entry.has_default_value()}
    return tuple(entry.name for entry in schema), defaults


def _to_meta(tree: Any) -> Any:
    """Replace trace tensors and devices by those of the meta device."""
    return _map(_meta_leaf, tree)


def _meta_leaf(value: Any) -> Any:
    if isinstance(value, TraceTensor):
        return value.meta
    return torch.device("meta") if isinstance(value, torch.device) else value


def _to_nodes(tree: Any) -> Any:
    return _map(lambda value: value.node if isinstance(value, TraceTensor) else value, tree)


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Map the leaves of an operator's arguments, which nest plain tuples, lists and dicts only; faster than pytree."""
    if type(tree) is tuple:
        return tuple([_map(change, each) for each in tree])
    if type(tree) is list:
        return [_map(change, each) for each in tree]
    if type(tree) is dict:
        return {key: _map(change, each) for key, each in tree.items()}
    return change(tree)


def _leaves(tree: Any) -> list[Any]:
    found: list[Any] = []
    _map(found.append, tree)
    return found


def _result_device(tensors: list[Any], arguments: Any, keywords: Any) -> torch.device:
    """Return the device argument if there is one, else the device of the tensors; 0-D ones may be on the CPU."""
    explicit = [leaf for leaf in _leaves((arguments, keywords)) if isinstance(leaf, torch.device)]
    if explicit:
        return explicit[-1]
    devices = {tensor.device for tensor in tensors if tensor.dim()} or {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise NotTraceable("tensors on several devices")
    return devices.pop() if devices else torch.get_default_device()


class QueryGuard(TorchFunctionMode):
    """Returns sizes that scale with the batch as counts, and rejects queries for anything but metadata."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function in _REJECTED_QUERIES:
            raise NotTraceable(f"the model calls {function}")
        if torch._C._is_any_autocast_enabled():
            raise NotTraceable("the model enables autocast")
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            return result
        if type(result) is int and function is torch.Tensor.__len__:  # Python converts it to a plain int
            if self._as_count(result) is not result:
                raise NotTraceable("the model calls len() on its batch")
            return result
        return pytree.tree_map(self._answer, result, is_leaf=lambda leaf: isinstance(leaf, torch.Size))

    def _answer(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Size):
            return torch.Size(tuple(map(self._as_count, leaf)))
        if type(leaf) is int:
            return self._as_count(leaf)
        if leaf is None or isinstance(leaf, _ANSWERED_TYPES):
            return leaf
        raise NotTraceable(f"the model reads {type(leaf).__name__} from a tensor")

    def _as_count(self, number: int) -> int:
        is_multiple = self._batch > 1 and number and number % self._batch == 0
        return BatchCount.of(number // self._batch, self._batch) if is_multiple else number


_ANSWERED_TYPES = (torch.Tensor, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_tensor: Any = torch.Tensor
# Attributes that differ between trace tensors and real ones.
_REJECTED_QUERIES: set[Callable[..., Any]] = {
    *(getattr(_tensor, name).__get__ for name in ("requires_grad", "grad_fn", "grad", "is_leaf", "_version")),
    _tensor.is_inference,
    _tensor.data_ptr,
}
