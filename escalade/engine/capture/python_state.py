"""Detection of Python state that changes a model's next results: attributes, lists, globals, random state.

A capture freezes what Python computes, including a counter in `forward`. So captures compare the state of a copy before
and after a run (`StateWatch`). Only if something has changed, another copy runs twice on fake tensors
(`require_repeatable`), and the results are compared as expressions of inputs and constants: a cache yields the same
expressions, a counter does not.
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

from escalade.engine.capture.example_inputs import ExampleInputs
from escalade.engine.capture.global_state import preserve_global_state
from escalade.engine.capture.model_copy import OriginalModel, slot_names
from escalade.engine.capture.reader import CaptureError
from escalade.engine.capture.weights import WeightValues
from escalade.engine.graph.aten import bound_arguments, written_arguments
from escalade.engine.graph.trees import flatten

_ATOMS = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.CodeType, torch.dtype,
          torch.device, torch.layout, torch.memory_format, torch.Size, range, slice,
          types.BuiltinFunctionType)  # fmt: skip
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
"""Compared by their items, not by id: `torch.export` replaces some by copies."""
_WEIGHT_DICTS = ("_parameters", "_buffers")
"""Attributes with a module's weights; `weights` checks what is written to them."""
_HOOKS = (dict, collections.OrderedDict)
_MAX_VALUES = 1 << 17  # values that are compared per model; with more, the model runs twice


class StateWatch:
    """Snapshot of the state of a model copy, to compare with its state after a run."""

    def __init__(
        self,
        original: OriginalModel,
        model: nn.Module,
        find_global_change: Callable[[], str | None] | None = None,
        *,
        exported: bool = False,
    ) -> None:
        """With `exported`, tensors are skipped: `torch.export` replaces them during a run, and itself rejects models
        that store new ones."""
        self._original, self._model, self._exported = original, model, exported
        self._find_global_change = find_global_change or original.find_global_change
        self._random_state_before = _random_state()
        self._alive: list[Any] = []
        self._before = self._collect()

    def record_change(self) -> None:
        """Store the first change since the snapshot in the original."""
        self._original.change = self._original.change or self._change()

    def _change(self) -> str | None:
        """Describe the first thing that has changed since the snapshot; None if nothing has."""
        after = self._collect()
        for path in (*after, *self._before):
            if after.get(path, _MISSING) != self._before.get(path, _MISSING):
                return f"its attribute {path}"
        if len(after) >= _MAX_VALUES:
            return f"one of its attributes, of which more than {_MAX_VALUES} cannot be compared"
        if self._random_state_before != _random_state():
            return "the state of Python's or NumPy's random numbers"
        return self._find_global_change()

    def _collect(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: set[int] = set()
        pending: list[tuple[str, Any]] = [("", self._model)]
        while pending and len(found) < _MAX_VALUES:
            path, value = pending.pop()
            if isinstance(value, _ATOMS):
                found[path] = (type(value), _value_key(value))
                continue
            if self._exported and isinstance(value, torch.Tensor):
                continue
            found[path] = type(value) if isinstance(value, _CONTAINERS) else id(value)
            if id(value) in seen:
                continue
            seen.add(id(value))
            self._alive.append(value)  # while it is alive, its id is not reused
            state = _own_state(value)
            if state is not None:
                found[path] = state
            pending.extend(_children(path, value))
        return found


_MISSING = object()


def _value_key(value: Any) -> Any:
    """Return a key that identifies a value without calling its own `__eq__`."""
    for kind in (int, float):
        if isinstance(value, kind):
            return kind.__repr__(value)
    return value


def _own_state(value: Any) -> Any:
    """Return the state of an object whose attributes do not show it; None for all others."""
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.ndarray):
        return (id(value), value.tobytes() if value.dtype != object else None)
    if isinstance(value, Iterator):
        return object()  # may be advanced by a run, so always counts as changed
    return None


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes, items and cells that a value holds, each with its path."""
    if isinstance(value, torch.Tensor | torch.fx.GraphModule):  # GraphModule code writes only to tensors
        return
    if _is_internal(value):
        return
    if isinstance(value, nn.Module):
        for name, item in list(value.__dict__.items()):
            if name == "_modules":
                yield from ((_join(path, child), module) for child, module in item.items())
            elif name not in _WEIGHT_DICTS and (type(item) not in _HOOKS or item):  # skip empty hook dicts
                yield _join(path, name), item
    elif isinstance(value, dict):
        yield f"{path}.keys()", len(value)
        for index, (key, item) in enumerate(list(value.items())):
            yield f"{path}[{repr(key) if type(key) in (int, str) else index}]", item
    elif isinstance(value, list | tuple | collections.deque):
        yield f"len({path})", len(value)
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(list(value)))
    elif isinstance(value, set | frozenset):
        yield f"{path} as a set", str(sorted(map(_sort_key, value)))
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
            (f"{path}.{name}", getattr(value, name))
            for name in slot_names(type(value))
            if hasattr(value, name)
        )


def _is_internal(value: Any) -> bool:
    """Return True for hooks of a capture and for PyTorch's functions."""
    if isinstance(value, types.MethodType):
        return _is_internal(value.__func__)
    if isinstance(value, types.FunctionType):
        return (value.__module__ or "").startswith(("escalade.engine.", "torch."))
    return type(value).__module__.startswith("escalade.engine.")


