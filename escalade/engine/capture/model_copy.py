"""Copies of a caller's model that run in its place, so that a capture never changes the model itself.

A capture runs a model on fake tensors. A model may store them in a cache, a list or its parameters, and another thread
may be using the model in the meantime.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from escalade.errors import UnsupportedError

TensorMap = Callable[[torch.Tensor], torch.Tensor]
_GRAPH_MODULE_STATE = ("_parameters", "_buffers", "_modules")
"""Attributes of a `torch.fx.GraphModule` that its code uses; the others describe that code."""
_LruCache = type(functools.lru_cache(lambda: None))


class OriginalModel:
    """The caller's model, and copies of its tensors that all copies of the model share."""

    def __init__(
        self,
        model: nn.Module,
        owned: Iterable[torch.Tensor] | None = (),
        shared: Mapping[int, Any] | None = None,
        find_global_change: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`owned` tensors are used by nothing else and are not copied; None stands for all, if no copy runs on real
        tensors. Nor are `shared` objects (by id) copied, which are outside the model. `find_global_change` describes a
        change of these by a run.
        """
        self.model = model
        self.find_global_change = find_global_change
        self.change: str | None = None
        """Description of the first change of Python state that a run of a copy was seen to make."""
        self.read_weights: set[str] = set()
        """Names of the weights whose values a run has read."""
        self._shared = shared or {}
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        self._owns_all = owned is None
        self._storages = {
            tensor.untyped_storage().data_ptr() for tensor in owned or () if _has_address(tensor)
        }
        self._byte_ranges: dict[int, tuple[torch.device, int, int]] = {}
        """Device, first and last byte of the caller's tensor, by storage of its copy."""
        self._alive: list[Any] = []

    def copy(self, convert: TensorMap = lambda tensor: tensor, *, evaluation: bool = True) -> nn.Module:
        """Return a new copy with each tensor converted, in evaluation mode or in the caller's modes."""
        copier = _Copier(lambda tensor: convert(self._tensor(tensor)), self._shared)
        model: nn.Module = copier.copy(self.model)
        self._alive.append(copier.copies)  # keeps the targets of weak references among them alive
        _keep_weights_apart(model)
        if not evaluation:
            return model
        with contextlib.suppress(NotImplementedError):  # the module of an exported program has no modes
            model.eval()
        return model

    def snapshot(self) -> ModelSnapshot:
        """Return a copy of the model as it is now, for later captures."""
        copier = _Copier(self._tensor, self._shared)
        model: nn.Module = copier.copy(self.model)
        return ModelSnapshot(model, [*self._tensors.values()], copier.copies)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return True if only the copies use the tensor's memory."""
        return _has_address(tensor) and (
            self._owns_all or tensor.untyped_storage().data_ptr() in self._storages
        )

    def overlap(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return True if the caller's tensors that these two are copies of may share memory.

        The copies do not: a view of a parameter becomes a separate tensor.
        """
        storages = [tensor.untyped_storage().data_ptr() for tensor in (one, other)]
        if storages[0] == storages[1]:
            return True
        if not self._byte_ranges.keys() >= {*storages}:
            return False
        (device, first, last), (other_device, other_first, other_last) = (
            self._byte_ranges[storage] for storage in storages
        )
        return device == other_device and first <= other_last and other_first <= last

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a new tensor object on the shared copy of the tensor's data."""
        if is_lazy(tensor):
            raise UnsupportedError(
                "the model has uninitialized parameters (lazy modules): call it once with an input, then compile it"
            )
        if tensor.is_meta:
            raise UnsupportedError("the model has weights on the meta device; load them, then compile it")
        with torch._C.DisableTorchFunctionSubclass():
            data = self._data(tensor).detach()
            requires_grad = tensor.requires_grad
            if not isinstance(tensor, nn.Parameter):
                copied = data.requires_grad_() if requires_grad else data
            elif type(tensor) is nn.Parameter or type(data) is not torch.Tensor:
                copied = nn.Parameter(data, requires_grad)
            else:
                copied = torch.Tensor._make_subclass(type(tensor), data, requires_grad)
        if tensor.__dict__:
            copied.__dict__.update(tensor.__dict__)
        return copied

    def _data(self, tensor: torch.Tensor) -> torch.Tensor:
        key: tuple[Any, ...] = (id(tensor),)
        if _has_address(tensor):
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if key not in self._tensors:
            self._alive.append(tensor)  # while it is alive, its id and its address are not reused
            copied = self._tensors[key] = tensor.detach() if self.owns(tensor) else _clone(tensor)
            if _has_address(copied):
                storage = copied.untyped_storage().data_ptr()
                self._storages.add(storage)
                self._byte_ranges[storage] = (tensor.device, *_byte_range(tensor))
        return self._tensors[key]


def _keep_weights_apart(model: nn.Module) -> None:
    """Disable `flatten_parameters` in the recurrent layers of a copy.

    It moves their weights into one buffer for cuDNN, by an operator that only the first run calls, and it compares
    addresses, which tensors do not have while they are traced.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _do_nothing  # type: ignore[method-assign]


def _do_nothing() -> None:
    pass


@dataclass(frozen=True)
class ModelSnapshot:
    """A copy that is never run or changed, to serve as the original of later captures."""

    model: nn.Module
    tensors: list[torch.Tensor]
    """Tensor data that all copies share."""
    alive: list[Any]
    """All copied objects, since weak references among them do not keep their targets alive."""


class _Copier:
    """Deep copy of everything mutable that is reachable from a model.

    Includes what containers, closures, bound methods and objects of the caller's classes hold. Code, classes and what
    cannot be copied (locks, files, generators) are shared with the caller.
    """

    def __init__(self, tensor: TensorMap, shared: Mapping[int, Any]) -> None:
        self._tensor = tensor
        self._copies: dict[int, Any] = dict(shared)
        self._alive: list[Any] = []
        self._slots: dict[type, tuple[str, ...]] = {}

    def copy(self, value: Any) -> Any:
        # A network has thousands of attributes, most of them numbers, names and empty dicts: exact types come first.
        kind = type(value)
        if kind in _EXACT_SHARED_TYPES or (kind not in _DICTS and issubclass(kind, _SHARED_TYPES)):
            return value
        if id(value) not in self._copies:
            self._register(value, self._copy(value))
        return self._copies[id(value)]

    @property
    def copies(self) -> list[Any]:
        return [*self._copies.values()]

    def _register(self, value: Any, copied: Any) -> Any:
        """Use `copied` for every further reference to `value`."""
        self._copies[id(value)] = copied
        self._alive.append(value)
        return copied

    def _copy(self, value: Any) -> Any:
        is_dict = type(value) in _DICTS
        if type(value) in weakref.ProxyTypes:  # first: isinstance sees a proxy's target
            return weakref.proxy(self.copy(value.__init__.__self__))
        if not is_dict and isinstance(value, torch.Tensor):
            return self._tensor(value)
        if not is_dict and isinstance(value, nn.Module):
            return self._module(value)
        try:
            for kind, copier in self._COPIERS.items():
                if isinstance(value, kind):
                    return copier(self, value)
            if _is_plain_object(value):
                return self._object(value, object.__new__(type(value)))
            return copy.deepcopy(value, self._copies)
        except (UnsupportedError, RecursionError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # not copyable by its class, so share it
            return value

    def _module(self, module: nn.Module) -> nn.Module:
        inner = _unwrap(module)
        if inner is not None:
            return self.copy(inner)
        if isinstance(module, torch.jit.ScriptModule):
            name = getattr(module, "original_name", type(module).__name__)
            raise UnsupportedError(
                f"{name} is TorchScript, which PyTorch cannot export; compile the torch.nn.Module that it was "
                "scripted or traced from"
            )
        copied = object.__new__(type(module))
        if isinstance(module, torch.fx.GraphModule):
            self._register(module, copied)
            for name, value in list(module.__dict__.items()):
                own = name in _GRAPH_MODULE_STATE or isinstance(value, torch.Tensor)
                copied.__dict__[name] = self.copy(value) if own else value
        else:
            self._object(module, copied)
        if copied.__dict__.get("_compiled_call_impl") is not None:
            copied.__dict__["_compiled_call_impl"] = None  # undo `model.compile()`
        return copied

    def _object(self, value: Any, copied: Any) -> Any:
        """Copy attributes directly into `__dict__` and slots, bypassing `__setattr__` of the class."""
        self._register(value, copied)
        if hasattr(value, "__dict__"):
            for name, attribute in list(value.__dict__.items()):
                copied.__dict__[name] = self.copy(attribute)
        kind = type(value)
        if kind not in self._slots:
            self._slots[kind] = tuple(slot_names(kind))
        for name in self._slots[kind]:
            if hasattr(value, name):
                object.__setattr__(copied, name, self.copy(getattr(value, name)))
        return copied

    def _dict(self, value: dict[Any, Any]) -> Any:
        if type(value) in _DICTS and not getattr(value, "__dict__", None):
            plain = self._register(value, type(value)())
            for key, item in list(value.items()):
                plain[self.copy(key)] = self.copy(item)
            return plain
        if type(value).__new__ not in (dict.__new__, collections.OrderedDict.__new__):
            return copy.deepcopy(value, self._copies)
        copied = self._object(value, type(value).__new__(type(value)))
        if isinstance(value, collections.defaultdict):
            copied.default_factory = self.copy(value.default_factory)
        base = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        for key, item in list(value.items()):
            base.__setitem__(copied, self.copy(key), self.copy(item))
        return copied

    def _list(self, value: list[Any]) -> Any:
        copied = self._object(value, type(value).__new__(type(value)))
        list.extend(copied, [self.copy(item) for item in value])
        return copied

    def _set(self, value: set[Any]) -> Any:
        copied = self._object(value, type(value).__new__(type(value)))
        set.update(copied, {self.copy(item) for item in value})
        return copied

    def _frozen_set(self, value: frozenset[Any]) -> Any:
        return type(value)(self.copy(item) for item in value)

    def _deque(self, value: collections.deque[Any]) -> Any:
        return self._register(value, type(value)((self.copy(item) for item in value), value.maxlen))

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        """Copy a tuple, unless nothing in it had to be copied, as with sizes."""
        items = [self.copy(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)._make(items)  # type: ignore[attr-defined]
        return type(value)(items)

    def _function(self, value: types.FunctionType) -> Any:
        """Copy a function with its closure and defaults; unwrap `torch.compile`d ones."""
        inner = getattr(value, "_torchdynamo_orig_callable", None)
        if inner is not None:
            return self.copy(inner)
        is_torch = (value.__module__ or "").partition(".")[0] == "torch"
        if is_torch or not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return value
        # Every cell exists before any content is copied: a function in one cell may use the variable of another.
        created = [cell for cell in value.__closure__ or () if id(cell) not in self._copies]
        cells = [
            self._copies.get(id(cell)) or self._register(cell, types.CellType())
            for cell in value.__closure__ or ()
        ]
        copied = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
        self._register(value, copied)
        for cell in created:
            with contextlib.suppress(ValueError):  # unbound cell
                self._copies[id(cell)].cell_contents = self.copy(cell.cell_contents)
        copied.__defaults__ = self.copy(value.__defaults__)
        copied.__kwdefaults__ = self.copy(value.__kwdefaults__)
        copied.__qualname__, copied.__module__, copied.__doc__ = (
            value.__qualname__, value.__module__, value.__doc__,
        )  # fmt: skip
        copied.__annotations__ = value.__annotations__
        copied.__dict__.update((name, self.copy(item)) for name, item in value.__dict__.items())
        return copied

    def _method(self, value: types.MethodType) -> Any:
        return types.MethodType(self.copy(value.__func__), self.copy(value.__self__))

    def _partial(self, value: functools.partial[Any]) -> Any:
        arguments = [self.copy(item) for item in value.args]
        return type(value)(self.copy(value.func), *arguments, **self.copy(value.keywords))

    def _lru_cached(self, value: Any) -> Any:
        """Return the function with a new, empty cache."""
        return functools.lru_cache(**value.cache_parameters())(self.copy(value.__wrapped__))

    def _weak(self, value: weakref.ref[Any]) -> Any:
        target = value()
        return value if target is None else weakref.ref(self.copy(target))

    _COPIERS: ClassVar[dict[type, Callable[[_Copier, Any], Any]]] = {
        dict: _dict,
        list: _list,
        set: _set,
        frozenset: _frozen_set,
        tuple: _tuple,
        collections.deque: _deque,
        types.FunctionType: _function,
        types.MethodType: _method,
        functools.partial: _partial,
        _LruCache: _lru_cached,
        weakref.ref: _weak,
        torch.Generator: lambda _, value: value.clone_state(),
    }


_SHARED_TYPES = (
    bool, int, float, complex, str, bytes, type, range, slice, types.ModuleType, types.BuiltinFunctionType,
    types.CodeType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_EXACT_SHARED_TYPES = frozenset((type(None), object, *_SHARED_TYPES))
_DICTS = frozenset((dict, collections.OrderedDict))


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside any number of wrappers: the module that copies are made of."""
    while (inner := _unwrap(model)) is not None:
        model = inner
    return model


def _unwrap(module: nn.Module) -> nn.Module | None:
    """Return the model inside a `torch.compile` or data-parallel wrapper."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # if it is not loaded, nothing is compiled
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return module._orig_mod
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module
    return None


def _is_plain_object(value: Any) -> bool:
    """Return True for instances of Python classes that do not customize construction or copying."""
    kind: Any = type(value)
    return (
        kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__deepcopy__")
        and bool(kind.__flags__ & _HEAP_TYPE)
        and (hasattr(value, "__dict__") or any(slot_names(kind)))
    )


def _clone(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"a {type(tensor).__name__} of the model, {tuple(tensor.shape)} {tensor.dtype}, cannot be copied: {error}"
        ) from error


def _has_address(tensor: torch.Tensor) -> bool:
    """Return True for dense, non-empty tensors with their own memory (no wrapper subclasses)."""
    return (
        tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (steps + 1) * tensor.itemsize - 1


_HEAP_TYPE = 1 << 9  # CPython's Py_TPFLAGS_HEAPTYPE, set for classes written in Python


def slot_names(kind: type) -> Iterable[str]:
    """Yield the attribute names of all slots of a class; private ones are mangled."""
    for each in kind.__mro__:
        own = each.__dict__.get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{each.__name__.lstrip('_')}{name}" if private else name
