"""What plans of a training step are made of: modules and their tensors, and the optimiser's groups."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import chain
from types import FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn

from escalade.device.torch_private import FAST_PATHS
from escalade.engine.training.followed import hook_numbers, hooks_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, FunctionType, MethodType, NoneType)
"""Settings of modules; what else they keep, such as the result of a run, is no part of what a step computes."""
_MODE = "training"
_marks = operator.attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


class Standing:
    """The modules, parameters, buffers and settings that plans are made of, and the optimizer's groups.

    Every call compares them before it launches anything, so it has to be quick: whole lists are compared in C, and
    element by element only where they differ.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._settings = [vars(module) for module in modules]
        self._kept_settings = list(map(dict, self._settings))
        self._linked = [
            held
            for module in modules
            for held in (module._modules, *(getattr(module, name) for name in _HOOKS))
        ]
        self._kept_linked = list(map(dict, self._linked))
        self._held = [held for module in modules for held in (module._parameters, module._buffers)]
        self._tensors = self._tensors_now()
        self._present = [tensor for tensor in self._tensors if tensor is not None]
        with torch.no_grad():  # as it is asked
            self._guard = FAST_PATHS.guard(self._present)
        self._addresses = list(map(torch.Tensor.data_ptr, self._present))
        self._marks = list(map(_marks, self._present))
        self._places = list(map(_place, self._present))
        self._stepped = [list(group["params"]) for group in optimizer.param_groups]
        self._hooks, self._hook_numbers = len(hooks_of(optimizer)), hook_numbers(optimizer)
        self._constants: list[tuple[torch.Tensor, int]] = []

    def is_as_it_was(self) -> bool:
        """Return True if nothing has changed, apart from what the model's tensors hold and the modes of its modules."""
        groups = self._optimizer.param_groups
        return (
            self._linked == self._kept_linked
            and _are(self._tensors_now(), self._tensors)
            and self._has_its_places()
            and self._has_its_settings()
            and all([tensor._version == version for tensor, version in self._constants])
            and len(groups) == len(self._stepped)
            and all([_are(group["params"], kept) for group, kept in zip(groups, self._stepped, strict=True)])
            and self._has_its_hooks()
        )

    def _tensors_now(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable([held.values() for held in self._held]))

    def _has_its_places(self) -> bool:
        """Compare addresses, sizes and marks of all tensors. The guard may also fail for the caller's modes."""
        if (
            list(map(torch.Tensor.data_ptr, self._present)) == self._addresses
            and list(map(_marks, self._present)) == self._marks
            and self._guard(*self._present)
        ):
            return True
        return list(map(_place, self._present)) == self._places

    def _has_its_settings(self) -> bool:
        try:
            if self._settings == self._kept_settings:
                return True
        except (TypeError, ValueError, RuntimeError):  # of tensors that are not the same
            pass
        return all(map(_have_the_same_settings, self._settings, self._kept_settings))

    def _has_its_hooks(self) -> bool:
        return (
            hook_numbers(self._optimizer) == self._hook_numbers
            or len(hooks_of(self._optimizer)) == self._hooks
        )

    def reads(self, constants: Sequence[torch.Tensor]) -> None:
        """A plan has what is in these tensors now."""
        self._constants += [(one, one._version) for one in constants if not one.is_inference()]


def _have_the_same_settings(now: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    try:
        if now == kept:
            return True
    except (TypeError, ValueError, RuntimeError):  # of tensors that are not the same
        pass
    return all(
        _are_equal(now.get(name), kept.get(name)) for name in now.keys() | kept.keys() if name != _MODE
    )


def _are_equal(now: Any, kept: Any) -> bool:
    if now is kept or not (isinstance(now, _PLAIN) and isinstance(kept, _PLAIN)):
        return True
    try:
        return bool(now == kept)
    except (TypeError, ValueError, RuntimeError):  # of tensors in a list, say
        return False


def _are(now: Sequence[Any], kept: Sequence[Any]) -> bool:
    """Whether they are the same objects."""
    return len(now) == len(kept) and all(map(operator.is_, now, kept))


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where a tensor is stored, and what is done with its gradient."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), *_marks(tensor)
