"""What plans of a training step are made of: modules and their tensors, and the optimiser's groups."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType, NoneType
from typing import Any

import torch
from torch import nn

from escalade.engine.training.followed import hooks_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, tuple, list, torch.dtype, FunctionType, MethodType, NoneType)
"""Settings of modules; what else they keep, such as the result of a run, is no part of what a step computes."""
_MODE = "training"


class Standing:
    """How modules and the optimiser stand: which modules, parameters and buffers there are, with which settings, where
    tensors lie, which of them require gradients, and who steps them. It is asked at every call, so it compares and
    makes next to nothing."""

    def __init__(self, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = [(vars(module), dict(vars(module))) for module in modules]
        self._linked = [
            (held, dict(held))
            for module in modules
            for held in (module._modules, *(getattr(module, name) for name in _HOOKS))
        ]
        self._held = [held for module in modules for held in (module._parameters, module._buffers)]
        self._tensors = [tensor for held in self._held for tensor in held.values()]
        self._places = list(map(_place, self._tensors))
        self._stepped = [list(group["params"]) for group in optimizer.param_groups]
        self._hooks = len(hooks_of(optimizer))
        self._constants: list[tuple[torch.Tensor, int]] = []

    def is_as_it_was(self) -> bool:
        """Whether nothing of it has changed since. What tensors of the model hold is of no account, nor are the modes
        of its modules."""
        groups = self._optimizer.param_groups
        return (
            all(now == kept for now, kept in self._linked)
            and _are([tensor for held in self._held for tensor in held.values()], self._tensors)
            and list(map(_place, self._tensors)) == self._places
            and all(_have_the_same_settings(now, kept) for now, kept in self._attributes)
            and all(tensor._version == version for tensor, version in self._constants)
            and len(groups) == len(self._stepped)
            and all(_are(group["params"], kept) for group, kept in zip(groups, self._stepped, strict=True))
            and len(hooks_of(self._optimizer)) == self._hooks
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


def _place(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """Where a tensor lies, and what becomes of its gradient."""
    if tensor is None:
        return None
    return (
        tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.requires_grad, tensor._backward_hooks,
        tensor._post_accumulate_grad_hooks,
    )  # fmt: skip
