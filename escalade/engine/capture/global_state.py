"""Save and restore of global state that a model may change when it runs: random state, settings, globals."""

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

from escalade.device.torch_private import FAST_PATHS
from escalade.engine.capture.fake_tensor import TraceTensor
from escalade.engine.nodes.evaluate import modes_lock, without_autocast
from escalade.ops.base.switches import save_flags

# Warning filters, settings, random state and much of what `torch.export` patches are global to the process.
_capture_lock = threading.RLock()
_FOREIGN_PACKAGES = frozenset((*sys.stdlib_module_names, "torch", "numpy"))
"""Packages whose code is not part of a model."""
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
_TIME_DEPENDENT_MODULES = frozenset(("time", "datetime", "secrets", "uuid"))
"""Modules whose functions return something else at every call."""
_COMPILER_VARIABLES = ("TORCHINDUCTOR_", "TRITON_")
_LruCache = type(functools.lru_cache(lambda: None))


@contextmanager
def preserve_global_state(model: nn.Module, autocast: bool) -> Iterator[GlobalState]:
    """Run model copies without gradients and warnings, and without the caller's autocast unless `autocast`.

    Everything in `GlobalState.named` is restored at the end. So copies of the model share it: code that refers to such
    an object by name and through the model must find the same object.
    """
    with ExitStack() as stack:
        stack.enter_context(_capture_lock)
        global_state = GlobalState(model)
        stack.callback(global_state.restore)
        stack.enter_context(_preserve_random_state(_initialized_gpus()))
        with modes_lock:  # an engine call in another thread changes settings too
            stack.callback(_restore_settings, [read() for read, _ in _SETTINGS], save_flags())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if not autocast:
            stack.enter_context(without_autocast())
        yield global_state


@contextmanager
def _preserve_random_state(gpus: list[int]) -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _initialized_gpus() -> list[int]:
    """Initialize CUDA and return all GPUs, since `torch.manual_seed` seeds each of them.

    PyTorch initializes CUDA during a capture to save its random state. By then the model may have set another seed, and
    the GPUs would start with that one. Initializing first avoids this.
    """
    if torch.cuda.is_available():
        with contextlib.suppress(Exception):  # PyTorch reports a broken CUDA where it needs it
            torch.cuda.init()
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


