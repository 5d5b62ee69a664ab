"""Keep an optimizer's state consistent with the training steps that update its parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from escalade.engine.training.optimizers import RULES, ParameterGroup
from escalade.errors import UnsupportedError

_states: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[OptimizerState]] = (
    weakref.WeakKeyDictionary()
)
"""The state tracker of each optimizer; the optimizer's own hooks keep it alive."""


class OptimizerState:
    """State that all training steps of one optimizer share.

    Steps are counted on the device. The count is written to the optimizer when it is read (`state_dict`), and when
    another training step or the optimizer itself continues from it, even if the step that counted no longer exists.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.lock = threading.RLock()
        self.groups: list[ParameterGroup] = []
        """The groups of the last step; empty if the optimizer's own state is current."""
        optimizer.register_state_dict_pre_hook(self._before_read)
        optimizer.register_step_pre_hook(self._before_read)
        optimizer.register_step_post_hook(self._after_change)
        optimizer.register_load_state_dict_post_hook(self._after_change)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> OptimizerState:
        """Return the tracker of this optimizer, creating it if necessary."""
        found = _states[optimizer]() if optimizer in _states else None
        if found is None:
            found = cls(optimizer)
            _states[optimizer] = weakref.ref(found)
        return found

    def write_counts(self) -> None:
        """Write the number of steps taken to the optimizer."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            for group in self.groups:
                group.write_count()

    def reset(self) -> None:
        """Write the counts, so that the next step starts from the optimizer's state."""
        self.write_counts()
        self.groups = []

    def _before_read(self, *_: Any) -> None:
        self.write_counts()

    def _after_change(self, *_: Any) -> None:
        self.groups = []


def hook_numbers(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the ids of all hooks around an optimizer's steps; PyTorch gives each hook a new one."""
    return [number for held in _hooks_around(optimizer) for number in held]


def _hooks_around(optimizer: torch.optim.Optimizer) -> tuple[Mapping[int, Callable[..., Any]], ...]:
    return (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks, _global_optimizer_post_hooks,
    )  # fmt: skip


def hooks_of(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks around an optimizer's steps that are not ours."""
    hooks = [hook for held in _hooks_around(optimizer) for hook in held.values()]
    return [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), OptimizerState)]


def has_rule(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `optimizer_step` can do all that the optimizer's own step does."""
    return type(optimizer) in RULES and not hooks_of(optimizer)


def require_no_gradient_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuse hooks that a training step would not call."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one._backward_hooks or one._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"parameter of shape {list(one.shape)} with gradient hooks: a training step does not call them; "
                    "torch.compile(model, backend='escalade') does"
                )
