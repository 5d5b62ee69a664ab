"""Tensors without contents that a model is followed with, and all that is noted of what it does with them.

PyTorch has such tensors of its own; they take seconds to load, with all of its compiler.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from escalade.engine.capture.reader import mutates
from escalade.engine.capture.results import result_of
from escalade.engine.graph.aten import draws
from escalade.errors import EscaladeError


class NotFollowed(EscaladeError):
    """The model does what only `torch.export` can tell."""


class Spelled(NotFollowed):
    """The model makes a text of its batch: `torch.export` would give it the name of a symbol."""


class Count(int):
    """The size of a batch, or a multiple of it: a model may pass it on, and compute with it what comes out alike for
    every batch, so many times that. Whatever else it does, such as a comparison with a number, may come out otherwise
    for another batch."""

    times: int
    """The size for one item."""

    @staticmethod
    def of(times: int, batch: int) -> Count:
        made = Count(times * batch)
        made.times = times
        return made

    def _with(self, times: int) -> Count:
        return Count.of(times, int.__floordiv__(self, self.times))

    def __mul__(self, other: Any) -> Any:
        return self._with(self.times * _number(other))

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        if type(other) is int and not other:  # as `sum` begins
            return self
        return self._with(self.times + _times(other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        left = self.times - _times(other)
        return self._with(left) if left > 0 else 0 if not left else _refused()

    def __floordiv__(self, other: Any) -> Any:
        whole, rest = divmod(self.times, _divisor(other))
        if rest:
            _refused()
        return whole if isinstance(other, Count) else self._with(whole)

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, Count):
            return self.times / other.times
        if type(other) not in (int, float) or not other or not (each := self.times / other).is_integer():
            _refused()
        return Quotient(int.__truediv__(self, self.times) * each)

    def __mod__(self, other: Any) -> Any:
        return _refused() if self.times % _divisor(other) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Count):
            raise NotFollowed("the model decides by its batch")
        return int.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return True


class Quotient(float):
    """A count by a number, where that leaves no rest for any batch: a model may make a whole number of it."""


def _number(value: Any) -> int:
    if type(value) is not int:
        raise NotFollowed("the model computes with its batch")
    return value


def _times(value: Any) -> int:
    return value.times if isinstance(value, Count) else _refused()


def _divisor(value: Any) -> int:
    number = _times(value) if isinstance(value, Count) else _number(value)
    return number if number > 0 else _refused()


def _refused(*_: Any) -> Any:
    raise NotFollowed("the model computes with its batch")


def _spelled(*_: Any) -> Any:
    raise Spelled("the model makes a text of its batch")


_KEPT = {"__new__", "__getattribute__", "__index__", "__sizeof__", *vars(Count)}
for _name in [name for name, value in vars(int).items() if callable(value) and name not in _KEPT]:
    setattr(Count, _name, _refused)
_KEPT = {"__new__", "__getattribute__", "__int__", "__trunc__", "__floor__", "__ceil__"}
for _name in [name for name, value in vars(float).items() if callable(value) and name not in _KEPT]:
    setattr(Quotient, _name, _refused)
Count.__hash__ = Quotient.__hash__ = _refused  # type: ignore[method-assign,assignment]
for _name in ("__str__", "__repr__", "__format__"):
    setattr(Count, _name, _spelled)
    setattr(Quotient, _name, _spelled)


class Hollow(torch.Tensor):
    """A tensor that has sizes, a type and a device, and no numbers."""

    meta: torch.Tensor
    node: torch.fx.Node
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device) -> Hollow:
        made: Hollow = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            layout=meta.layout,
            device=device,
        )
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotFollowed("a tensor without contents is used when the model has ended")


class Calls(TorchDispatchMode):
    """Notes the operators that are called, as a graph of `torch.fx`; in inference mode PyTorch leaves them whole."""

    def __init__(self, batch: int, most: int) -> None:
        """The first sizes of inputs are `batch`, and no more calls are noted than `most`."""
        super().__init__()
        self.graph = torch.fx.Graph()
        self.constants: dict[torch.fx.Node, torch.Tensor] = {}
        self.modules: list[str] = [""]
        """The module that runs, inside those that called it."""
        self._batch, self._left = batch, most

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch need not load its compiler to keep it away from here: where it is loaded, it is away."""
        return False

    def input(self, name: str, meta: torch.Tensor, device: torch.device) -> Hollow:
        return self._node(Hollow(meta, device), self.graph.placeholder(name))

    def constant(self, tensor: torch.Tensor) -> Hollow:
        """A tensor of the model's; what it holds is not looked at."""
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise NotFollowed("a tensor that is not dense")
        with torch.inference_mode():
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            made = self._node(Hollow(meta, tensor.device), self.graph.placeholder("constant"))
        self.constants[made.node] = tensor
        return made

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        given: list[Any] = [
            leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)
        ]
        self._check(function, given, arguments, keywords)
        result = result_of(function, _bare(arguments), _bare(keywords))
        for tensor in given:
            if result is tensor.meta and not function._schema.is_mutable:
                return tensor  # nothing is done: a layer that works in training, a type that it has already
        if draws(function, _bound(function, arguments, keywords)):
            raise NotFollowed(f"{function} draws random numbers")
        self._left -= 1
        if self._left < 0:
            raise NotFollowed("the model does more for a larger batch")
        node = self.graph.create_node(
            "call_function",
            function,
            _nodes(arguments),
            _nodes(keywords),
            function.overloadpacket.__name__,
        )
        node.meta["source"] = self.modules[-1]
        device = _device(given, arguments, keywords)
        if mutates(node):
            return self._changed(node, result, given)
        if function._schema.is_mutable:
            raise NotFollowed(f"{function} writes to its arguments")
        if isinstance(result, torch.Tensor):
            return self._node(Hollow(result, device), node)
        if not isinstance(result, tuple | list) or not all(isinstance(one, torch.Tensor) for one in result):
            raise NotFollowed(f"{function} gives {type(result).__name__}")
        node.meta["val"] = tuple(result)
        parts = [
            self._node(Hollow(one, device), self.graph.call_function(operator.getitem, (node, place)))
            for place, one in enumerate(result)
        ]
        for part in parts:
            part.node.meta["source"] = self.modules[-1]
        return type(result)(parts) if type(result) in (tuple, list) else tuple(parts)

    @staticmethod
    def _node(made: Hollow, node: torch.fx.Node) -> Hollow:
        made.node = node
        node.meta["val"] = made.meta
        return made

    def _changed(self, node: torch.fx.Node, result: Any, given: list[Any]) -> Any:
        """A tensor that is changed in place is the same one behind it, of the same sizes."""
        first = given[0]
        if first.node is not node.args[0] or result is not first.meta or first.node in self.constants:
            raise NotFollowed(f"{node.target} writes to what the model holds")
        if (result.shape, result.stride()) != (first.shape, first.stride()):
            raise NotFollowed(f"{node.target} changes sizes")
        node.meta["val"] = result
        return first

    def _check(self, function: Any, given: list[torch.Tensor], arguments: Any, keywords: Any) -> None:
        if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
            raise NotFollowed(f"{function} is not one of PyTorch's own operators")
        if not all(isinstance(tensor, Hollow) for tensor in given):
            raise NotFollowed("a tensor from outside of the model")
        bound = _bound(function, arguments, keywords)
        trains = bound.get("training") or bound.get("use_input_stats")
        if trains and bound.get("running_mean") is not None:
            raise NotFollowed(f"{function} trains")
        if function.overloadpacket.__name__ in _PARTS and given and self._batch > 1:
            dimension = bound.get("dim")
            size = 0 if dimension is None else given[0].shape[dimension]
            if size % self._batch == 0 and not (_is_all(bound) or _is_alike(bound, size, self._batch)):
                raise NotFollowed("some items of the batch")


