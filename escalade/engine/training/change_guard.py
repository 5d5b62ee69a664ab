"""Detect changes of the model, the loss or the optimizer that invalidate the plans of a training step."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from types import CellType, FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn

from escalade.device.torch_private import FAST_PATHS
from escalade.engine.capture.global_state import code_names, is_model_code
from escalade.engine.training.optimizer_state import hook_numbers, hooks_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN_TYPES = (bool, int, float, complex, str, tuple, list, torch.dtype, FunctionType, MethodType, NoneType)
"""Types of module attributes that are settings; others, such as cached results, do not affect what a step computes."""
_MODE = "training"
_gradient_attributes = operator.attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


class ChangeGuard:
    """Snapshot of the modules, parameters, buffers, settings, loss and optimizer groups that plans were built from.

    Every call compares them before it launches anything, so this must be fast: whole lists are compared in C, and
    element by element only where they differ.
    """

    def __init__(
        self, modules: Sequence[nn.Module], loss: Callable[..., Any], optimizer: torch.optim.Optimizer
    ) -> None:
        self._optimizer = optimizer
        self._loss_values = _LossValues(loss)
        self._settings = [vars(module) for module in modules]
        self._saved_settings = list(map(dict, self._settings))
        self._links = [
            each
            for module in modules
            for each in (module._modules, *(getattr(module, name) for name in _HOOKS))
        ]
        self._saved_links = list(map(dict, self._links))
        self._tensor_dicts = [each for module in modules for each in (module._parameters, module._buffers)]
        self._tensors = self._current_tensors()
        self._present = [tensor for tensor in self._tensors if tensor is not None]
        with torch.no_grad():  # the guard is evaluated in this mode, too
            self._guard = FAST_PATHS.guard(self._present)
        self._addresses = list(map(torch.Tensor.data_ptr, self._present))
        self._gradient_attributes = list(map(_gradient_attributes, self._present))
        self._layouts = list(map(_layout, self._present))
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._hooks, self._hook_numbers = len(hooks_of(optimizer)), hook_numbers(optimizer)
        self._constants: list[tuple[torch.Tensor, int]] = []

    def is_unchanged(self) -> bool:
        """Return True if nothing has changed but the contents of tensors and the modules' training modes."""
        groups = self._optimizer.param_groups
        return (
            self._links == self._saved_links
            and _identical(self._current_tensors(), self._tensors)
            and self._tensors_are_unchanged()
            and self._settings_are_unchanged()
            and self._loss_values.changed() is None
            and all([tensor._version == version for tensor, version in self._constants])
            and len(groups) == len(self._groups)
            and all(
                [
                    _identical(group["params"], saved)
                    for group, saved in zip(groups, self._groups, strict=True)
                ]
            )
            and self._hooks_are_unchanged()
        )

    def changed_loss_value(self) -> str | None:
        """Return the name of a Python value that the loss reads and that has changed."""
        return self._loss_values.changed()

    def _current_tensors(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable([each.values() for each in self._tensor_dicts]))

    def _tensors_are_unchanged(self) -> bool:
        # The guard also fails in other PyTorch modes of the caller, so a failure is checked tensor by tensor.
        if (
            list(map(torch.Tensor.data_ptr, self._present)) == self._addresses
            and list(map(_gradient_attributes, self._present)) == self._gradient_attributes
            and self._guard(*self._present)
        ):
            return True
        return list(map(_layout, self._present)) == self._layouts

    def _settings_are_unchanged(self) -> bool:
        try:
            if self._settings == self._saved_settings:
                return True
        except (TypeError, ValueError, RuntimeError):  # of tensors that are not the same
            pass
        return all(map(_same_settings, self._settings, self._saved_settings))

    def _hooks_are_unchanged(self) -> bool:
        return (
            hook_numbers(self._optimizer) == self._hook_numbers
            or len(hooks_of(self._optimizer)) == self._hooks
        )

    def watch_constants(self, constants: Sequence[torch.Tensor]) -> None:
        """Also watch tensors whose contents were folded into a plan."""
        self._constants += [(one, one._version) for one in constants if not one.is_inference()]


