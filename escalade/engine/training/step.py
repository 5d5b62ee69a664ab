"""`training_step`: forward, loss, backward and optimizer as one plan that updates the caller's own tensors."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from escalade.device.torch_private import FAST_PATHS
from escalade.engine.capture.joint import Loss, ModelWithLoss, capture_step
from escalade.engine.explain import Explanation
from escalade.engine.graph.forms import InputFormat, describe_tensor, is_dense
from escalade.engine.graph.trees import flatten
from escalade.engine.plan.plan import Plan
from escalade.engine.settings import TWIN, require_device
from escalade.engine.training.change_guard import ChangeGuard
from escalade.engine.training.optimizer_state import OptimizerState, has_rule, require_no_gradient_hooks
from escalade.engine.training.optimizers import (
    ParameterGroup,
    StateIdentity,
    group_parameters,
    require_supported,
)
from escalade.engine.training.planned import PlannedStep
from escalade.engine.training.program import StepProgram
from escalade.engine.training.settings import Reduce, StepSettings, check_scale, check_techniques
from escalade.engine.training.update import Update
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.calling.types import PLAIN

FIRST_SCALE = 65536.0
MAX_PLANS = 4
"""Cached plans, one per combination of input shapes and formats; least recently used are evicted."""
_CHANGES = 4
"""Changes of one loss after which there is a warning."""


def training_step(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    *,
    dtype: str = "fp32",
    loss_scale: float | None = None,
    device: torch.device | str | None = None,
    without: Collection[str] = (),
    reduce: Reduce | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    accumulate: int = 1,
    memory: int | None = None,
) -> TrainingStep:
    """Compile a training step: `step(x, target)` updates the model's own parameters and returns the loss.

    The model is captured in the modes that its modules have now. The optimizer's settings are read at each call, and
    its state is updated in place; a call that fails changes nothing.

    Args:
        model: The model to train, in training mode.
        loss: Function of the model's result and the remaining arguments of the step. It returns one number, or a tuple
            of it and further tensors, which are `step.loss_parts` after each call. The parameters and buffers of a
            loss that is a module are part of the step.
        optimizer: torch.optim's SGD, Adam, AdamW or RMSprop, which become part of the plan, or any other whose step
            needs no closure: it takes its own step after the plan.
        example: Arguments like those of later calls: the model's input, or a tuple of its arguments, then what `loss`
            takes after the model's result. They may be containers of tensors and plain values.
        dtype: fp32, tf32, or mixed precision in fp16 or bf16: weights stay fp32, products are as with autocast.
        loss_scale: Initial loss scale, which is then updated as by `torch.amp.GradScaler`; fp16 always has one. Steps
            with gradients that are not finite are skipped.
        device: The model's own device, or "twin" for kernels on the CPU.
        without: Techniques to leave out, to measure what they gain (docs/training-steps.md).
        reduce: For several processes: called between backward pass and optimizer with one tensor of all gradients,
            which it replaces in place by those of all processes.
        clip_norm: Largest norm of all gradients together, as `torch.nn.utils.clip_grad_norm_` has it; the norm before
            is `step.gradient_norm`.
        clip_value: Largest magnitude of a gradient's element, as `torch.nn.utils.clip_grad_value_` has it, after
            `clip_norm`.
        accumulate: Calls per update of the parameters, by the mean of their gradients.
        memory: Most bytes for activations, gradients and workspaces: within it, activations are computed again where
            gradients need them, those that save most for their cost first. Parameters and optimizer are not counted.
    """
    settings = StepSettings(
        dtype, device == TWIN, check_techniques(without), reduce, clip_norm, clip_value, accumulate, memory
    )
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(f"a training step takes a torch.nn.Module, not {type(model).__name__}")
    if not callable(loss):
        raise UnsupportedError(
            f"loss is {type(loss).__name__}: pass a function of the model's result and the step's remaining arguments, "
            "such as torch.nn.functional.cross_entropy"
        )
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise UnsupportedError(
            "the model has lazy parameters without a shape; run it once before creating the step"
        )
    if loss_scale is not None:
        loss_scale = check_scale(loss_scale)
    if not model.training:
        raise UnsupportedError("the model is in evaluation mode: call model.train() first")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"a training step takes a torch.optim optimizer, not {type(optimizer).__name__}"
        )
    require_supported(optimizer)
    require_no_gradient_hooks(optimizer)
    if device is not None:
        require_device(device)
    if not isinstance(example, Sequence) or not example:
        raise UnsupportedError(
            "example must be a tuple: the model's input, then what the loss takes after the model's result"
        )
    while (
        type(model).__name__ == "OptimizedModule"
    ):  # by name: importing torch.compile's modules takes seconds
        model = model._orig_mod  # type: ignore[assignment]
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            f"a training step takes the model itself, not {type(model).__name__}, which runs code of its own; pass "
            "model.module"
        )
    return TrainingStep(model, loss, optimizer, tuple(example), settings, loss_scale)


def plan_training_step(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    dtype: str,
    card: Card,
    without: Collection[str] = (),
    memory: int | None = None,
) -> Plan:
    """Plan a training step for a card that need not be present, without compiling."""
    settings = StepSettings(dtype, without=check_techniques(without), memory=memory, plan_only=card)
    return TrainingStep(model, loss, optimizer, tuple(example), settings).plan


class TrainingStep:
    """A training step for batches like its example in any size; each size is planned once."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        example: tuple[Any, ...],
        settings: StepSettings,
        loss_scale: float | None = None,
    ) -> None:
        if isinstance(loss, nn.Module) and any(True for _ in (*loss.parameters(), *loss.buffers())):
            model = ModelWithLoss(model, loss)
        self._model, self._loss, self._optimizer, self._settings = model, loss, optimizer, settings
        self._device = next((one.device for one in model.parameters()), torch.device("cpu"))
        self._modes = {module: module.training for module in model.modules()}
        if settings.on_twin and self._device.type != "cpu":
            raise UnsupportedError(f"device twin: it runs on the CPU, and the model is on {self._device}")
        self._scale: torch.Tensor | None = None
        if settings.dtype == "fp16" or loss_scale is not None:
            first = FIRST_SCALE if loss_scale is None else loss_scale
            self._scale = torch.full((), first, dtype=torch.float32, device=self._device)
        in_pytorch = self._device.type == "cpu" and not settings.on_twin
        # A separate object: plans hold it, and a reference back to this step would be a cycle that delays freeing
        # memory.
        self._update = Update(settings, self._scale, self._device, in_pytorch)
        self._optimizer_state = OptimizerState.of(optimizer)
        self._update.optimizer = None if has_rule(optimizer) else optimizer
        self._lock = self._optimizer_state.lock
        self._done: torch.cuda.Event | None = None
        self._stream = 0
        self._plans: dict[tuple[Any, ...], PlannedStep] = {}
        self._last: tuple[int, Callable[..., bool], PlannedStep] | None = None
        """The number of tensors of the last call, a guard for them, and their plan."""
        self._groups: list[ParameterGroup] = []
        self._states: StateIdentity | None = None
        self._change_guard = ChangeGuard(self._modules(), loss, optimizer)
        self._loss_changes = 0
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._plan_for(example)

    def __call__(self, *arguments: Any) -> torch.Tensor:
        """Run one step on a batch, and return the loss before the update."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(*arguments)
        with self._lock, torch.no_grad():
            if self._device.type != "cuda":
                return self._run(arguments)
            if FAST_PATHS.current_device() == self._device.index:
                return self._run_ordered(arguments)
            with torch.cuda.device(self._device):
                return self._run_ordered(arguments)

    def _run_ordered(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Order calls on several streams, which update the same tensors."""
        if FAST_PATHS.is_capturing():
            raise UnsupportedError(
                "a training step replays CUDA graphs and cannot be captured in another one"
            )
        stream = FAST_PATHS.current_stream(self._device.index)
        # Events order streams; on one stream the calls are in order anyway.
        if self._done is not None and stream != self._stream:
            torch.cuda.current_stream().wait_event(self._done)
        loss = self._run(arguments)
        if self._done is None:
            self._done = torch.cuda.Event()
        self._done.record()
        self._stream = stream
        return loss

    def _run(self, arguments: tuple[Any, ...]) -> torch.Tensor:
        """Run one step. Work before the launch is on the critical path of small networks."""
        planned, tensors = self._plan_for(arguments)
        same_states = self._states is not None and self._states.matches(self._optimizer)
        current = self._optimizer_state.groups is self._groups
        if not current or not all([group.sync_settings(same_states) for group in self._groups]):
            self._regroup(planned)
            same_states = False
        if planned.groups is not self._groups:
            planned.set_optimizer(self._groups, self._update, on_device=self._update.optimizer is None)
        updates = self._update.is_due()
        loss = planned.run(tensors, updates)
        self._update.count()
        if updates:
            for group in self._groups:
                group.transfer_state()
            if not same_states:
                self._states = StateIdentity(self._optimizer, self._groups)
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # read by learning-rate schedulers
        return loss

    @property
    def dtype(self) -> str:
        return self._settings.dtype

    @property
    def plan(self) -> Plan:
        """The plan used last."""
        return self.program.plan

    @property
    def program(self) -> StepProgram:
        """The program of the plan used last."""
        return next(reversed(self._plans.values())).program

    @property
    def loss_scale(self) -> float | None:
        """The current loss scale; None if the loss is not scaled."""
        return None if self._scale is None else float(self._scale)

    @property
    def loss_parts(self) -> tuple[torch.Tensor, ...]:
        """Further results of the loss in the last call, such as the terms of a sum."""
        return next(reversed(self._plans.values())).parts()

    @property
    def gradient_norm(self) -> torch.Tensor | None:
        """The norm of all gradients at the last update, before it was clipped; None without `clip_norm`."""
        return None if self._update.norm is None else self._update.norm.clone()

    @property
    def skipped_steps(self) -> int:
        """The updates that were skipped because gradients were not finite; only steps with a loss scale check that."""
        return int(self._update.skipped)

    def state_dict(self) -> dict[str, float]:
        """Return the loss scale, if there is one: all that a checkpoint needs besides model and optimizer."""
        if self._scale is None:
            return {}
        return {"scale": float(self._scale), "good_steps": float(self._update.growth)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what `state_dict` returned."""
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            found = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise UnsupportedError(
                f"state with {found or 'nothing'}: this step has "
                f"{', '.join(self.state_dict()) or 'no state, because it does not scale its loss'}"
            )
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._scale is not None:
                scale, steps = check_scale(state["scale"]), int(state["good_steps"])
                self._scale.fill_(scale)
                self._update.growth.fill_(steps)

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a training step is bound to its model's own tensors and cannot be copied or pickled: save "
            "model.state_dict(), optimizer.state_dict() and step.state_dict(), and create a new step after loading them"
        )

    def explain(self) -> Explanation:
        """Describe the plan used last, step by step, and the memory that a step takes."""
        planned = next(reversed(self._plans.values()))
        return planned.explain(self._optimizer, TWIN if self._settings.on_twin else self._device.type)

    def _plan_for(self, arguments: tuple[Any, ...]) -> tuple[PlannedStep, Sequence[torch.Tensor]]:
        """Return the plan for these arguments on the model's current tensors, and the arguments as a flat sequence."""
        if self._change_guard.is_unchanged():
            if self._last is not None:
                count, holds, planned = self._last
                if (
                    len(arguments) == count
                    and all([type(one) in PLAIN for one in arguments])
                    and holds(*arguments)
                ):
                    return planned, arguments
        else:
            self._warn_of_changing_losses(self._change_guard.changed_loss_value())
            require_supported(self._optimizer)
            require_no_gradient_hooks(self._optimizer)
            self._update.optimizer = None if has_rule(self._optimizer) else self._optimizer
            self._plans.clear()
            self._last = None
            self._optimizer_state.reset()
            self._change_guard = ChangeGuard(self._modules(), self._loss, self._optimizer)
        tensors, structure = _flatten(arguments)
        key = (structure, *((tensor.shape, InputFormat.of(tensor)) for tensor in tensors))
        found = self._plans.pop(key, None) or self._make_plan(tensors, structure)
        # `pop` and reinsertion keep the dict in order of use, so the first entry is the least recently used.
        while len(self._plans) >= MAX_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = found
        is_plain = len(tensors) == len(arguments) and all(map(operator.is_, tensors, arguments))
        self._last = (len(arguments), FAST_PATHS.guard(tensors), found) if is_plain else None
        return found, tensors

    def _warn_of_changing_losses(self, name: str | None) -> None:
        self._loss_changes += name is not None
        if self._loss_changes == _CHANGES:
            warnings.warn(
                f"the loss reads {name}, which has changed {_CHANGES} times, and each time the training step was "
                "planned again, which takes seconds: pass it as a tensor, as an argument of the step",
                stacklevel=2,
            )

    def _modules(self) -> list[nn.Module]:
        """Return the modules that plans depend on: the model's, and those of a loss that is a module."""
        loss = self._loss.modules() if isinstance(self._loss, nn.Module) else ()
        return [*self._model.modules(), *loss]

    def _make_plan(self, tensors: list[torch.Tensor], structure: pytree.TreeSpec) -> PlannedStep:
        on_device = [tensor.to(self._device) for tensor in tensors]
        taken = [one for group in self._optimizer.param_groups for one in group["params"]]
        joint = capture_step(
            self._model, self._loss, *pytree.tree_unflatten(on_device, structure),
            autocast=self._settings.autocast, scaled=self._scale is not None,
            modes=[self._modes.get(module, module.training) for module in self._model.modules()],
            stepped=taken,
        )  # fmt: skip
        trained = [one for name, one in self._model.named_parameters() if name in joint.trained]
        if not any(one in set(taken) and one.numel() for one in trained):
            raise UnsupportedError(
                "the optimizer has none of the parameters that the loss depends on; create it with this model's "
                "parameters"
            )
        self._change_guard.watch_constants(joint.constants)
        return PlannedStep(
            joint,
            self._model,
            set(taken),
            on_device,
            self._scale,
            self._settings,
            self._update.accumulator,
        )

    def _regroup(self, planned: PlannedStep) -> None:
        """Rebuild the groups from the optimizer's current groups and state."""
        self._optimizer_state.reset()
        has_own_step = self._update.optimizer is not None
        found = [] if has_own_step else group_parameters(self._optimizer, planned.types)
        for group in self._groups:
            group.read_count()
        same = len(found) == len(self._groups) and all(
            group.is_for(*each) and group.sync_settings()
            for group, each in zip(self._groups, found, strict=True)
        )
        if not same:
            self._groups = [ParameterGroup(self._optimizer, *each, self._update.form) for each in found]
        self._optimizer_state.groups = self._groups


def _flatten(arguments: tuple[Any, ...]) -> tuple[list[torch.Tensor], pytree.TreeSpec]:
    """Return the tensors of a call, and the structure of the model's and the loss's arguments."""
    inputs = arguments[:1]
    if arguments and type(arguments[0]) in (tuple, list):
        inputs = tuple(arguments[0])
    tensors, structure = flatten((inputs, arguments[1:]))
    if not inputs or not tensors:
        kinds = ", ".join(type(one).__name__ for one in arguments) or "nothing"
        raise UnsupportedError(
            f"a training step was called with {kinds}; pass the model's input (a tensor, or a tuple of its arguments), "
            "then what the loss takes after the model's result"
        )
    for one in tensors:
        if one.is_meta or not is_dense(one) or not one.numel():
            what = "a meta tensor" if one.is_meta else describe_tensor(one)
            raise UnsupportedError(
                f"a training step was called with {what} of shape {list(one.shape)}; pass dense tensors with at least "
                "one element"
            )
    return tensors, structure