_PARTS = (
    "slice", "select", "narrow", "narrow_copy", "split", "split_with_sizes", "chunk", "tensor_split", "unbind",
    "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "hsplit", "vsplit", "dsplit", "slice_scatter",
    "select_scatter", "slice_copy", "select_copy", "split_copy", "unbind_copy",
)  # fmt: skip
"""Operators that take a part of a dimension, as far as it is there: a batch with fewer items gives another."""


def _is_all(bound: dict[str, Any]) -> bool:
    """Whether a range is all of its dimension, however long that is."""
    endless = bound.get("end") is None or bound["end"] == torch.iinfo(torch.int64).max
    return "step" in bound and bound["step"] == 1 and bound.get("start") in (None, 0) and endless


def _is_alike(bound: dict[str, Any], size: int, batch: int) -> bool:
    """Whether the parts of a dimension of so many items are those of its part for one item, for every batch."""
    if not size or bound.get("step", 1) != 1:
        return False
    if "chunks" in bound:
        return size // batch % bound["chunks"] == 0
    ends = [bound[name] for name in ("start", "end", "length", "split_size", "split_sizes") if name in bound]
    numbers = [number for number in pytree.tree_leaves(ends) if number is not None]
    return bool(numbers) and all(type(one) in (int, Count) and _is_multiple(one, batch) for one in numbers)


