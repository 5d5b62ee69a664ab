"""What a model may change outside of itself when it runs, put back as it was: random numbers, switches, globals."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import random
import sys
import threading
import time
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from escalade.device.torch_private import WORDS
from escalade.engine.capture.fake_tensor import Hollow
from escalade.engine.nodes.arithmetic import one_at_a_time, without_autocast
from escalade.ops.base.switches import noted

_one_at_a_time = threading.RLock()
"""Warnings, switches and random numbers are the process's, and so is much of what `torch.export` changes meanwhile."""
_KNOWN = frozenset((*sys.stdlib_module_names, "torch", "numpy"))
"""Packages whose code is not the model's."""
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    *(
        (functools.partial(torch.get_autocast_dtype, device),
         functools.partial(torch.set_autocast_dtype, device))
        for device in ("cpu", "cuda")
    ),
    *(
        (functools.partial(getattr, package, name), functools.partial(setattr, package, name))
        for package, name in ((torch.backends.cudnn, "deterministic"), (torch.backends.mkldnn, "enabled"))
    ),
)  # fmt: skip
_VARYING = frozenset(("time", "datetime", "secrets", "uuid"))
"""Modules whose functions return something else at every call."""
_COMPILERS = ("TORCHINDUCTOR_", "TRITON_")
_cached = type(functools.lru_cache(lambda: None))


@contextmanager
def undisturbed(model: nn.Module, autocast: bool) -> Iterator[Outside]:
    """Copies of the model may run: without gradients, without warnings, and without the caller's autocast unless that
    is wanted. What is put back (`named`, by identity) need not be copied: code that names it must find it in the model
    too.
    """
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        outside = Outside(model)
        stack.callback(outside.put_back)
        stack.enter_context(_random_numbers(_gpus()))
        with one_at_a_time:  # a call of an engine, in another thread, has its own meanwhile
            stack.callback(_put_settings, [read() for read, _ in _SETTINGS], noted())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if not autocast:
            stack.enter_context(without_autocast())
        yield outside


