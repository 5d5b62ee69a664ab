"""What a model may change outside of itself when it runs, put back as it was: random numbers, switches, globals."""

from __future__ import annotations

import functools
import random
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from escalade.engine.arithmetic import without_autocast

_one_at_a_time = threading.RLock()
"""Warnings, switches and random numbers are the process's, and so is much of what `torch.export` changes meanwhile."""
_KNOWN = frozenset((*sys.stdlib_module_names, "torch", "numpy"))
"""Packages whose code is not the model's."""
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    *(
        (functools.partial(getattr, torch.backends.cudnn, name),
         functools.partial(setattr, torch.backends.cudnn, name))
        for name in ("enabled", "benchmark", "deterministic")
    ),
)  # fmt: skip
_cached = type(functools.lru_cache(lambda: None))


@contextmanager
def undisturbed(model: nn.Module, devices: Iterable[torch.device], autocast: bool) -> Iterator[None]:
    """Copies of the model may run: without gradients, without warnings, and without the caller's autocast unless that
    is wanted.
    """
    with ExitStack() as stack:
        stack.enter_context(_one_at_a_time)
        outside = _Outside(model)
        stack.callback(outside.put_back)
        stack.enter_context(_random_numbers(_gpus(model, devices)))
        for read, write in _SETTINGS:
            stack.callback(_put_setting, read, write, read())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        if not autocast:
            stack.enter_context(without_autocast())
        yield


@contextmanager
def _random_numbers(gpus: list[torch.device]) -> Iterator[None]:
    """Who draws afterwards draws what they would have drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _gpus(model: nn.Module, devices: Iterable[torch.device]) -> list[torch.device]:
    held = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    return sorted((device for device in held.union(devices) if device.type == "cuda"), key=str)


class _Outside:
    """The globals that a model's code names, the attributes of its classes, and what these hold.

    What the code reaches in other ways (through an object of another package, or a name that it makes up) is not seen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        for module in model.modules():
            self._look_at(type(module))
            for attribute in list(vars(module).values()):
                if callable(attribute) or isinstance(attribute, dict):
                    self._look_at_code(attribute)

    def put_back(self) -> None:
        for undo in self._undo:
            undo()

    def _look_at_code(self, value: Any) -> None:
        """Functions among a module's attributes: hooks, and what it calls. What else it holds has been copied."""
        for each in value.values() if isinstance(value, dict) else (value,):
            if isinstance(each, (types.FunctionType, types.MethodType, functools.partial)):
                self._look_at(each)

    def _look_at(self, value: Any) -> None:
        """Remembers what can be changed of it; code is followed to what it names."""
        if id(value) in self._seen or value is None or isinstance(value, torch.Tensor):
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, types.FunctionType):
            if _is_the_models(value):
                self._function(value)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self._look_at(value.__func__)
        elif isinstance(value, functools.partial):
            self._look_at(value.func)
        elif isinstance(value, property):
            self._look_at(value.fget)
        elif isinstance(value, _cached):
            self._undo.append(functools.partial(_forget, value, value.cache_info().misses))
            self._look_at(value.__wrapped__)
        elif isinstance(value, type):
            for each in value.__mro__:
                if _is_the_models(each):
                    self._class(each)
        elif type(value) in _CONTAINERS:
            self._container(value)
        elif isinstance(value, nn.Module):  # one that the code names, which the model does not hold
            self._look_at(type(value))
            self._look_at(value.__dict__)
        elif isinstance(getattr(value, "__dict__", None), dict) and _is_the_models(type(value)):
            self._look_at(value.__dict__)

    def _function(self, function: types.FunctionType) -> None:
        names = set(_names(function.__code__))
        for name in names & function.__globals__.keys():
            value = function.__globals__[name]
            self._undo.append(functools.partial(_put_name, function.__globals__, name, value))
            if isinstance(value, types.ModuleType):
                self._package(value, names)
            else:
                self._look_at(value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look_at(value)
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # it has no value yet
                continue
            self._undo.append(functools.partial(setattr, cell, "cell_contents", value))
            self._look_at(value)

    def _package(self, package: types.ModuleType, names: set[str]) -> None:
        if package.__name__.partition(".")[0] in _KNOWN:
            return
        for name in names & vars(package).keys():
            value = vars(package)[name]
            if not isinstance(value, types.ModuleType):
                self._undo.append(functools.partial(_put_name, vars(package), name, value))
                self._look_at(value)

    def _class(self, kind: type) -> None:
        before = dict(vars(kind))
        self._undo.append(functools.partial(_put_attributes, kind, before))
        for value in before.values():
            self._look_at(value)

    def _container(self, value: Any) -> None:
        copied = value.copy()
        self._undo.append(functools.partial(_put_items, value, copied))
        for item in copied.values() if isinstance(copied, dict) else copied:
            self._look_at(item)


_CONTAINERS = (dict, list, set, deque)
_DESCRIBING = ("__dict__", "__weakref__", "__doc__", "__annotations__")


def _is_the_models(code: Any) -> bool:
    return (getattr(code, "__module__", None) or "torch").partition(".")[0] not in _KNOWN


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _forget(cached: Any, misses: int) -> None:
    """What it has computed meanwhile, which may be without contents; it will compute the rest again."""
    if cached.cache_info().misses != misses:
        cached.cache_clear()


def _put_setting(read: Callable[[], Any], write: Callable[[Any], object], before: Any) -> None:
    if read() != before:
        write(before)


def _put_name(namespace: dict[str, Any], name: str, value: Any) -> None:
    if namespace.get(name) is not value:
        namespace[name] = value


def _put_attributes(kind: type, before: dict[str, Any]) -> None:
    now = dict(vars(kind))
    for name in now.keys() - before.keys():
        delattr(kind, name)
    for name, value in before.items():
        if name not in _DESCRIBING and now.get(name) is not value:
            setattr(kind, name, value)


def _put_items(value: Any, before: Any) -> None:
    """Only where something has changed: another thread may be reading."""
    if isinstance(value, dict):
        same = list(value) == list(before) and all(value[key] is before[key] for key in before)
    elif isinstance(value, set):
        same = value == before
    else:
        same = len(value) == len(before) and all(map(lambda one, other: one is other, value, before))
    if same:
        return
    value.clear()
    (value.extend if isinstance(value, (list, deque)) else value.update)(before)
