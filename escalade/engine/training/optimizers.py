"""Run PyTorch's optimizers with `optimizer_step`, using their groups, settings and state as they are at each step."""

from __future__ import annotations

import inspect
import operator
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from escalade.device.strides import is_packed, layout_of
from escalade.errors import UnsupportedError
from escalade.ops import optimizer_step
from escalade.ops.expressions import Expression
from escalade.ops.optimizer_step import GRADIENT, PARAMETER, STEP, Rule, adam, no_progress, rmsprop, sgd

Group = Mapping[str, Any]
Gradients = Mapping[nn.Parameter, torch.Tensor]
_ADAM_STATE = {"m": "exp_avg", "v": "exp_avg_sq", "w": "max_exp_avg_sq"}
_STATE = {
    torch.optim.SGD: {"m": "momentum_buffer"},
    torch.optim.Adam: _ADAM_STATE,
    torch.optim.AdamW: _ADAM_STATE,
    torch.optim.RMSprop: {"v": "square_avg", "a": "grad_avg", "m": "momentum_buffer"},
}
"""PyTorch's names for the state of each optimizer, by the rule's names."""
RULES = tuple(_STATE)
"""Optimizers that `optimizer_step` replaces; others update their parameters themselves."""
_ADAM_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
_SETTINGS = {
    torch.optim.SGD: ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    torch.optim.Adam: _ADAM_SETTINGS,
    torch.optim.AdamW: _ADAM_SETTINGS,
    torch.optim.RMSprop: ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
}
"""Settings of a group that determine its rule; a group may have others that the caller added."""
_COUNT = "step"
_PIECE_ELEMENTS = 2**16
"""256 KiB in fp32: the few tensors of an update fit into a core's L2 cache."""


def require_supported(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that runs the model, or whose parameters share memory."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__} runs the model itself, several times per step, and a training step "
            "runs it once; use an optimizer whose step() takes no closure"
        )
    others = {one.dtype for group in optimizer.param_groups for one in group["params"]} - {torch.float32}
    if others:
        raise UnsupportedError(
            f"parameters of {', '.join(sorted(map(str, others)))}: training steps need torch.float32 parameters; pass "
            "dtype='fp16' or 'bf16' to multiply in 16 bits"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            "optimizer with differentiable=True: a training step cannot be differentiated; pass differentiable=False"
        )
    addresses = Counter(
        one.data_ptr() for group in optimizer.param_groups for one in group["params"] if one.numel()
    )
    if any(number > 1 for number in addresses.values()):
        raise UnsupportedError(
            "parameters of the optimizer share memory: a training step updates all of them at once, so each must be "
            "listed once; to share weights, use the same torch.nn.Parameter in both layers"
        )


def _rule_of(optimizer: torch.optim.Optimizer, group: Group) -> Rule:
    """Return the rule for a group's current settings."""
    if isinstance(optimizer, torch.optim.SGD):
        return sgd(
            float(group["lr"]), group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"],
            group["maximize"],
        )  # fmt: skip
    if isinstance(optimizer, torch.optim.RMSprop):
        return rmsprop(
            float(group["lr"]), group["alpha"], group["eps"], group["weight_decay"], group["momentum"],
            group["centered"], group["maximize"],
        )  # fmt: skip
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    betas = float(group["betas"][0]), float(group["betas"][1])
    return adam(
        float(group["lr"]), betas, group["eps"], group["weight_decay"], group["amsgrad"], group["maximize"], decoupled
    )  # fmt: skip


def state_bytes(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the optimizer's state for these parameters; with a rule also of what is not allocated yet."""
    trained = set(parameters)
    if type(optimizer) not in RULES:
        held = (value for one in trained & optimizer.state.keys() for value in optimizer.state[one].values())
        return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))
    return sum(
        one.nbytes * len(_rule_of(optimizer, group).state)
        for group in optimizer.param_groups
        for one in group["params"]
        if one in trained
    )


def _settings_of(optimizer: torch.optim.Optimizer, group: Group) -> list[Any]:
    return [group.get(key) for key in _SETTINGS[type(optimizer)]]


