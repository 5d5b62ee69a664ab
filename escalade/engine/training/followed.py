"""An optimiser that training steps step for: they take turns, and it is told how many steps they have taken."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from escalade.engine.training.optimizers import Stepped
from escalade.errors import UnsupportedError

_followed: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Followed]] = (
    weakref.WeakKeyDictionary()
)
"""What follows each optimiser; the optimiser's own hooks keep it alive."""


class Followed:
    """What all steps of one optimiser share.

    Steps count on the device. The optimiser learns their number when it shows or uses it, and when another step, or
    the optimiser itself, goes on from there; also if the step that counted is gone by then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.lock = threading.RLock()
        self.groups: list[Stepped] = []
        """The groups that took the last step; none if the state of the optimiser itself is what counts."""
        optimizer.register_state_dict_pre_hook(self._before)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        optimizer.register_load_state_dict_post_hook(self._after)

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Followed:
        """What follows this optimiser."""
        found = _followed[optimizer]() if optimizer in _followed else None
        if found is None:
            found = cls(optimizer)
            _followed[optimizer] = weakref.ref(found)
        return found

    def write_counts(self) -> None:
        """Tells the optimiser how many steps were taken."""
        with self.lock, torch.inference_mode(False), torch.no_grad():
            for group in self.groups:
                group.write_count()

    def settle(self) -> None:
        """Leaves the optimiser's state to be read anew: it has all that was counted."""
        self.write_counts()
        self.groups = []

    def _before(self, *_: Any) -> None:
        self.write_counts()

    def _after(self, *_: Any) -> None:
        """Somebody else has changed the state."""
        self.groups = []


def hook_numbers(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the numbers of all hooks around an optimizer's steps; PyTorch gives each hook a new one."""
    return [number for held in _hooks_around(optimizer) for number in held]


def _hooks_around(optimizer: torch.optim.Optimizer) -> tuple[Mapping[int, Callable[..., Any]], ...]:
    return (
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks, _global_optimizer_post_hooks,
    )  # fmt: skip


def hooks_of(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """What others have an optimiser call around its steps."""
    hooks = [hook for held in _hooks_around(optimizer) for hook in held.values()]
    return [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), Followed)]


def require_no_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Refuses what a step would not call."""
    if hooks_of(optimizer):
        raise UnsupportedError(
            "optimizer with hooks around its steps: a training step calls none, for gradients are its own; do behind "
            "it what they do, or step with the optimiser itself, behind torch.compile(model, backend='escalade')"
        )
    for group in optimizer.param_groups:
        for one in group["params"]:
            if one._backward_hooks or one._post_accumulate_grad_hooks:
                raise UnsupportedError(
                    f"a parameter of {list(one.shape)} with hooks on its gradient: a training step calls none of them; "
                    "behind torch.compile(model, backend='escalade') they are called"
                )
