"""Copies of a caller's model to run in its place: whatever running changes, it changes in a copy.

`torch.export` runs a model on tensors without contents. Whatever the model keeps of them, in a cache, a list or the
parameters themselves, would be left in the caller's hands; and another thread may be using the model meanwhile.
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

Made = Callable[[torch.Tensor], torch.Tensor]
_GRAPH_STATE = ("_parameters", "_buffers", "_modules")
"""What of a `torch.fx.GraphModule` its code uses; all the rest describes that code."""
_lru_cache = type(functools.lru_cache(lambda: None))


class Original:
    """A model as the caller has it, and the tensors that all its copies share: copies themselves, of each one."""

    def __init__(
        self,
        model: nn.Module,
        ours: Iterable[torch.Tensor] = (),
        outside: Mapping[int, Any] | None = None,
        changed_outside: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Tensors of the model that are `ours` nobody else has, and they need no copying. Nor do objects that lie
        `outside` of it, by identity. `changed_outside` names what running a copy has changed among these.
        """
        self.model = model
        self.changed_outside = changed_outside
        self.change: str | None = None
        """The first thing that running a copy was seen to change in Python."""
        self._outside = outside or {}
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in ours if _has_address(tensor)}
        self._bytes: dict[int, tuple[torch.device, int, int]] = {}
        """Device, first and last byte of the caller's tensor, by the storage of its copy."""
        self._alive: list[Any] = []

    def copied(self, made: Made = lambda tensor: tensor, *, evaluates: bool = True) -> nn.Module:
        """Another copy with what `made` makes of each tensor in its place; in evaluation mode, or in the caller's."""
        maker = _Copier(lambda tensor: made(self._tensor(tensor)), self._outside)
        model: nn.Module = maker.of(self.model)
        self._alive.append(
            maker.made
        )  # weak references among the copies need somebody to hold what they point at
        if not evaluates:
            return model
        with contextlib.suppress(
            NotImplementedError
        ):  # the module of an exported program, which has no modes
            model.eval()
        return model

    def kept(self) -> Kept:
        """The model as it is now, for captures to come."""
        maker = _Copier(self._tensor, self._outside)
        model: nn.Module = maker.of(self.model)
        return Kept(model, [*self._tensors.values()], maker.made)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is that of the copies, and of nobody else."""
        return _has_address(tensor) and tensor.untyped_storage().data_ptr() in self._storages

    def overlap(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return True if the caller's tensors that these two are copies of may have bytes in common.

        Copies have not: a view of a parameter is another tensor in a copy of the model.
        """
        storages = [tensor.untyped_storage().data_ptr() for tensor in (one, other)]
        if storages[0] == storages[1]:
            return True
        if not self._bytes.keys() >= {*storages}:
            return False
        (device, first, last), (other_device, other_first, other_last) = (
            self._bytes[storage] for storage in storages
        )
        return device == other_device and first <= other_last and other_first <= last

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor object over the copy that is made of these numbers once."""
        if is_lazy(tensor):
            raise UnsupportedError(
                "the model has parameters without a size yet (lazy modules): call it once with an input, then compile "
                "it"
            )
        if tensor.is_meta:
            raise UnsupportedError(
                "the model has weights on the meta device, which holds no numbers; load them, then compile it"
            )
        with torch._C.DisableTorchFunctionSubclass():
            numbers = self._numbers(tensor).detach()
            wants = tensor.requires_grad
            if not isinstance(tensor, nn.Parameter):
                made = numbers.requires_grad_() if wants else numbers
            elif type(tensor) is nn.Parameter or type(numbers) is not torch.Tensor:
                made = nn.Parameter(numbers, wants)
            else:
                made = torch.Tensor._make_subclass(type(tensor), numbers, wants)
        if tensor.__dict__:
            made.__dict__.update(tensor.__dict__)
        return made

    def _numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        key: tuple[Any, ...] = (id(tensor),)
        if _has_address(tensor):
            key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if key not in self._tensors:
            self._alive.append(tensor)  # as long as it lives, no other has its identity or its memory
            made = self._tensors[key] = tensor.detach() if self.owns(tensor) else _cloned(tensor)
            if _has_address(made):
                storage = made.untyped_storage().data_ptr()
                self._storages.add(storage)
                self._bytes[storage] = (tensor.device, *_bytes_of(tensor))
        return self._tensors[key]


@dataclass(frozen=True)
class Kept:
    """A copy of a model that nobody runs or changes: it is an original itself, whatever becomes of the caller's."""

    model: nn.Module
    tensors: list[torch.Tensor]
    """The numbers that all copies share."""
    alive: list[Any]
    """All that was copied: weak references among it point at each other."""