def _is_multiple(number: int, batch: int) -> bool:
    endless = int.__index__(number) == torch.iinfo(torch.int64).max
    return endless or (int.__ge__(number, 0) and int.__mod__(number, batch) == 0)


def _bound(function: Any, arguments: Any, keywords: Any) -> dict[str, Any]:
    """All arguments by name, with their defaults."""
    schema = function._schema.arguments
    bound = {one.name: one.default_value for one in schema if one.has_default_value()}
    return bound | dict(zip((one.name for one in schema), arguments, strict=False)) | keywords


def _bare(tree: Any) -> Any:
    """Arguments for tensors on PyTorch's device without contents."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Hollow):
            return value.meta
        return torch.device("meta") if isinstance(value, torch.device) else value

    return pytree.tree_map(leaf, tree)


def _nodes(tree: Any) -> Any:
    return pytree.tree_map(lambda value: value.node if isinstance(value, Hollow) else value, tree)


def _device(given: list[Any], arguments: Any, keywords: Any) -> torch.device:
    """Where a result is: where that is said, or where the tensors are; numbers may lie on the CPU."""
    said = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, torch.device)]
    if said:
        return said[-1]
    found = {tensor.device for tensor in given if tensor.dim()} or {tensor.device for tensor in given}
    if len(found) > 1:
        raise NotFollowed("tensors on several devices")
    return found.pop() if found else torch.get_default_device()


class Questions(TorchFunctionMode):
    """What the model asks of its tensors: sizes that grow with the batch it gets as counts, and what depends on
    anything but sizes, types and devices is not answered."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function in _UNANSWERED:
            raise NotFollowed(f"the model asks for {function}")
        if torch._C._is_any_autocast_enabled():
            raise NotFollowed("a block in autocast")
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor):
            return result
        if type(result) is int and function is torch.Tensor.__len__:  # Python makes a plain number of it
            if self._counted(result) is not result:
                raise NotFollowed("the model asks for its batch as a length")
            return result
        return pytree.tree_map(self._answer, result, is_leaf=lambda leaf: isinstance(leaf, torch.Size))

    def _answer(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Size):
            return torch.Size(tuple(map(self._counted, leaf)))
        if type(leaf) is int:
            return self._counted(leaf)
        if leaf is None or isinstance(leaf, _ANSWERS):
            return leaf
        raise NotFollowed(f"the model gets {type(leaf).__name__} out of a tensor")

    def _counted(self, number: int) -> int:
        whole = self._batch > 1 and number and number % self._batch == 0
        return Count.of(number // self._batch, self._batch) if whole else number


_ANSWERS = (torch.Tensor, bool, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_tensor: Any = torch.Tensor
_UNANSWERED: set[Callable[..., Any]] = {
    *(getattr(_tensor, name).__get__ for name in ("requires_grad", "grad_fn", "grad", "is_leaf", "_version")),
    _tensor.is_inference,
    _tensor.data_ptr,
}
"""What is otherwise of tensors without contents."""