@contextmanager
def _random_numbers(gpus: list[int]) -> Iterator[None]:
    """Who draws afterwards draws what they would have drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _gpus() -> list[int]:
    """All of them: `torch.manual_seed` is for every one.

    PyTorch initialises CUDA in a capture, wherever there is a GPU, to remember random numbers itself. By then the model
    may have set another seed, which the GPUs would start with; so it is done first.
    """
    if torch.cuda.is_available():
        with contextlib.suppress(Exception):  # what is wrong with it PyTorch says where it needs it
            torch.cuda.init()
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


class Outside:
    """The globals that a model's code names, the attributes of its classes, and what these hold.

    What the code reaches in other ways (through an object of another package, or a name that it makes up) is not seen.
    If other threads run meanwhile, some of what has changed may be theirs: then only tensors without contents are taken
    out. Threads that only wait, as idle ones of PyTorch's own and of notebooks do, change nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._others = _times_of_other_threads()
        self.named: dict[int, Any] = {}
        self._reads_clock = False
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._undo: list[Callable[[bool], None]] = [functools.partial(_put_environment, dict(os.environ))]
        self._ahead: list[tuple[Any, bool]] = []
        for module in model.modules():
            self._look_at(type(module))
            for attribute in list(vars(module).values()):
                for each in attribute.values() if type(attribute) in _HOOKS else (attribute,):
                    self._look_at_attribute(each)
        while self._ahead:  # a package's functions name each other more deeply than Python calls
            self._visit(*self._ahead.pop())

    def put_back(self) -> None:
        alone = _times_of_other_threads() == self._others
        for undo in self._undo:
            with contextlib.suppress(Exception):  # of a class that guards its attributes: the others' turn
                undo(alone)

    def change(self) -> str | None:
        """Name something that has changed by now, or that changes by itself; None if there is nothing."""
        for undo in self._undo:
            if not isinstance(undo, functools.partial):
                continue
            test = _CHANGES.get(undo.func)
            if test is not None and (found := test(*undo.args)) is not None:
                return found
        return "with the clock, which its code names," if self._reads_clock else None

    def _look_at_attribute(self, value: Any) -> None:
        """What a module holds is copied; what the functions among it name is not."""
        if isinstance(value, functools.partial):
            self._look_at_attribute(value.func)
        elif isinstance(value, types.MethodType):
            self._look_at_attribute(value.__func__)
        elif isinstance(value, types.FunctionType) and _is_the_models(value):
            self._globals(value)

    def _look_at(self, value: Any, named: bool = True) -> None:
        if value is not None and not issubclass(type(value), _FIXED):
            self._ahead.append((value, named))

    def _visit(self, value: Any, named: bool) -> None:
        """Remembers what can be changed of it; code is followed to what it names."""
        kind = type(value)  # not `isinstance`, for which some objects stand in for others
        if named and not issubclass(kind, nn.Module):
            self.named[id(value)] = value
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if kind is types.FunctionType:
            if _is_the_models(value):
                self._function(value)
        elif kind in (types.MethodType, staticmethod, classmethod):
            self._look_at(value.__func__)
        elif issubclass(kind, functools.partial):
            self._look_at(value.func)
        elif kind is property:
            self._look_at(value.fget)
        elif kind is _cached:
            self._undo.append(functools.partial(_forget, value, value.cache_info().misses))
            self._look_at(value.__wrapped__)
        elif issubclass(kind, type):
            for each in value.__mro__:
                if _is_the_models(each):
                    self._class(each)
        elif kind in _CONTAINERS:
            self._container(value, named)
        elif issubclass(kind, nn.Module):  # one that the code names, which the model does not hold
            self._look_at(kind)
            self._look_at(value.__dict__, named=False)
        elif _is_the_models(kind) and "__dict__" in dir(kind):
            self._look_at(value.__dict__, named)

    def _function(self, function: types.FunctionType) -> None:
        self._globals(function)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look_at(value)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # it has no value yet
                self._undo.append(functools.partial(_put_cell, cell, cell.cell_contents))
                self._look_at(cell.cell_contents)

    def _globals(self, function: types.FunctionType) -> None:
        code = _code(function.__code__)
        names = function.__globals__
        for name in code.writes & names.keys():
            self._undo.append(functools.partial(_put_name, names, name, names[name]))
        for name in code.reads & names.keys():
            home = getattr(names[name], "__module__", None) or getattr(names[name], "__name__", None)
            self._reads_clock |= home in _VARYING
            if isinstance(names[name], types.ModuleType):
                self._package(names[name], code)
            else:
                self._look_at(names[name])

    def _package(self, package: types.ModuleType, code: _Code) -> None:
        if package.__name__.partition(".")[0] in _KNOWN:
            return
        names = vars(package)
        for name in code.attributes & names.keys():
            self._undo.append(functools.partial(_put_name, names, name, names[name]))
            if not isinstance(names[name], types.ModuleType):
                self._look_at(names[name])

    def _class(self, kind: type) -> None:
        before = dict(vars(kind))
        self._undo.append(functools.partial(_put_attributes, kind, before))
        for value in before.values():
            self._look_at(value)

    def _container(self, value: Any, named: bool) -> None:
        copied = value.copy()
        self._undo.append(functools.partial(_put_items, value, copied))
        for item in copied.values() if isinstance(copied, dict) else copied:
            self._look_at(item, named)


def _times_of_other_threads() -> dict[int, int]:
    """The CPU time of each thread but this one, in nanoseconds: it stands still while the thread waits."""
    times = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.native_id is None:
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            times[thread.native_id] = time.clock_gettime_ns(_cpu_clock(thread.native_id))
    return times


def _cpu_clock(native_id: int) -> int:
    """Linux's clock of a thread. That of `time.pthread_getcpuclockid` may crash for a thread that has ended."""
    return ~native_id << 3 | _THREADS_CPU_TIME


_THREADS_CPU_TIME = 6  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED of the kernel's posix-timers.h
_FIXED = (str, bytes, int, float, complex, torch.Tensor, types.BuiltinFunctionType)
_CONTAINERS = (dict, list, set, deque)
_HOOKS = (dict, OrderedDict)
_DESCRIBING = ("__dict__", "__weakref__", "__doc__", "__annotations__")


class _Code:
    """What a function names, itself or in functions inside it: globals that it reads and binds, and attributes."""

    def __init__(self, code: types.CodeType) -> None:
        self.reads: set[str] = set()
        self.writes: set[str] = set()
        self.attributes: set[str] = set()
        self._read(code)

    def _read(self, code: types.CodeType) -> None:
        for instruction in dis.get_instructions(code):
            match instruction.opname:
                case "LOAD_GLOBAL" | "LOAD_NAME":
                    self.reads.add(instruction.argval)
                case "STORE_GLOBAL" | "DELETE_GLOBAL":
                    self.writes.add(instruction.argval)
                case "LOAD_ATTR" | "LOAD_METHOD" | "STORE_ATTR":
                    self.attributes.add(instruction.argval)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._read(constant)