class _LossValues:
    """The plain values that the code of a loss reads: of enclosing functions, globals, and attributes of objects."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self._names: list[str] = []
        self._reads: list[Callable[[], Any]] = []
        self._seen: set[int] = set()
        self._objects: set[tuple[int, FunctionType]] = set()
        self._visit(loss)
        self._saved = self._current()

    def changed(self) -> str | None:
        """Return the name of a value that has changed."""
        current = self._current()
        if _identical(current, self._saved):
            return None
        same = map(_same_value, current, self._saved)
        return next((name for name, equal in zip(self._names, same, strict=True) if not equal), None)

    def _current(self) -> list[Any]:
        return [read() for read in self._reads]

    def _visit(self, value: Any) -> None:
        if isinstance(value, functools.partial):
            for each in (value.func, *value.args, *value.keywords.values()):
                self._visit(each)
        elif isinstance(value, MethodType):
            self._method(value.__func__, value.__self__)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif callable(value) and not isinstance(
            value, nn.Module
        ):  # attributes of modules are watched elsewhere
            self._method(type(value).__call__, value)

    def _method(self, function: Any, owner: Any) -> None:
        if isinstance(function, FunctionType) and is_model_code(function):
            self._function(function)
            self._attributes(owner, function)

    def _function(self, function: FunctionType) -> None:
        if id(function) in self._seen or not is_model_code(function):
            return
        self._seen.add(id(function))
        names = code_names(function.__code__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # unbound cell
                self._value(name, cell.cell_contents, functools.partial(_contents, cell), function)
        scope = function.__globals__
        for name in names.reads & scope.keys():
            self._value(name, scope[name], functools.partial(scope.get, name), function)

    def _attributes(self, value: Any, function: FunctionType) -> None:
        """Watch the attributes of an object whose names the function uses, and what its methods among them read."""
        own, kind = getattr(value, "__dict__", {}), type(value)
        if isinstance(value, nn.Module) or not is_model_code(kind) or (id(value), function) in self._objects:
            return
        self._objects.add((id(value), function))
        for name in code_names(function.__code__).attributes:
            if name in own:
                self._value(name, own[name], functools.partial(own.get, name), function)
            else:
                self._method(getattr(kind, name, None), value)

    def _value(self, name: str, value: Any, read: Callable[[], Any], function: FunctionType) -> None:
        if isinstance(value, (*_PLAIN_TYPES, torch.Tensor)):
            self._names.append(name)
            self._reads.append(read)
        if isinstance(value, FunctionType | MethodType | functools.partial):
            self._visit(value)
        elif type(value) is dict:
            for key, item in value.items():
                if isinstance(item, _PLAIN_TYPES):
                    self._names.append(f"{name}[{key!r}]")
                    self._reads.append(functools.partial(value.get, key))
        elif not isinstance(value, type):
            self._visit(value)
            self._attributes(value, function)


def _contents(cell: CellType) -> Any:
    with contextlib.suppress(ValueError):  # unbound by now
        return cell.cell_contents


def _same_value(now: Any, saved: Any) -> bool:
    return now is saved or (not isinstance(saved, torch.Tensor) and _same_setting(now, saved))


def _same_settings(now: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    try:
        if now == saved:
            return True
    except (TypeError, ValueError, RuntimeError):  # of tensors that are not the same
        pass
    return all(
        _same_setting(now.get(name), saved.get(name)) for name in now.keys() | saved.keys() if name != _MODE
    )


def _same_setting(now: Any, saved: Any) -> bool:
    if now is saved or not (isinstance(now, _PLAIN_TYPES) and isinstance(saved, _PLAIN_TYPES)):
        return True
    try:
        return bool(now == saved)
    except (TypeError, ValueError, RuntimeError):  # of tensors in a list, say
        return False


def _identical(now: Sequence[Any], saved: Sequence[Any]) -> bool:
    return len(now) == len(saved) and all(map(operator.is_, now, saved))


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), *_gradient_attributes(tensor)
