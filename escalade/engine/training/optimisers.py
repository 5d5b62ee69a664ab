"""PyTorch's optimisers as rules of `optimizer_step`: their groups, numbers and state, as they are at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.ops import optimizer_step
from escalade.ops.expressions import Expression
from escalade.ops.optimizer_step import Rule, adam, no_progress, sgd
from escalade.ops.optimizer_step.rules import GRADIENT, PARAMETER, STEP

Group = Mapping[str, Any]
_STATE = {
    torch.optim.SGD: {"m": "momentum_buffer"},
    torch.optim.Adam: {"m": "exp_avg", "v": "exp_avg_sq", "w": "max_exp_avg_sq"},
    torch.optim.AdamW: {"m": "exp_avg", "v": "exp_avg_sq", "w": "max_exp_avg_sq"},
}
"""What PyTorch calls the state of each optimiser."""
_COUNT = "step"


def require_known(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimiser that there is no rule for."""
    if type(optimizer) not in _STATE:
        known = ", ".join(kind.__name__ for kind in _STATE)
        raise UnsupportedError(
            f"optimizer {type(optimizer).__name__}: a training step takes torch.optim's {known}; others step by "
            "themselves, behind torch.compile(model, backend='escalade')"
        )
    others = {one.dtype for group in optimizer.param_groups for one in group["params"]} - {torch.float32}
    if others:
        raise UnsupportedError(
            f"parameters of {', '.join(sorted(map(str, others)))}: a training step keeps them in torch.float32; "
            "dtype='fp16' and 'bf16' multiply in 16 bits"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(
            "optimizer with differentiable=True: a training step has no gradients of its own"
        )


def _rule_of(optimizer: torch.optim.Optimizer, group: Group) -> Rule:
    """The rule that a group of parameters follows now."""
    if isinstance(optimizer, torch.optim.SGD):
        return sgd(
            float(group["lr"]), group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"],
            group["maximize"],
        )  # fmt: skip
    decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(group.get("decoupled_weight_decay"))
    betas = float(group["betas"][0]), float(group["betas"][1])
    return adam(
        float(group["lr"]), betas, group["eps"], group["weight_decay"], group["amsgrad"], group["maximize"], decoupled
    )  # fmt: skip


def numbers_of(group: Group) -> tuple[Any, ...]:
    """All of a group's settings, to see whether any has changed."""
    return tuple(
        (key, float(value) if isinstance(value, torch.Tensor) else value)
        for key, value in group.items()
        if key != "params"
    )


class Stepped:
    """Parameters of one group with gradients of one type that have taken the same number of steps."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: Group, parameters: Sequence[nn.Parameter], scaled: bool
    ) -> None:
        self._optimizer, self._group, self._scaled = optimizer, group, scaled
        self.parameters = tuple(parameters)
        self._rule = self._rule_now()
        self._numbers = numbers_of(group)
        self._state = _state(optimizer, group, self._rule, parameters)
        device = parameters[0].device
        self._scalars = self._rule.scalars(device)
        self.progress = no_progress(device)
        self.progress[0] = _steps_taken(optimizer, parameters[0])

    def follows(self) -> bool:
        """Takes over the settings that the optimiser has now; False if they make another formula, or if it has other
        state."""
        names, state = _STATE[type(self._optimizer)], self._optimizer.state
        for name, kept in self._state.items():
            for parameter, tensor in zip(self.parameters, kept, strict=True):
                if state[parameter].get(names[name]) is not tensor:
                    return False
        now = numbers_of(self._group)
        if now != self._numbers:
            rule = self._rule_now()
            if rule.expression != self._rule.expression:
                return False
            scale = self.scale.clone() if self._scaled else None
            self._scalars.copy_(rule.scalars())
            if scale is not None:
                self.scale.copy_(scale)
            self._numbers = now
        return True

    @property
    def scale(self) -> torch.Tensor:
        """The scalar that gradients are divided by."""
        return self._scalars[self._rule.scalar_names.index("scale")]

    def step(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Steps in place by Escalade's kernels."""
        optimizer_step(
            self._rule,
            [one.detach() for one in self.parameters],
            [gradients[one] for one in self.parameters],
            self._state,
            self._scalars,
            self.progress,
            checked=self._scaled,
        )

    def rehearse(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Does the same to memory that is nobody's, so that all is compiled and loaded when it is recorded. What is in
        it is of no account: all parameters and their state are one such piece, of the size of the largest."""
        room = self.parameters[0].new_empty(max(one.numel() for one in self.parameters))

        def like(one: torch.Tensor) -> torch.Tensor:
            return room.detach()[: one.numel()].as_strided(one.shape, one.stride())

        optimizer_step(
            self._rule,
            [like(one) for one in self.parameters],
            [gradients[one] for one in self.parameters],
            {name: [like(one) for one in kept] for name, kept in self._state.items()},
            self._scalars,
            self.progress.clone(),
            checked=self._scaled,
        )

    def step_in_pytorch(self, gradients: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Steps in place by PyTorch's operators."""
        is_finite = all(bool(gradients[one].isfinite().all()) for one in self.parameters)
        skips = self._scaled and not is_finite
        self.progress[int(skips)] += 1
        self.progress[2] = skips
        if skips:
            return
        expression = Expression.parse(self._rule.expression)
        numbers = dict(zip(self._rule.scalar_names, self._scalars, strict=True)) | {STEP: self.progress[0]}
        for place, parameter in enumerate(self.parameters):
            own = {name: kept[place] for name, kept in self._state.items()}
            values = {PARAMETER: parameter.detach(), GRADIENT: gradients[parameter].float(), **own, **numbers}
            results = expression.evaluate({name: values[name] for name in expression.inputs})
            for tensor, result in zip((parameter.detach(), *own.values()), results, strict=True):
                tensor.copy_(result)

    def write_count(self) -> None:
        """Tells the optimiser how many steps were taken, where it counts them. It waits for the device."""
        taken = float(self.progress[0])
        for parameter in self.parameters:
            count = self._optimizer.state[parameter].get(_COUNT)
            if isinstance(count, torch.Tensor):
                count.fill_(taken)

    def _rule_now(self) -> Rule:
        rule = _rule_of(self._optimizer, self._group)
        return rule.scaled() if self._scaled else rule


def stepped_by(
    optimizer: torch.optim.Optimizer, types: Mapping[nn.Parameter, torch.dtype], scaled: bool
) -> list[Stepped]:
    """All that an optimiser steps, of the parameters that have gradients, of these types. State that it does not have
    yet is zeros."""
    made = []
    for group in optimizer.param_groups:
        alike: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for one in group["params"]:
            if one in types:
                alike.setdefault((_steps_taken(optimizer, one), types[one]), []).append(one)
        made += [Stepped(optimizer, group, parameters, scaled) for parameters in alike.values()]
    return made


def step_together(
    groups: Sequence[Stepped],
    gradients: Mapping[nn.Parameter, torch.Tensor],
    *,
    in_pytorch: bool,
    scaled: bool,
) -> None:
    """One step of all groups. With `scaled` gradients all of them take it, or none does: a gradient that is not finite
    is made every group's."""
    if scaled and len(groups) > 1:
        everything = [gradients[one] for group in groups for one in group.parameters]
        largest = torch._foreach_norm(everything, float("inf"))
        found = ~torch.stack([one.float() for one in largest]).isfinite().all()
        for group in groups:
            first = gradients[group.parameters[0]].flatten()[:1]
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


def _state(
    optimizer: torch.optim.Optimizer, group: Group, rule: Rule, parameters: Sequence[nn.Parameter]
) -> dict[str, list[torch.Tensor]]:
    """The state of these parameters where the optimiser has it, made where it has none."""
    names = _STATE[type(optimizer)]
    found: dict[str, list[torch.Tensor]] = {name: [] for name in rule.state}
    for parameter in parameters:
        own = optimizer.state[parameter]
        if not isinstance(optimizer, torch.optim.SGD) and _COUNT not in own:
            on_device = group["capturable"] or group["fused"]
            own[_COUNT] = torch.zeros((), device=parameter.device if on_device else "cpu")
        for name in rule.state:
            if own.get(names[name]) is None:
                own[names[name]] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
            found[name].append(own[names[name]])
    return found
