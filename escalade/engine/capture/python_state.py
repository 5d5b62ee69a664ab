"""Detects state that a model keeps in Python: attributes, lists, globals, random numbers that change its next results.

A capture runs a copy of the model and freezes what Python computes. A counter in `forward` would be frozen with it. So
captures compare what a copy holds before and after a run (`Watch`). Only where something has changed, another
copy runs twice on fake tensors (`require_repeatable`), and what both runs return is compared as expressions of inputs
and constants: a cache gives the same expressions, a counter does not.
"""

from __future__ import annotations

import collections
import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from escalade.engine.capture.contents import Contents
from escalade.engine.capture.example_inputs import Given
from escalade.engine.capture.global_state import undisturbed
from escalade.engine.capture.model_copy import Original, slots
from escalade.engine.capture.reader import CaptureError
from escalade.engine.graph.trees import flatten

_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.CodeType, torch.dtype,
          torch.device, torch.layout, torch.memory_format, torch.Size, range, slice,
          types.BuiltinFunctionType)  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
"""Told by what they hold: `torch.export` puts copies in the place of some."""
_TENSORS = ("_parameters", "_buffers")
"""Tensors by which a module holds its weights: `capture/state` follows what is written to them."""
_HOOKS = (dict, collections.OrderedDict)
_MOST_VALUES = 1 << 17
"""Values of a model that are compared; beyond, a model counts as one that changes."""


class Watch:
    """Snapshot of the state of a model copy, to compare with its state after a run."""

    def __init__(
        self,
        original: Original,
        model: nn.Module,
        changed_outside: Callable[[], str | None] | None = None,
        *,
        exports: bool = False,
    ) -> None:
        """While `torch.export` runs the copy it puts other tensors in the place of its own, and refuses itself those
        that the model keeps."""
        self._original, self._model, self._exports = original, model, exports
        self._changed_outside = changed_outside or original.changed_outside
        self._drawn = _random_state()
        self._alive: list[Any] = []
        self._before = self._values()

    def note(self) -> None:
        """Have the original know what a run has changed."""
        self._original.change = self._original.change or self._change()

    def _change(self) -> str | None:
        """Name the first thing that has changed since, or that changes unseen; None if there is none."""
        after = self._values()
        for path in (*after, *self._before):
            if after.get(path, _ABSENT) != self._before.get(path, _ABSENT):
                return f"its attribute {path}"
        if self._drawn != _random_state():
            return "the state of Python's or NumPy's random numbers"
        return self._changed_outside()

    def _values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: set[int] = set()
        ahead: list[tuple[str, Any]] = [("", self._model)]
        while ahead and len(found) < _MOST_VALUES:
            path, value = ahead.pop()
            if isinstance(value, _ATOMS):
                found[path] = (type(value), _plain_repr(value))
                continue
            if self._exports and isinstance(value, torch.Tensor):
                continue
            found[path] = type(value) if isinstance(value, _CONTAINERS) else id(value)
            if id(value) in seen:
                continue
            seen.add(id(value))
            self._alive.append(value)  # as long as it lives, no other has its identity
            state = _own_state(value)
            if state is not None:
                found[path] = state
            ahead.extend(_parts(path, value))
        return found


_ABSENT = object()


def _plain_repr(value: Any) -> Any:
    """Return a key that identifies a value without calling its own `__eq__`."""
    for kind in (int, float):
        if isinstance(value, kind):
            return kind.__repr__(value)
    return value


def _own_state(value: Any) -> Any:
    """The state of an object that Python cannot look into."""
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return (id(value), value.tobytes() if value.dtype != object else None)
    if isinstance(value, Iterator):
        return object()  # it may be used up: always a change
    return None


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes, items and cells that a value holds, each with its path."""
    if isinstance(value, torch.Tensor | torch.fx.GraphModule):  # whose code writes to nothing but tensors
        return
    if _is_ours(value):
        return
    if isinstance(value, nn.Module):
        for name, item in list(value.__dict__.items()):
            if name == "_modules":
                yield from ((_joined(path, child), module) for child, module in item.items())
            elif name not in _TENSORS and (type(item) not in _HOOKS or item):  # most have no hooks
                yield _joined(path, name), item
    elif isinstance(value, dict):
        yield f"{path}.keys()", len(value)
        for place, (key, item) in enumerate(list(value.items())):
            yield f"{path}[{repr(key) if type(key) in (int, str) else place}]", item
    elif isinstance(value, list | tuple | collections.deque):
        yield f"len({path})", len(value)
        yield from ((f"{path}[{place}]", item) for place, item in enumerate(list(value)))
    elif isinstance(value, set | frozenset):
        yield f"{path} as a set", str(sorted(map(_ordered, value)))
    elif isinstance(value, types.FunctionType):
        yield from _closure(path, value)
        yield from ((f"{path}.{name}", item) for name, item in list(value.__dict__.items()))
    elif isinstance(value, types.MethodType):
        yield from ((f"{path}.__func__", value.__func__), (f"{path}.__self__", value.__self__))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    else:
        yield from ((f"{path}.{name}", item) for name, item in list(getattr(value, "__dict__", {}).items()))
        yield from (
            (f"{path}.{name}", getattr(value, name)) for name in slots(type(value)) if hasattr(value, name)
        )


def _is_ours(value: Any) -> bool:
    """Hooks by which a capture follows a copy, and PyTorch's own functions."""
    if isinstance(value, types.MethodType):
        return _is_ours(value.__func__)
    if isinstance(value, types.FunctionType):
        return (value.__module__ or "").startswith(("escalade.engine.", "torch."))
    return type(value).__module__.startswith("escalade.engine.")