@functools.lru_cache(4096)
def _code(code: types.CodeType) -> _Code:
    return _Code(code)


def _is_the_models(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "torch").partition(".")[0] not in _KNOWN


def _is_hollow(value: Any, depth: int = 3) -> bool:
    """Whether it is or holds a tensor without contents."""
    if isinstance(value, FakeTensor | Hollow):
        return True
    if depth == 0:
        return False
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple, set, deque)):
        parts = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return any(_is_hollow(part, depth - 1) for part in list(parts))


def _forget(cached: Any, misses: int, alone: bool) -> None:
    """What it has computed meanwhile, which may be without contents; it will compute the rest again."""
    if cached.cache_info().misses != misses:
        cached.cache_clear()


def _put_settings(before: list[Any], put_switches_back: Callable[[], None]) -> None:
    with one_at_a_time, WORDS.unfrozen():
        put_switches_back()
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)


def _put_environment(before: dict[str, str], alone: bool) -> None:
    """Variables that a model has set, and those by which PyTorch's compiler tells its processes of its folders."""
    for name in os.environ.keys() - before.keys():
        if alone or name.startswith(_COMPILERS):
            os.environ.pop(name, None)
    if alone:
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _put_name(names: dict[str, Any], name: str, value: Any, alone: bool) -> None:
    now = names.get(name)
    if now is not value and (alone or _is_hollow(now)):
        names[name] = value


def _put_cell(cell: types.CellType, value: Any, alone: bool) -> None:
    if cell.cell_contents is not value and (alone or _is_hollow(cell.cell_contents)):
        cell.cell_contents = value


def _put_attributes(kind: type, before: dict[str, Any], alone: bool) -> None:
    now = dict(vars(kind))
    for name in now.keys() - before.keys():
        if alone or _is_hollow(now[name]):
            delattr(kind, name)
    for name, value in before.items():
        changed = name not in _DESCRIBING and now.get(name) is not value
        if changed and (alone or _is_hollow(now.get(name))):
            setattr(kind, name, value)


def _changed_name(names: dict[str, Any], name: str, value: Any) -> str | None:
    return None if names.get(name) is value else f"the global {name}"


def _changed_cell(cell: types.CellType, value: Any) -> str | None:
    return None if cell.cell_contents is value else "a variable of a function around it"


def _changed_attributes(kind: type, before: dict[str, Any]) -> str | None:
    now = vars(kind)
    for name in (*before, *now):
        if name not in _DESCRIBING and now.get(name, _ABSENT) is not before.get(name, _ABSENT):
            return f"the class attribute {kind.__name__}.{name}"
    return None


def _changed_items(value: Any, before: Any) -> str | None:
    return None if _holds_the_same(value, before) else f"a {type(value).__name__} that its code names"


def _put_items(value: Any, before: Any, alone: bool) -> None:
    """Only where something has changed: another thread may be reading."""
    if not alone:
        _take_out(value, before)
    elif not _holds_the_same(value, before):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)


def _holds_the_same(value: Any, before: Any) -> bool:
    if isinstance(value, dict):
        return list(map(id, value)) == list(map(id, before)) and _holds_the_same(
            list(value.values()), list(before.values())
        )
    if isinstance(value, set):
        return set(map(id, value)) == set(map(id, before))
    return list(map(id, value)) == list(map(id, before))


_ABSENT = object()
_CHANGES: dict[Any, Callable[..., str | None]] = {
    _put_name: _changed_name,
    _put_cell: _changed_cell,
    _put_attributes: _changed_attributes,
    _put_items: _changed_items,
}
"""The description of a change, by the function that reverts it."""


def _take_out(value: Any, before: Any) -> None:
    """What has come in and is hollow; the rest may be somebody else's."""
    if isinstance(value, dict):
        for key, item in list(value.items()):
            if item is not before.get(key) and _is_hollow(item):
                if key in before:
                    value[key] = before[key]
                else:
                    del value[key]
        return
    known = set(map(id, before))
    hollow = {id(item) for item in list(value) if id(item) not in known and _is_hollow(item)}
    if hollow:
        kept = [item for item in value if id(item) not in hollow]
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(kept)