class _Copier:
    """One copy of everything that can be reached from a model and changed.

    Code, classes and what cannot be copied (locks, files, generators) stay the caller's. So does nothing else: not
    what a container, a closure, a bound method or an object of the caller's own classes holds.
    """

    def __init__(self, tensor: Made, outside: Mapping[int, Any]) -> None:
        self._tensor = tensor
        self._made: dict[int, Any] = dict(outside)
        self._alive: list[Any] = []

    def of(self, value: Any) -> Any:
        if value is None or type(value) is object or issubclass(type(value), _ATOMS):
            return value
        if id(value) not in self._made:
            self._keep(value, self._copy(value))
        return self._made[id(value)]

    @property
    def made(self) -> list[Any]:
        return [*self._made.values()]

    def _keep(self, value: Any, made: Any) -> Any:
        """Keeps a copy: from here on whoever holds the value gets it."""
        self._made[id(value)] = made
        self._alive.append(value)
        return made

    def _copy(self, value: Any) -> Any:
        if type(value) in weakref.ProxyTypes:  # it would pass for what it points at
            return weakref.proxy(self.of(value.__init__.__self__))
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        try:
            for kind, made in self._KINDS.items():
                if isinstance(value, kind):
                    return made(self, value)
            if _is_plain(value):
                return self._object(value, object.__new__(type(value)))
            return copy.deepcopy(value, self._made)
        except (UnsupportedError, RecursionError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:  # whatever it is, its class says that there is one of it
            return value

    def _module(self, module: nn.Module) -> nn.Module:
        inner = _inside(module)
        if inner is not None:
            return self.of(inner)
        if isinstance(module, torch.jit.ScriptModule):
            name = getattr(module, "original_name", type(module).__name__)
            raise UnsupportedError(
                f"{name} is TorchScript, of which PyTorch makes no graph of operators; compile takes the "
                "torch.nn.Module that it was scripted or traced from"
            )
        made = object.__new__(type(module))
        if isinstance(module, torch.fx.GraphModule):
            self._keep(module, made)
            for name, value in list(module.__dict__.items()):
                own = name in _GRAPH_STATE or isinstance(value, torch.Tensor)
                made.__dict__[name] = self.of(value) if own else value
        else:
            self._object(module, made)
        if made.__dict__.get("_compiled_call_impl") is not None:
            made.__dict__["_compiled_call_impl"] = None  # `model.compile()`: the model itself is asked for
        return made

    def _object(self, value: Any, made: Any) -> Any:
        """Attributes go where they are kept, past whatever the class does when one is set."""
        self._keep(value, made)
        if hasattr(value, "__dict__"):
            for name, attribute in list(value.__dict__.items()):
                made.__dict__[name] = self.of(attribute)
        for name in slots(type(value)):
            if hasattr(value, name):
                object.__setattr__(made, name, self.of(getattr(value, name)))
        return made

    def _dict(self, value: dict[Any, Any]) -> Any:
        if type(value).__new__ not in (dict.__new__, collections.OrderedDict.__new__):
            return copy.deepcopy(value, self._made)
        made = self._object(value, type(value).__new__(type(value)))
        if isinstance(value, collections.defaultdict):
            made.default_factory = self.of(value.default_factory)
        put = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        for key, item in list(value.items()):
            put.__setitem__(made, self.of(key), self.of(item))
        return made

    def _list(self, value: list[Any]) -> Any:
        made = self._object(value, type(value).__new__(type(value)))
        list.extend(made, [self.of(item) for item in value])
        return made

    def _set(self, value: set[Any]) -> Any:
        made = self._object(value, type(value).__new__(type(value)))
        set.update(made, {self.of(item) for item in value})
        return made

    def _frozen_set(self, value: frozenset[Any]) -> Any:
        return type(value)(self.of(item) for item in value)

    def _deque(self, value: collections.deque[Any]) -> Any:
        return self._keep(value, type(value)((self.of(item) for item in value), value.maxlen))

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        """A copy of a tuple, or the tuple itself if nothing in it had to be copied: numbers and sizes."""
        items = [self.of(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)._make(items)  # type: ignore[attr-defined]
        return type(value)(items)

    def _function(self, value: types.FunctionType) -> Any:
        """A copy of a function with a closure and defaults of its own; `torch.compile`d ones as they were before."""
        inner = getattr(value, "_torchdynamo_orig_callable", None)
        if inner is not None:
            return self.of(inner)
        ours = (value.__module__ or "").partition(".")[0] == "torch"
        if ours or not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return value
        cells = [types.CellType() for _ in value.__closure__ or ()]
        cells = [
            self._made.get(id(old), new) for old, new in zip(value.__closure__ or (), cells, strict=True)
        ]
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, tuple(cells))
        self._keep(value, made)
        for old, new in zip(value.__closure__ or (), cells, strict=True):
            if id(old) in self._made:
                continue
            self._keep(old, new)  # two functions may share a variable
            with contextlib.suppress(ValueError):  # a variable that has no value yet
                new.cell_contents = self.of(old.cell_contents)
        made.__defaults__ = self.of(value.__defaults__)
        made.__kwdefaults__ = self.of(value.__kwdefaults__)
        made.__qualname__, made.__module__, made.__doc__ = (
            value.__qualname__, value.__module__, value.__doc__,
        )  # fmt: skip
        made.__annotations__ = value.__annotations__
        made.__dict__.update((name, self.of(item)) for name, item in value.__dict__.items())
        return made

    def _method(self, value: types.MethodType) -> Any:
        return types.MethodType(self.of(value.__func__), self.of(value.__self__))

    def _partial(self, value: functools.partial[Any]) -> Any:
        arguments = [self.of(item) for item in value.args]
        return type(value)(self.of(value.func), *arguments, **self.of(value.keywords))

    def _cached(self, value: Any) -> Any:
        """A cache of its own, to begin with an empty one."""
        return functools.lru_cache(**value.cache_parameters())(self.of(value.__wrapped__))

    def _weak(self, value: weakref.ref[Any]) -> Any:
        target = value()
        return value if target is None else weakref.ref(self.of(target))

    _KINDS: ClassVar[dict[type, Callable[[_Copier, Any], Any]]] = {
        dict: _dict,
        list: _list,
        set: _set,
        frozenset: _frozen_set,
        tuple: _tuple,
        collections.deque: _deque,
        types.FunctionType: _function,
        types.MethodType: _method,
        functools.partial: _partial,
        _lru_cache: _cached,
        weakref.ref: _weak,
        torch.Generator: lambda _, value: value.clone_state(),
    }


_ATOMS = (
    bool, int, float, complex, str, bytes, type, range, slice, types.ModuleType, types.BuiltinFunctionType,
    types.CodeType, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def _inside(module: nn.Module) -> nn.Module | None:
    """The model that a wrapper holds, of those that compute what it does."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # where nobody has loaded it, nothing is compiled
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return module._orig_mod
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return module.module
    return None


def _is_plain(value: Any) -> bool:
    """An object of a class written in Python that leaves it to Python how it is made and copied."""
    kind: Any = type(value)
    return (
        kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__deepcopy__")
        and bool(kind.__flags__ & _HEAP)
        and (hasattr(value, "__dict__") or any(slots(kind)))
    )


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    try:
        return tensor.detach().clone()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedError(
            f"a {type(tensor).__name__} of the model, {tuple(tensor.shape)} {tensor.dtype}, cannot be copied: {error}"
        ) from error


def _has_address(tensor: torch.Tensor) -> bool:
    """Numbers in memory of its own: not none at all, nor others' of which it is a view in some way of its own."""
    return (
        tensor.layout is torch.strided
        and tensor.numel() > 0
        and tensor.device.type != "meta"
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    )


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first and the last byte of a tensor."""
    first = tensor.data_ptr()
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (steps + 1) * tensor.itemsize - 1


_HEAP = 1 << 9
"""CPython's flag of classes that are written in Python."""


def slots(kind: type) -> Iterable[str]:
    """The names of all slots of a class, as they are set."""
    for each in kind.__mro__:
        own = each.__dict__.get("__slots__", ())
        for name in (own,) if isinstance(own, str) else own:
            if name not in ("__dict__", "__weakref__"):
                private = name.startswith("__") and not name.endswith("__")
                yield f"_{each.__name__.lstrip('_')}{name}" if private else name