def _comparable(settings: list[Any]) -> list[Any] | None:
    """Return settings that can be compared to detect a change; None if tensors are among them."""
    leaves = [one for value in settings for one in (value if isinstance(value, tuple | list) else (value,))]
    if any(isinstance(one, torch.Tensor) for one in leaves):
        return None
    return [list(value) if isinstance(value, list) else value for value in settings]


def _numbers_of(optimizer: torch.optim.Optimizer, group: Group) -> tuple[Any, ...]:
    """Return a group's settings as numbers, tensors by their current contents."""
    return tuple(map(_number, _settings_of(optimizer, group)))


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(_number, value)) if isinstance(value, tuple | list) else value


@dataclass(frozen=True)
class GradientForm:
    """Preprocessing of gradients before the optimizer's rule."""

    divided: bool
    """True if they are divided by a scalar on the device: loss scale, calls, and the excess of their norm."""
    checked: bool
    """True if a step is skipped when any is not finite."""
    clip_value: float | None
    """Largest magnitude."""

    def applied(self, rule: Rule) -> Rule:
        clipped = rule if self.clip_value is None else rule.clipped(self.clip_value)
        return clipped.scaled() if self.divided else clipped


class ParameterGroup:
    """Parameters of one optimizer group with one step count, which one launch updates.

    Gradients have fp32 and at most one other dtype; parameters with fp32 gradients are last.

    State that the optimizer does not have yet is allocated as zeros, and handed to the optimizer after the first
    successful step, so that a failure before leaves the optimizer unchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Group,
        parameters: Sequence[nn.Parameter],
        form: GradientForm,
    ) -> None:
        self._optimizer_ref = weakref.ref(optimizer)
        self._group, self._form = group, form
        self.parameters = tuple(parameters)
        self._rule = self._current_rule()
        self._numbers = _numbers_of(optimizer, group)
        self._settings = _comparable(_settings_of(optimizer, group))
        self._cached_states: list[Mapping[str, Any]] | None = None
        self._new: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        """State allocated here that the optimizer does not have yet."""
        self._transferred = self._new
        self._counts: list[tuple[torch.Tensor, int]] = []
        """The optimizer's step counts, each with its version counter when it was last read or written here."""
        device = parameters[0].device
        self._scalars = self._rule.scalars(device)
        self.progress = no_progress(device)
        self.progress[0] = _steps_taken(optimizer, parameters[0])
        self._state = self._find_state()
        self._save_counts()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer_ref()  # weak: the optimizer holds this object through its hooks
        assert optimizer is not None, "the training step holds it"
        return optimizer

    def sync_settings(self, same_mappings: bool = False) -> bool:
        """Copy the optimizer's current settings; return False if they need another rule, or if its state was replaced.

        `same_mappings` promises that the optimizer has the state dicts that `cache_states` has seen.
        """
        optimizer = self._optimizer
        names = _STATE[type(optimizer)]
        noted = self._cached_states if same_mappings and not self._new else None
        own = list(map(self._state_of, self.parameters)) if noted is None else noted
        for name, tensors in self._state.items():
            role = names[name]
            if not all(map(operator.is_, [one.get(role) for one in own], tensors)):
                return False
        if any([count._version != version for count, version in self._counts]):
            return False
        if self._settings is not None and _settings_of(optimizer, self._group) == self._settings:
            return True
        now = _numbers_of(optimizer, self._group)
        if now != self._numbers:
            rule = self._current_rule()
            if rule.expression != self._rule.expression:
                return False
            self._scalars.copy_(
                rule.scalars()
            )  # this includes the divisor, which is rewritten before every step
            self._numbers = now
            self._settings = _comparable(_settings_of(optimizer, self._group))
        return True

    def cache_states(self) -> None:
        """Keep references to the parameters' state dicts: looking them up hashes tensors, in Python."""
        self._cached_states = list(map(self._state_of, self.parameters))

    def transfer_state(self) -> None:
        """Hand state allocated here to the optimizer, after a step has succeeded."""
        if self._new:
            for parameter, made in self._new.items():
                self._optimizer.state[parameter].update(made)
            self._transferred, self._new = self._new, {}

    def read_count(self) -> None:
        """Continue from the optimizer's step count."""
        self.progress[0] = _steps_taken(self._optimizer, self.parameters[0])
        self._save_counts()

    def is_for(self, group: Group, parameters: Sequence[nn.Parameter]) -> bool:
        """Return True if this updates exactly these parameters of this group."""
        return (
            self._group is group
            and len(self.parameters) == len(parameters)
            and all(map(operator.is_, self.parameters, parameters))
        )

    def _retract_state(self) -> None:
        for parameter, made in self._transferred.items():
            own = self._optimizer.state.get(parameter, {})
            for name, tensor in made.items():
                if own.get(name) is tensor:
                    del own[name]
            if not own:
                self._optimizer.state.pop(parameter, None)
        self._new = self._transferred

    def _save_counts(self) -> None:
        counts = [self._state_of(one).get(_COUNT) for one in self.parameters]
        self._counts = [(one, one._version) for one in counts if isinstance(one, torch.Tensor)]

    def _state_of(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """Return a parameter's state in the optimizer, completed by state allocated here."""
        state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        made = self._new.get(parameter)
        if not made:
            return state
        # PyTorch before 2.0 saved a momentum_buffer of None, which counts as missing.
        return {**made, **{name: value for name, value in state.items() if value is not None}}

    def _find_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the state tensors by name, allocating those that the optimizer does not have."""
        names = _STATE[type(self._optimizer)]
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self._rule.state}
        for parameter in self.parameters:
            own, made = self._state_of(parameter), {}
            if not isinstance(self._optimizer, torch.optim.SGD) and _COUNT not in own:
                on_device = self._group["capturable"] or self._group.get("fused", False)
                made[_COUNT] = torch.zeros((), device=parameter.device if on_device else "cpu")
            for name in self._rule.state:
                if own.get(names[name]) is None:
                    made[names[name]] = torch.zeros_like(
                        parameter, memory_format=torch.preserve_format
                    ).detach()
                found[name].append({**own, **made}[names[name]])
            if made:
                self._new[parameter] = made
        return found

    @property
    def divisor(self) -> torch.Tensor:
        """The scalar that gradients are divided by."""
        return self._scalars[self._rule.scalar_names.index("scale")]

    def step(self, gradients: Gradients) -> None:
        """Update the parameters in place with Escalade's kernels."""
        self._launch(gradients, [one.detach() for one in self.parameters], self._state, self.progress)

    def warm_up(self, gradients: Gradients) -> None:
        """Run the kernels on scratch memory, so that they are compiled and loaded before CUDA graph capture.

        Contents do not matter, so all parameters and states alias one buffer of the largest parameter's size.
        """
        scratch = self.parameters[0].new_empty(max(one.numel() for one in self.parameters)).detach()

        def like(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
            return [scratch[: one.numel()].as_strided(one.shape, one.stride()) for one in tensors]

        state = {name: like(tensors) for name, tensors in self._state.items()}
        self._launch(gradients, like(self.parameters), state, self.progress.clone())

    def _launch(
        self,
        gradients: Gradients,
        parameters: list[torch.Tensor],
        state: dict[str, list[torch.Tensor]],
        progress: torch.Tensor,
    ) -> None:
        optimizer_step(
            self._rule,
            parameters,
            [gradients[one] for one in self.parameters],
            state,
            self._scalars,
            progress,
            checked=self._form.checked,
        )

    def step_in_pytorch(self, gradients: Gradients) -> None:
        """Update the parameters in place with PyTorch's operators."""
        skips = self._form.checked and not all(
            bool(gradients[one].isfinite().all()) for one in self.parameters
        )
        self.progress[int(skips)] += 1
        self.progress[2] = skips
        if skips:
            return
        expression = Expression.parse(self._rule.expression)
        numbers = dict(zip(self._rule.scalar_names, self._scalars, strict=True)) | {STEP: self.progress[0]}
        for place, parameter in enumerate(self.parameters):
            own = [tensors[place] for tensors in self._state.values()]
            for updated, *state, gradient in _pieces((parameter.detach(), *own, gradients[parameter])):
                values = {PARAMETER: updated, GRADIENT: gradient.float(), **numbers}
                values |= zip(self._state, state, strict=True)
                results = expression.evaluate({name: values[name] for name in expression.inputs})
                for tensor, result in zip((updated, *state), results, strict=True):
                    tensor.copy_(result)

    def write_count(self) -> None:
        """Write the number of steps to the optimizer, except to counts that were changed since. Waits for the device.

        If all steps so far were skipped, state that was handed to the optimizer is removed again.
        """
        taken = float(self.progress[0])
        if not taken:
            self._retract_state()
        for count, version in self._counts:
            if count._version == version:
                count.fill_(taken)
        self._save_counts()

    def _current_rule(self) -> Rule:
        return self._form.applied(_rule_of(self._optimizer, self._group))


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterable[tuple[torch.Tensor, ...]]:
    """Split tensors into corresponding chunks, small enough that intermediate results stay in the CPU's cache."""
    strides = tensors[0].stride()
    if not all(one.stride() == strides and is_packed(one, layout_of(one)) for one in tensors):
        return [tuple(tensors)]
    flat = [one.as_strided((one.numel(),), (1,), one.storage_offset()) for one in tensors]
    return zip(*(one.split(_PIECE_ELEMENTS) for one in flat), strict=True)


class StateIdentity:
    """Identities of all state dicts of an optimizer, in order."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[ParameterGroup]) -> None:
        self._all = optimizer.state
        self._each = list(optimizer.state.values())
        for group in groups:
            group.cache_states()

    def matches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if no dict was added, removed or replaced. Compares values: hashing the keys would be slow."""
        now = optimizer.state
        return (
            now is self._all
            and len(now) == len(self._each)
            and all(map(operator.is_, now.values(), self._each))
        )


def group_parameters(
    optimizer: torch.optim.Optimizer, types: Mapping[nn.Parameter, torch.dtype]
) -> list[tuple[Group, tuple[nn.Parameter, ...]]]:
    """Group the parameters that one launch can update: see `ParameterGroup`.

    `types` has the gradient dtype of each trained parameter. Empty parameters are left out.
    """
    made: list[tuple[Group, tuple[nn.Parameter, ...]]] = []
    for group in optimizer.param_groups:
        by_steps: dict[float, dict[torch.dtype, list[nn.Parameter]]] = {}
        for one in group["params"]:
            if one in types and one.numel():
                by_type = by_steps.setdefault(_steps_taken(optimizer, one), {})
                by_type.setdefault(types[one], []).append(one)
        for by_type in by_steps.values():
            wide = by_type.pop(torch.float32, [])
            first, *others = by_type.values() or ([],)
            made += [(group, tuple(parameters)) for parameters in ([*first, *wide], *others)]
    return made


def step_groups(
    groups: Sequence[ParameterGroup],
    gradients: Gradients,
    *,
    in_pytorch: bool,
    scaled: bool,
) -> None:
    """Update all groups. With `scaled` gradients either all groups take the step or none does.

    For that, a non-finite gradient in one group puts a NaN into the gradients of every group.
    """
    if scaled and len(groups) > 1:
        everything = [gradients[one] for group in groups for one in group.parameters]
        largest = torch._foreach_norm(everything, float("inf"))
        found = ~torch.stack([one.float() for one in largest]).isfinite().all()
        for group in groups:
            gradient = gradients[group.parameters[0]]
            first = gradient[(0,) * gradient.dim()]  # flatten() would copy gradients in channels_last
            first.copy_(torch.where(found, torch.full_like(first, float("nan")), first))
    for group in groups:
        if in_pytorch:
            group.step_in_pytorch(gradients)
        else:
            group.step(gradients)


def _steps_taken(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> float:
    state = optimizer.state.get(parameter, {})
    if _COUNT in state:
        return float(state[_COUNT])
    return float(state.get("momentum_buffer") is not None)
