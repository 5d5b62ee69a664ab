"""PyTorch's optimisers as rules of `optimizer_step`: their groups, numbers and state, as they are at each step."""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.ops import optimizer_step
from escalade.ops.expressions import Expression
from escalade.ops.optimizer_step import GRADIENT, PARAMETER, STEP, Rule, adam, no_progress, sgd

Group = Mapping[str, Any]
_STATE = {
    torch.optim.SGD: {"m": "momentum_buffer"},
    torch.optim.Adam: {"m": "exp_avg", "v": "exp_avg_sq", "w": "max_exp_avg_sq"},
    torch.optim.AdamW: {"m": "exp_avg", "v": "exp_avg_sq", "w": "max_exp_avg_sq"},
}
"""What PyTorch calls the state of each optimiser."""
_SETTINGS = {
    torch.optim.SGD: ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    torch.optim.Adam: ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    torch.optim.AdamW: (
        "lr",
        "betas",
        "eps",
        "weight_decay",
        "amsgrad",
        "maximize",
        "decoupled_weight_decay",
    ),
}
"""The settings of a group that its rule is made of; a group may have others, which are its owner's."""
_COUNT = "step"


def require_known(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimiser that there is no rule for, or that does not step each parameter once."""
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
    places = Counter(
        one.data_ptr() for group in optimizer.param_groups for one in group["params"] if one.numel()
    )
    if any(number > 1 for number in places.values()):
        raise UnsupportedError(
            "parameters of the optimizer that lie in the same memory: a training step steps all of them at once, so "
            "each is given once; layers share weights by holding the same torch.nn.Parameter"
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


def _settings_of(optimizer: torch.optim.Optimizer, group: Group) -> list[Any]:
    return [group.get(key) for key in _SETTINGS[type(optimizer)]]


def _plain(settings: list[Any]) -> list[Any] | None:
    """Return settings that say by themselves whether they have changed; None if tensors are among them."""
    leaves = [one for value in settings for one in (value if isinstance(value, tuple | list) else (value,))]
    if any(isinstance(one, torch.Tensor) for one in leaves):
        return None
    return [list(value) if isinstance(value, list) else value for value in settings]


def _numbers_of(optimizer: torch.optim.Optimizer, group: Group) -> tuple[Any, ...]:
    """A group's settings as numbers, to see whether any has changed; of tensors it is what they hold now."""
    return tuple(map(_number, _settings_of(optimizer, group)))


def _number(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return tuple(map(_number, value)) if isinstance(value, tuple | list) else value


class Stepped:
    """Parameters of one group with gradients of one type that have taken the same number of steps.

    State that the optimiser does not have yet is zeros, and becomes the optimiser's with the first step: what fails
    before leaves nothing there.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: Group, parameters: Sequence[nn.Parameter], scaled: bool
    ) -> None:
        self._of = weakref.ref(optimizer)
        self._group, self._scaled = group, scaled
        self.parameters = tuple(parameters)
        self._rule = self._rule_now()
        self._numbers = _numbers_of(optimizer, group)
        self._settings = _plain(_settings_of(optimizer, group))
        self._noted: list[Mapping[str, Any]] | None = None
        self._new: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        """State that was made here, until the optimiser has it."""
        self._given = self._new
        self._counts: list[tuple[torch.Tensor, int]] = []
        """The optimiser's counts of steps, each with its version when it was last read or written here."""
        device = parameters[0].device
        self._scalars = self._rule.scalars(device)
        self.progress = no_progress(device)
        self.progress[0] = _steps_taken(optimizer, parameters[0])
        self._state = self._found_state()
        self._note_counts()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        """The optimiser, which holds this by its hooks, and is not to be held by it."""
        optimizer = self._of()
        assert optimizer is not None, "whoever steps for it holds it"
        return optimizer

    def follows(self, same_mappings: bool = False) -> bool:
        """Takes over the settings that the optimiser has now; False if they make another formula, or if it has other
        state. `same_mappings`: the optimizer has the mappings of parameters' state that `note_state` has seen."""
        optimizer = self._optimizer
        names = _STATE[type(optimizer)]
        noted = self._noted if same_mappings and not self._new else None
        own = list(map(self._own, self.parameters)) if noted is None else noted
        for name, kept in self._state.items():
            role = names[name]
            if not all(map(operator.is_, [one.get(role) for one in own], kept)):
                return False
        if any([count._version != version for count, version in self._counts]):
            return False
        if self._settings is not None and _settings_of(optimizer, self._group) == self._settings:
            return True
        now = _numbers_of(optimizer, self._group)
        if now != self._numbers:
            rule = self._rule_now()
            if rule.expression != self._rule.expression:
                return False
            self._scalars.copy_(rule.scalars())  # the loss scale among them is written before every step
            self._numbers = now
            self._settings = _plain(_settings_of(optimizer, self._group))
        return True

    def note_state(self) -> None:
        """Keep the mappings of the parameters' state: looking them up hashes tensors, in Python."""
        self._noted = list(map(self._own, self.parameters))

    def hand_over(self) -> None:
        """Gives the optimiser the state that was made here, now that a step has been done with it."""
        if self._new:
            for parameter, made in self._new.items():
                self._optimizer.state[parameter].update(made)
            self._given, self._new = self._new, {}

    def read_count(self) -> None:
        """Goes on from the number of steps that the optimiser has counted."""
        self.progress[0] = _steps_taken(self._optimizer, self.parameters[0])
        self._note_counts()

    def steps(self, group: Group, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether it is these parameters of this group that it steps."""
        return (
            self._group is group
            and len(self.parameters) == len(parameters)
            and all(map(operator.is_, self.parameters, parameters))
        )

    def _take_back(self) -> None:
        for parameter, made in self._given.items():
            own = self._optimizer.state.get(parameter, {})
            for name, tensor in made.items():
                if own.get(name) is tensor:
                    del own[name]
            if not own:
                self._optimizer.state.pop(parameter, None)
        self._new = self._given

    def _note_counts(self) -> None:
        counts = [self._own(one).get(_COUNT) for one in self.parameters]
        self._counts = [(one, one._version) for one in counts if isinstance(one, torch.Tensor)]

    def _own(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """The state that the optimizer has for a parameter, and what it lacks of it from what was made here."""
        state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        made = self._new.get(parameter)
        if not made:
            return state
        # PyTorch before 2.0 saved a momentum_buffer of None: that is none.
        return {**made, **{name: kept for name, kept in state.items() if kept is not None}}

    def _found_state(self) -> dict[str, list[torch.Tensor]]:
        """The state of these parameters where the optimiser has it, made where it has none."""
        names = _STATE[type(self._optimizer)]
        found: dict[str, list[torch.Tensor]] = {name: [] for name in self._rule.state}
        for parameter in self.parameters:
            own, made = self._own(parameter), {}
            if not isinstance(self._optimizer, torch.optim.SGD) and _COUNT not in own:
                on_device = self._group["capturable"] or self._group["fused"]
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
        """Tells the optimiser how many steps were taken, where it counts them and nobody has set the count since. It
        waits for the device. If all steps so far were left out, the optimiser has no state of them."""
        taken = float(self.progress[0])
        if not taken:
            self._take_back()
        for count, version in self._counts:
            if count._version == version:
                count.fill_(taken)
        self._note_counts()

    def _rule_now(self) -> Rule:
        rule = _rule_of(self._optimizer, self._group)
        return rule.scaled() if self._scaled else rule


class States:
    """The mappings that an optimizer keeps the state of its parameters in, all of them and in their order."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[Stepped]) -> None:
        self._all = optimizer.state
        self._each = list(optimizer.state.values())
        for group in groups:
            group.note_state()

    def are_those_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if no mapping was added, removed or replaced. Values are compared: keys would be hashed."""
        now = optimizer.state
        return (
            now is self._all
            and len(now) == len(self._each)
            and all(map(operator.is_, now.values(), self._each))
        )


def alike(
    optimizer: torch.optim.Optimizer, types: Mapping[nn.Parameter, torch.dtype]
) -> list[tuple[Group, tuple[nn.Parameter, ...]]]:
    """The parameters that have gradients, of these types, as they can be stepped together: those of one group and one
    type that have taken the same number of steps. Parameters without elements have nothing to step."""
    made: list[tuple[Group, tuple[nn.Parameter, ...]]] = []
    for group in optimizer.param_groups:
        together: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for one in group["params"]:
            if one in types and one.numel():
                together.setdefault((_steps_taken(optimizer, one), types[one]), []).append(one)
        made += [(group, tuple(parameters)) for parameters in together.values()]
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
            gradient = gradients[group.parameters[0]]
            first = gradient[(0,) * gradient.dim()]  # a view in any memory format, which flatten() is not
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