def _closure(path: str, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"{path}: {name}", cell.cell_contents
        except ValueError:  # unbound cell
            continue
    for index, default in enumerate(function.__defaults__ or ()):
        yield f"{path}: default {index}", default
    yield from ((f"{path}: {name}", item) for name, item in (function.__kwdefaults__ or {}).items())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _sort_key(value: Any) -> str:
    return repr(value) if isinstance(value, _ATOMS) else str(id(value))


def _random_state() -> Any:
    numpy: Any = np.random.get_state(legacy=False)
    return random.getstate(), repr(numpy["state"]["pos"]), numpy["state"]["key"].tobytes()


def require_repeatable(original: OriginalModel, example: ExampleInputs) -> None:
    """Reject a model that changes Python state if its second call returns something else for the same inputs."""
    name, change = type(original.model).__name__, original.change
    if change is None:
        return
    try:
        repeatable = _is_repeatable(original, example)
    except Exception as error:  # the change could not be shown to be harmless
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CaptureError(
            f"{name} changes {change} when it runs, and its next results may depend on that: it does not run twice on "
            f"fake tensors ({reason}); compile takes models without state: pass what changes as an input"
        ) from error
    if not repeatable:
        raise CaptureError(
            f"{name} changes {change} when it runs, and its next results depend on that; compile takes models without "
            "state: pass what changes as an input, or use torch.compile(model, backend='escalade'), which "
            "recompiles the model for each state"
        )


def _is_repeatable(original: OriginalModel, example: ExampleInputs) -> bool:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    weight_values, expressions = WeightValues(), _Expressions()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = mode.from_tensor(tensor)
        weight_values.set_values(made, tensor.detach())
        expressions.constant(made, tensor)
        return made

    model = original.copy(fake)
    weights: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (held, dict(held)) for module in model.modules() for held in (module._parameters, module._buffers)
    ]
    returned = []
    with preserve_global_state(original.model, autocast=True):
        for _ in range(2):
            inputs = [mode.from_tensor(tensor) for tensor in example.tensors]
            expressions.inputs(inputs)
            arguments, keywords = example.call(inputs)
            with mode, weight_values, expressions:
                tensors, structure = flatten(model(*arguments, **keywords))
            returned.append((list(map(expressions.of, tensors)), structure))
            expressions.end_call()
            for held, before in weights:  # `weights` checks what is written to them
                held.clear()
                held.update(before)
    return bool(returned[0] == returned[1])


class _Expressions(TorchDispatchMode):
    """Value numbering: gives the contents of every storage the id of an expression of inputs, constants and operators.

    Equal expressions have equal ids. An expression of an earlier call's inputs or random numbers equals none of a later
    call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ids: dict[Any, int] = {}
        self._by_storage: dict[int, int] = {}
        self._changing: set[int] = set()
        """Expressions that depend on inputs or random numbers."""
        self._constants: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def constant(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        self._set(fake, self._id(("constant", storage, tensor.numel() or id(tensor))))
        self._constants[_storage(fake)] = self._by_storage[_storage(fake)]

    def inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            expression = self._id(("input", index))
            self._changing.add(expression)
            self._set(tensor, expression)

    def end_call(self) -> None:
        """Mark values of this call as stale, and reset weights."""
        for storage, expression in self._by_storage.items():
            if expression in self._changing:
                self._by_storage[storage] = self._id(("stale", expression))
        self._by_storage |= self._constants

    def of(self, tensor: torch.Tensor) -> Any:
        storage = _storage(tensor)
        if storage not in self._by_storage:
            self._set(tensor, self._id(("data", _data_key(tensor))))
        geometry = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return self._by_storage[storage], geometry

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = _tensors(leaves)
        keys = tuple(self.of(leaf) if isinstance(leaf, torch.Tensor) else _repr_key(leaf) for leaf in leaves)
        key = (str(function), keys, str(structure))
        changing = any(self._by_storage[_storage(tensor)] in self._changing for tensor in tensors)
        changing |= torch.Tag.nondeterministic_seeded in getattr(function, "tags", ())
        result = function(*args, **kwargs)
        for index, tensor in enumerate(_tensors(_written(function, args, kwargs))):
            self._set(tensor, self._id(("written", index, key)), changing)
        for index, tensor in enumerate(_tensors(result)):
            if _storage(tensor) not in self._by_storage:  # neither a view nor in place
                self._set(tensor, self._id((index, key)), changing)
        return result

    def _id(self, key: Any) -> int:
        return self._ids.setdefault(key, len(self._ids))

    def _set(self, tensor: torch.Tensor, expression: int, changing: bool = False) -> None:
        self._alive.append(tensor)
        self._by_storage[_storage(tensor)] = expression
        if changing:
            self._changing.add(expression)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call writes to."""
    if not isinstance(function, torch._ops.OpOverload):
        return []
    bound = bound_arguments(function, args, kwargs)
    return [bound[name] for name in written_arguments(function) if name in bound]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _repr_key(value: Any) -> Any:
    return (type(value), repr(value))


def _data_key(tensor: torch.Tensor) -> Any:
    """Return a key for the contents of a tensor that was created in Python."""
    if isinstance(tensor, FakeTensor):
        return id(tensor)
    with _disable_current_modes(), torch.no_grad():
        return tensor.dtype, tuple(tensor.shape), repr(tensor.detach().flatten().tolist())