def _closure(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}: {name}", cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    for place, default in enumerate(function.__defaults__ or ()):
        yield f"{path}: default {place}", default
    yield from ((f"{path}: {name}", item) for name, item in (function.__kwdefaults__ or {}).items())


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _ordered(value: Any) -> str:
    return repr(value) if isinstance(value, _ATOMS) else str(id(value))


def _random_state() -> Any:
    numpy: Any = np.random.get_state(legacy=False)
    return random.getstate(), repr(numpy["state"]["pos"]), numpy["state"]["key"].tobytes()


def require_repeatable(original: Original, given: Given) -> None:
    """Refuse a model that was seen to change something in Python if its second call returns something else than its
    first for the same inputs."""
    name, change = type(original.model).__name__, original.change
    if change is None:
        return
    try:
        alike = _returns_alike(original, given)
    except Exception as error:  # the change is known, and nothing speaks for it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CaptureError(
            f"{name} changes {change} when it runs, and whether its next results depend on that is unknown: it cannot "
            f"be run twice on tensors without contents ({reason}); compile takes models without state"
        ) from error
    if not alike:
        raise CaptureError(
            f"{name} changes {change} when it runs, and its next results depend on that; compile takes models without "
            "state: pass what changes as an input, or use torch.compile(model, backend='escalade'), which compiles the "
            "model again for each state"
        )


def _returns_alike(original: Original, given: Given) -> bool:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    contents, expressions = Contents(), _Expressions()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = mode.from_tensor(tensor)
        contents.know(made, tensor.detach())
        expressions.constant(made, tensor)
        return made

    model = original.copied(fake)
    weights: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for module in model.modules() for held in (module._parameters, module._buffers)
    ]
    returned = []
    with undisturbed(original.model, autocast=True):
        for _ in range(2):
            inputs = [mode.from_tensor(tensor) for tensor in given.tensors]
            expressions.inputs(inputs)
            arguments, keywords = given.call(inputs)
            with mode, contents, expressions:
                tensors, structure = flatten(model(*arguments, **keywords))
            returned.append((list(map(expressions.of, tensors)), structure))
            expressions.end_call()
            for held, before in weights:  # what is written to weights is for `capture/state` to judge
                held.clear()
                held.update(before)
    return bool(returned[0] == returned[1])


class _Expressions(TorchDispatchMode):
    """Numbers what every storage holds as an expression of inputs, constants and operators.

    Equal expressions have equal numbers. What depends on the inputs of an earlier call, or on random numbers drawn in
    it, is equal to nothing of a later one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Any, int] = {}
        self._of_storage: dict[int, int] = {}
        self._changing: set[int] = set()
        """Expressions of inputs and of random numbers."""
        self._constants: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def constant(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        self._set(fake, self._number(("constant", storage, tensor.numel() or id(tensor))))
        self._constants[_storage(fake)] = self._of_storage[_storage(fake)]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        for place, tensor in enumerate(tensors):
            number = self._number(("input", place))
            self._changing.add(number)
            self._set(tensor, number)

    def end_call(self) -> None:
        """Mark state that changes from call to call as stale; weights are unchanged."""
        for storage, number in self._of_storage.items():
            if number in self._changing:
                self._of_storage[storage] = self._number(("stale", number))
        self._of_storage |= self._constants

    def of(self, tensor: torch.Tensor) -> Any:
        storage = _storage(tensor)
        if storage not in self._of_storage:
            self._set(tensor, self._number(("numbers", _contents(tensor))))
        geometry = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return self._of_storage[storage], geometry

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        said = tuple(self.of(leaf) if isinstance(leaf, torch.Tensor) else _plain(leaf) for leaf in leaves)
        key = (str(function), said, str(structure))
        changing = any(self._of_storage[_storage(tensor)] in self._changing for tensor in tensors)
        changing |= torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        result = function(*args, **kwargs)
        written = [
            value
            for argument, value in _bound(function, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for place, tensor in enumerate(
            one for one in pytree.tree_leaves(written) if isinstance(one, torch.Tensor)
        ):
            self._set(tensor, self._number(("written", place, key)), changing)
        for place, tensor in enumerate(
            one for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor)
        ):
            if _storage(tensor) not in self._of_storage:  # no view, and nothing in place
                self._set(tensor, self._number((place, key)), changing)
        return result

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def _set(self, tensor: torch.Tensor, number: int, changing: bool = False) -> None:
        self._alive.append(tensor)
        self._of_storage[_storage(tensor)] = number
        if changing:
            self._changing.add(number)


def _bound(function: Any, args: Any, kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    schema = getattr(function, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if place < len(args):
            yield argument, args[place]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _plain(value: Any) -> Any:
    return (type(value), repr(value))


def _contents(tensor: torch.Tensor) -> Any:
    """The numbers of a tensor that Python has made."""
    if isinstance(tensor, FakeTensor):
        return id(tensor)
    with _disable_current_modes(), torch.no_grad():
        return tensor.dtype, tuple(tensor.shape), repr(tensor.detach().flatten().tolist())