class GlobalState:
    """Snapshot of the globals that a model's code refers to, its class attributes, and what these contain.

    Objects reached in other ways (through another package, or a computed name) are not covered. If other threads ran in
    the meantime, a change may be theirs: then only fake tensors are removed. Threads that only wait, such as idle ones
    of PyTorch and notebooks, change nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._other_thread_times = _other_thread_cpu_times()
        self.named: dict[int, Any] = {}
        self._uses_clock = False
        self._seen: set[int] = set()
        self._visited: dict[int, Any] = {}
        """Functions and modules that were reached through attributes, by id."""
        self._alive: list[Any] = []
        self._undo: list[Callable[[bool], None]] = [functools.partial(_restore_environment, dict(os.environ))]
        self._pending: list[tuple[Any, bool]] = []
        self._visit_modules(model)
        while self._pending:  # not recursive: a package's functions nest deeper than the recursion limit
            self._visit(*self._pending.pop())

    def restore(self) -> None:
        exclusive = _other_thread_cpu_times() == self._other_thread_times
        for undo in self._undo:
            with contextlib.suppress(Exception):  # a class may guard its attributes; restore the rest
                undo(exclusive)

    def find_change(self) -> str | None:
        """Describe something that has changed, or that changes by itself like the clock; None if there is nothing."""
        for undo in self._undo:
            if not isinstance(undo, functools.partial):
                continue
            test = _CHANGE_TESTS.get(undo.func)
            if test is not None and (found := test(*undo.args)) is not None:
                return found
        return "with the clock, which its code uses," if self._uses_clock else None

    def _visit_modules(self, model: nn.Module) -> None:
        for module in model.modules():
            self._enqueue(type(module))
            for attribute in list(vars(module).values()):
                for each in attribute.values() if type(attribute) in _HOOKS else (attribute,):
                    self._visit_attribute(each)

    def _visit_attribute(self, value: Any) -> None:
        """Visit what functions in a module's attributes refer to; the attributes themselves are copied elsewhere."""
        if isinstance(value, functools.partial):
            self._visit_attribute(value.func)
        elif isinstance(value, types.MethodType):
            self._visit_attribute(value.__func__)
            self._visit_attribute(value.__self__)
        elif isinstance(value, types.FunctionType):
            if is_model_code(value) and id(value) not in self._visited:
                self._visited[id(value)] = value
                self._globals(value)
                for cell in value.__closure__ or ():
                    with contextlib.suppress(ValueError):  # unbound cell
                        self._visit_attribute(cell.cell_contents)
        elif isinstance(value, nn.Module):
            if id(value) not in self._visited:
                self._visited[id(value)] = value
                self._visit_modules(value)
        elif is_model_code(type(value)) and hasattr(value, "__dict__"):
            self._enqueue(type(value))

    def _enqueue(self, value: Any, named: bool = True) -> None:
        if value is not None and not issubclass(type(value), _IMMUTABLE):
            self._pending.append((value, named))

    def _visit(self, value: Any, named: bool) -> None:
        """Record how to restore a value, and enqueue what it refers to."""
        kind = type(value)  # not `isinstance`, which proxies and mocks override
        if named and not issubclass(kind, nn.Module):
            self.named[id(value)] = value
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if kind is types.FunctionType:
            if is_model_code(value):
                self._function(value)
        elif kind in (types.MethodType, staticmethod, classmethod):
            self._enqueue(value.__func__)
        elif issubclass(kind, functools.partial):
            self._enqueue(value.func)
        elif kind is property:
            self._enqueue(value.fget)
        elif kind is _LruCache:
            self._undo.append(functools.partial(_clear_cache, value, value.cache_info().misses))
            self._enqueue(value.__wrapped__)
        elif issubclass(kind, type):
            for each in value.__mro__:
                if is_model_code(each):
                    self._class(each)
        elif kind in _CONTAINERS:
            self._container(value, named)
        elif issubclass(kind, nn.Module):  # used by the code, but not a submodule
            self._enqueue(kind)
            self._enqueue(value.__dict__, named=False)
        elif is_model_code(kind) and "__dict__" in dir(kind):
            self._enqueue(value.__dict__, named)

    def _function(self, function: types.FunctionType) -> None:
        self._globals(function)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._enqueue(value)
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # unbound cell
                self._undo.append(functools.partial(_restore_cell, cell, cell.cell_contents))
                self._enqueue(cell.cell_contents)

    def _globals(self, function: types.FunctionType) -> None:
        code = code_names(function.__code__)
        names = function.__globals__
        for name in code.writes & names.keys():
            self._undo.append(functools.partial(_restore_name, names, name, names[name]))
        for name in code.reads & names.keys():
            home = getattr(names[name], "__module__", None) or getattr(names[name], "__name__", None)
            self._uses_clock |= home in _TIME_DEPENDENT_MODULES
            if isinstance(names[name], types.ModuleType):
                self._module_names(names[name], code)
            else:
                self._enqueue(names[name])

    def _module_names(self, package: types.ModuleType, code: _CodeNames) -> None:
        if package.__name__.partition(".")[0] in _FOREIGN_PACKAGES:
            return
        names = vars(package)
        for name in code.attributes & names.keys():
            self._undo.append(functools.partial(_restore_name, names, name, names[name]))
            if not isinstance(names[name], types.ModuleType):
                self._enqueue(names[name])

    def _class(self, kind: type) -> None:
        before = dict(vars(kind))
        self._undo.append(functools.partial(_restore_attributes, kind, before))
        for value in before.values():
            self._enqueue(value)

    def _container(self, value: Any, named: bool) -> None:
        copied = value.copy()
        self._undo.append(functools.partial(_restore_items, value, copied))
        for item in copied.values() if isinstance(copied, dict) else copied:
            self._enqueue(item, named)


def _other_thread_cpu_times() -> dict[int, int]:
    """Return the CPU time in ns of all other threads; it does not advance while a thread waits."""
    times = {}
    for thread in threading.enumerate():
        if thread is threading.current_thread() or thread.native_id is None:
            continue
        with contextlib.suppress(OSError):  # the thread has ended
            times[thread.native_id] = time.clock_gettime_ns(_cpu_clock(thread.native_id))
    return times


def _cpu_clock(native_id: int) -> int:
    """Return Linux's CPU clock of a thread. `time.pthread_getcpuclockid` may crash for a thread that has ended."""
    return ~native_id << 3 | _PER_THREAD_CPU_TIME


_PER_THREAD_CPU_TIME = 6  # CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED of the kernel's posix-timers.h
_IMMUTABLE = (str, bytes, int, float, complex, torch.Tensor, types.BuiltinFunctionType)
_CONTAINERS = (dict, list, set, deque)
_HOOKS = (dict, OrderedDict)
_CLASS_METADATA = ("__dict__", "__weakref__", "__doc__", "__annotations__")


