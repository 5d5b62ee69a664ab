"""`training_step`: forward, loss, backward and optimiser as one plan that updates the caller's own tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from escalade.device.torch_private import FAST_PATHS
from escalade.engine.capture.joint import Loss, capture_step
from escalade.engine.explain import Explanation, explain_plan
from escalade.engine.graph.forms import InputFormat, describe_tensor, is_dense
from escalade.engine.plan.plan import Plan
from escalade.engine.settings import TWIN, require_device
from escalade.engine.training.change_guard import Standing
from escalade.engine.training.followed import Followed, require_no_hooks
from escalade.engine.training.optimizers import States, Stepped, alike, require_known, step_together
from escalade.engine.training.planned import Planned, Reduce
from escalade.engine.training.program import StepProgram
from escalade.engine.training.techniques import required_known
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.calling.types import PLAIN

_AUTOCAST = {"fp32": None, "tf32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
_GROWTH, _BACKOFF, _INTERVAL = 2.0, 0.5, 2000
"""How `torch.amp.GradScaler` changes a loss scale."""
FIRST_SCALE = 65536.0
MOST_PLANS = 4
"""Sizes of batches that a step keeps ready; the one not used for longest goes first."""


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
) -> TrainingStep:
    """A step of training as one call: `step(x, target)` steps the model's own parameters and returns the loss.

    `example` is what the step will be called with: what the model takes (a tensor, or a tuple of them), then what
    `loss` takes behind the model's result. `dtype` is fp32, tf32, or fp16 or bf16, which are mixed: weights stay fp32,
    products are those of autocast. Gradients in fp16 are of the loss times a scale, which begins as `loss_scale` and
    changes as `torch.amp.GradScaler` changes it; a step whose gradients are not finite is left out. The model is
    captured in the modes that its modules have now. `device` is the model's own, or "twin" for kernels on the CPU.
    `without` names techniques that are left out, to see what they bring (docs/training-steps.md). Where several
    processes train together, `reduce` is called between backward pass and optimiser with one tensor that has all
    gradients, and makes of them those of all processes, in place.

    The optimiser is torch.optim's SGD, Adam or AdamW. Its settings are read at each call, and its state is what the
    step updates; a failing call changes nothing.
    """
    if dtype not in _AUTOCAST:
        raise UnsupportedError(f"dtype {dtype!r}: a training step takes {', '.join(_AUTOCAST)}")
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(f"a training step takes a torch.nn.Module, not {type(model).__name__}")
    if not callable(loss):
        raise UnsupportedError(
            f"loss is {type(loss).__name__}: a training step takes a function of the model's result and of what the "
            "step is called with behind the model's inputs, such as torch.nn.functional.cross_entropy"
        )
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise UnsupportedError(
            "the model has parameters without a size yet: run it once before the step is made"
        )
    if loss_scale is not None:
        loss_scale = _required_scale(loss_scale)
    if not model.training:
        raise UnsupportedError("the model is in evaluation mode: call model.train() first")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UnsupportedError(
            f"a training step takes a torch.optim optimiser, not {type(optimizer).__name__}"
        )
    require_known(optimizer)
    require_no_hooks(optimizer)
    if device is not None:
        require_device(device)
    if not isinstance(example, Sequence) or not example:
        raise UnsupportedError(
            "example is a tuple: what the model takes, then what the loss takes behind its result"
        )
    while type(model).__name__ == "OptimizedModule":  # of torch.compile, which takes seconds to load
        model = model._orig_mod  # type: ignore[assignment]
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise UnsupportedError(
            f"a training step takes the model itself, not {type(model).__name__}, which runs other code between steps"
        )
    left_out = required_known(without)
    return TrainingStep(
        model, loss, optimizer, tuple(example), dtype, loss_scale, device == TWIN, left_out, reduce
    )


def plan_training_step(
    model: nn.Module,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    example: Sequence[Any],
    dtype: str,
    card: Card,
    without: Collection[str] = (),
) -> Plan:
    """Plan a training step for a card that need not be here; nothing is compiled."""
    left_out = required_known(without)
    step = TrainingStep(model, loss, optimizer, tuple(example), dtype, None, False, left_out, plan_only=card)
    return step.plan


class TrainingStep:
    """A training step for batches like its example, and for others of the same kind: each size is planned once."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        example: tuple[Any, ...],
        dtype: str,
        loss_scale: float | None,
        on_twin: bool,
        without: frozenset[str] = frozenset(),
        reduce: Reduce | None = None,
        plan_only: Card | None = None,
    ) -> None:
        self._plan_only = plan_only
        self._model, self._loss, self._optimizer, self.dtype = model, loss, optimizer, dtype
        self._home = next((one.device for one in model.parameters()), torch.device("cpu"))
        self._modes = {module: module.training for module in model.modules()}
        self._on_twin, self._without, self._reduce = on_twin, without, reduce
        if on_twin and self._home.type != "cpu":
            raise UnsupportedError(f"device twin: it runs on the CPU, and the model is on {self._home}")
        self._scale: torch.Tensor | None = None
        if dtype == "fp16" or loss_scale is not None:
            first = FIRST_SCALE if loss_scale is None else loss_scale
            self._scale = torch.full((), first, dtype=torch.float32, device=self._home)
        self._growth = torch.zeros((), dtype=torch.int32, device=self._home)
        in_pytorch = self._home.type == "cpu" and not on_twin
        # No method: plans hold it, and who holds a plan is not to be held by it.
        self._step = partial(_step, scale=self._scale, growth=self._growth, in_pytorch=in_pytorch)
        self._followed = Followed.of(optimizer)
        self._lock = self._followed.lock
        self._done: torch.cuda.Event | None = None
        self._stream = 0
        self._plans: dict[tuple[Any, ...], Planned] = {}
        self._last: tuple[int, Callable[..., bool], Planned] | None = None
        """The number of tensors of the last call, a guard for them, and their plan."""
        self._groups: list[Stepped] = []
        self._states: States | None = None
        self._standing = Standing(self._watched(), optimizer)
        with self._lock, torch.inference_mode(False), torch.no_grad():
            self._planned(example)

    def __call__(self, *given: Any) -> torch.Tensor:
        """One step over a batch; the batch's loss before it."""
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self(*given)
        with self._lock, torch.no_grad():
            if self._home.type != "cuda":
                return self._run(given)
            if FAST_PATHS.current_device() == self._home.index:
                return self._in_turn(given)
            with torch.cuda.device(self._home):
                return self._in_turn(given)

    def _in_turn(self, given: tuple[Any, ...]) -> torch.Tensor:
        """Order calls on several streams, which update the same tensors."""
        if FAST_PATHS.is_capturing():
            raise UnsupportedError("a training step is a CUDA graph itself, and can be no part of another")
        stream = FAST_PATHS.current_stream(self._home.index)
        if self._done is not None and stream != self._stream:
            torch.cuda.current_stream().wait_event(self._done)
        loss = self._run(given)
        if self._done is None:
            self._done = torch.cuda.Event()
        self._done.record()
        self._stream = stream
        return loss

    def _run(self, given: tuple[Any, ...]) -> torch.Tensor:
        """One step. What is done before the launch is on the critical path of small networks."""
        planned, tensors = self._planned(given)
        same_states = self._states is not None and self._states.are_those_of(self._optimizer)
        current = self._followed.groups is self._groups
        if not current or not all([group.follows(same_states) for group in self._groups]):
            self._regroup(planned)
            same_states = False
        if planned.groups is not self._groups:
            planned.step_by(self._groups, self._step)
        loss = planned.run(tensors)
        for group in self._groups:
            group.hand_over()
        if not same_states:
            self._states = States(self._optimizer, self._groups)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # schedules ask whether steps were taken
        return loss

    @property
    def plan(self) -> Plan:
        """The plan that was used last."""
        return self.program.plan

    @property
    def program(self) -> StepProgram:
        """What runs the plan that was used last."""
        return next(reversed(self._plans.values())).program

    @property
    def loss_scale(self) -> float | None:
        """What gradients are of the loss times; None where they are of the loss itself."""
        return None if self._scale is None else float(self._scale)

    def state_dict(self) -> dict[str, float]:
        """What a run goes on from besides the model's state and the optimiser's: the loss scale, if there is one."""
        if self._scale is None:
            return {}
        return {"scale": float(self._scale), "good_steps": float(self._growth)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes over what `state_dict` has given."""
        if not isinstance(state, Mapping) or set(state) != set(self.state_dict()):
            given = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise UnsupportedError(
                f"a state of {given or 'nothing'}: this step has "
                f"{', '.join(self.state_dict()) or 'none, for it does not scale its loss'}"
            )
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._scale is not None:
                scale, steps = _required_scale(state["scale"]), int(state["good_steps"])
                self._scale.fill_(scale)
                self._growth.fill_(steps)

    def __reduce__(self) -> Any:
        raise UnsupportedError(
            "a training step is of its model's own tensors, and has no copies: keep model.state_dict(), "
            "optimizer.state_dict() and step.state_dict(), and make a step of what they are loaded into"
        )

    def explain(self) -> Explanation:
        """The plan that was used last, step by step."""
        return explain_plan(self.plan, device=TWIN if self._on_twin else self._home.type)

    def _planned(self, given: tuple[Any, ...]) -> tuple[Planned, Sequence[torch.Tensor]]:
        """Return the plan for inputs like these, over the model's tensors as they are stored now, and the inputs as one
        flat sequence."""
        if self._standing.is_as_it_was():
            if self._last is not None:
                count, holds, planned = self._last
                if len(given) == count and all([type(one) in PLAIN for one in given]) and holds(*given):
                    return planned, given
        else:
            require_known(self._optimizer)
            require_no_hooks(self._optimizer)
            self._plans.clear()
            self._last = None
            self._followed.settle()
            self._standing = Standing(self._watched(), self._optimizer)
        tensors, inputs = _flat(given)
        key = (inputs, *((tensor.shape, InputFormat.of(tensor)) for tensor in tensors))
        found = self._plans.pop(key, None) or self._made(tensors, inputs)
        while len(self._plans) >= MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        self._plans[key] = found
        is_plain = len(tensors) == len(given) and all(map(operator.is_, tensors, given))
        self._last = (len(given), FAST_PATHS.guard(tensors), found) if is_plain else None
        return found, tensors

    def _watched(self) -> list[nn.Module]:
        """The modules that plans are made of: the model's, and those of a loss that is a module."""
        loss = self._loss.modules() if isinstance(self._loss, nn.Module) else ()
        return [*self._model.modules(), *loss]

    def _made(self, tensors: list[torch.Tensor], inputs: int) -> Planned:
        near = [tensor.to(self._home) for tensor in tensors]
        taken = [one for group in self._optimizer.param_groups for one in group["params"]]
        joint = capture_step(
            self._model, self._loss, near[:inputs], near[inputs:],
            autocast=_AUTOCAST[self.dtype], scaled=self._scale is not None,
            modes=[self._modes.get(module, module.training) for module in self._model.modules()],
            stepped=taken,
        )  # fmt: skip
        products = "tf32" if self.dtype == "tf32" else "fp32"
        trained = [one for name, one in self._model.named_parameters() if name in joint.trained]
        if not any(one in set(taken) and one.numel() for one in trained):
            raise UnsupportedError(
                "the optimizer has none of the parameters that the loss depends on: a training step takes one that was "
                "made of this model's parameters"
            )
        self._standing.reads(joint.constants)
        return Planned(
            joint,
            self._model,
            set(taken),
            near,
            self._scale,
            products,
            self._on_twin,
            self._without,
            self._reduce,
            self._plan_only,
        )

    def _regroup(self, planned: Planned) -> None:
        """Takes over the optimiser's groups and state as they are now."""
        self._followed.settle()
        found = alike(self._optimizer, planned.types)
        for group in self._groups:
            group.read_count()
        same = len(found) == len(self._groups) and all(
            group.steps(*each) and group.follows() for group, each in zip(self._groups, found, strict=True)
        )
        if not same:
            scaled = self._scale is not None
            self._groups = [Stepped(self._optimizer, *each, scaled) for each in found]
        self._followed.groups = self._groups


def _step(
    groups: list[Stepped],
    gradients: Mapping[nn.Parameter, torch.Tensor],
    *,
    scale: torch.Tensor | None,
    growth: torch.Tensor,
    in_pytorch: bool,
) -> None:
    """What the optimiser does, and what becomes of the loss scale."""
    if scale is not None:
        for group in groups:
            group.scale.copy_(scale)
    step_together(groups, gradients, in_pytorch=in_pytorch, scaled=scale is not None)
    if scale is not None:
        skipped = groups[0].progress[2]
        torch._amp_update_scale_(scale, growth, skipped, _GROWTH, _BACKOFF, _INTERVAL)


def _required_scale(scale: Any) -> float:
    """A number that gradients can be of the loss times, and be divided by."""
    try:
        number = float(scale)
    except (TypeError, ValueError, RuntimeError):
        number = 0.0
    if not 0 < number <= torch.finfo(torch.float32).max:
        raise UnsupportedError(f"loss_scale {scale!r}: a training step takes a finite number above 0")
    return number


def _flat(given: tuple[Any, ...]) -> tuple[list[torch.Tensor], int]:
    """The tensors of a call, and how many of them are the model's inputs."""
    first = tuple(given[0]) if given and isinstance(given[0], tuple | list) else given[:1]
    everything = [*first, *given[1:]]
    if not first or not all(isinstance(one, torch.Tensor) for one in everything):
        kinds = ", ".join(type(one).__name__ for one in everything) or "nothing"
        raise UnsupportedError(
            f"a training step is called with tensors, not with {kinds}: what the model takes, a tensor or a tuple of "
            "them, then what the loss takes behind the model's result"
        )
    for one in everything:
        if one.is_meta or not is_dense(one) or not one.numel():
            what = "a tensor on meta, without contents" if one.is_meta else describe_tensor(one)
            raise UnsupportedError(
                f"a training step is called with {what} of {list(one.shape)}: it takes dense tensors of at least one "
                "element"
            )
    return everything, len(first)