class _CodeNames:
    """Globals that a function or its nested functions read and write, and attribute names that they use."""

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
def code_names(code: types.CodeType) -> _CodeNames:
    return _CodeNames(code)


def is_model_code(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "torch").partition(".")[0] not in _FOREIGN_PACKAGES


def _has_fake_tensor(value: Any, depth: int = 3) -> bool:
    """Return True for a fake tensor, or an object that holds one within `depth` levels."""
    if isinstance(value, FakeTensor | TraceTensor):
        return True
    if depth == 0:
        return False
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple, set, deque)):
        parts = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return any(_has_fake_tensor(part, depth - 1) for part in list(parts))


def _clear_cache(cached: Any, misses: int, exclusive: bool) -> None:
    """Clear an `lru_cache` with new entries, which may hold fake tensors."""
    if cached.cache_info().misses != misses:
        cached.cache_clear()


def _restore_settings(before: list[Any], restore_switches: Callable[[], None]) -> None:
    with modes_lock, FAST_PATHS.allow_flag_changes():
        restore_switches()
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)


def _restore_environment(before: dict[str, str], exclusive: bool) -> None:
    """Remove variables set by the model, and those by which PyTorch's compiler passes folders to its processes."""
    for name in os.environ.keys() - before.keys():
        if exclusive or name.startswith(_COMPILER_VARIABLES):
            os.environ.pop(name, None)
    if exclusive:
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


def _restore_name(names: dict[str, Any], name: str, value: Any, exclusive: bool) -> None:
    now = names.get(name)
    if now is not value and (exclusive or _has_fake_tensor(now)):
        names[name] = value


def _restore_cell(cell: types.CellType, value: Any, exclusive: bool) -> None:
    if cell.cell_contents is not value and (exclusive or _has_fake_tensor(cell.cell_contents)):
        cell.cell_contents = value


def _restore_attributes(kind: type, before: dict[str, Any], exclusive: bool) -> None:
    now = dict(vars(kind))
    for name in now.keys() - before.keys():
        if exclusive or _has_fake_tensor(now[name]):
            delattr(kind, name)
    for name, value in before.items():
        changed = name not in _CLASS_METADATA and now.get(name) is not value
        if changed and (exclusive or _has_fake_tensor(now.get(name))):
            setattr(kind, name, value)


def _changed_name(names: dict[str, Any], name: str, value: Any) -> str | None:
    return None if names.get(name) is value else f"the global {name}"


def _changed_cell(cell: types.CellType, value: Any) -> str | None:
    return None if cell.cell_contents is value else "a variable of an enclosing function"


def _changed_attributes(kind: type, before: dict[str, Any]) -> str | None:
    now = vars(kind)
    for name in (*before, *now):
        if name not in _CLASS_METADATA and now.get(name, _ABSENT) is not before.get(name, _ABSENT):
            return f"the class attribute {kind.__name__}.{name}"
    return None


def _changed_items(value: Any, before: Any) -> str | None:
    return None if _same_items(value, before) else f"a {type(value).__name__} that its code uses"


def _restore_items(value: Any, before: Any, exclusive: bool) -> None:
    """Restore a container; one that has not changed is not written to, since another thread may be reading it."""
    if not exclusive:
        _remove_fake_items(value, before)
    elif not _same_items(value, before):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)


def _same_items(value: Any, before: Any) -> bool:
    if isinstance(value, dict):
        return list(map(id, value)) == list(map(id, before)) and _same_items(
            list(value.values()), list(before.values())
        )
    if isinstance(value, set):
        return set(map(id, value)) == set(map(id, before))
    return list(map(id, value)) == list(map(id, before))


_ABSENT = object()
_CHANGE_TESTS: dict[Any, Callable[..., str | None]] = {
    _restore_name: _changed_name,
    _restore_cell: _changed_cell,
    _restore_attributes: _changed_attributes,
    _restore_items: _changed_items,
}
"""Function that describes a change, by the function that reverts it."""


def _remove_fake_items(value: Any, before: Any) -> None:
    """Remove new items with fake tensors; other changes may come from another thread."""
    if isinstance(value, dict):
        for key, item in list(value.items()):
            if item is not before.get(key) and _has_fake_tensor(item):
                if key in before:
                    value[key] = before[key]
                else:
                    del value[key]
        return
    known = set(map(id, before))
    fake = {id(item) for item in list(value) if id(item) not in known and _has_fake_tensor(item)}
    if fake:
        kept = [item for item in value if id(item) not in fake]
        value.clear()
        (value.update if isinstance(value, set) else value.extend)(kept)
