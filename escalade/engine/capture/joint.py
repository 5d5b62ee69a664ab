"""Makes one graph of a training step: the model, its loss, and the gradients of its parameters, by AOTAutograd.

The graph is functional. Parameters and buffers are among its inputs; what the step changes besides parameters, such as
the running statistics of BatchNorm, is among its results.
"""

from __future__ import annotations

import pathlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from escalade.engine.capture.cumulative_average import trace_factors
from escalade.engine.capture.example_inputs import require_module
from escalade.engine.capture.functional import FunctionalReader, operators_whole
from escalade.engine.capture.global_state import undisturbed
from escalade.engine.capture.model_copy import Original
from escalade.engine.capture.reader import CaptureError
from escalade.engine.graph.graph import Graph

Loss = Callable[..., torch.Tensor]
SCALE = "scale"
"""The graph's input that the loss is multiplied by before gradients are taken, where there is one."""


@dataclass(frozen=True)
class Joint:
    """A training step for inputs of one size.

    The graph's inputs are all parameters, all buffers, what the model and the loss are given, and the loss scale if
    there is one; its outputs are the loss, the gradients, and the new values of buffers.
    """

    graph: Graph
    parameters: tuple[str, ...]
    """The names, in the model, of the first inputs: every parameter once."""
    buffers: tuple[str, ...]
    """The names of the inputs behind them."""
    trained: tuple[str, ...]
    """The parameters that the outputs behind the loss are the gradients of."""
    changed: tuple[str, ...]
    """The buffers that the last outputs are the new values of."""
    held: tuple[torch.Tensor, ...] = ()
    """Tensors that the loss holds, such as weights of classes: the graph has what was in them."""

    def stepping(self, trained: Sequence[str]) -> Joint:
        """A step that has the gradients of these parameters alone."""
        places = [0, *(1 + self.trained.index(name) for name in trained)]
        places += range(1 + len(self.trained), len(self.graph.outputs))
        graph = self.graph.copy()
        graph.outputs = tuple(self.graph.outputs[place] for place in places)
        graph.output_types = tuple(self.graph.output_types[place] for place in places)
        graph.remove_dead_code()
        return replace(self, graph=graph, trained=tuple(trained))


def capture_step(
    model: nn.Module,
    loss: Loss,
    inputs: Sequence[Any],
    targets: Sequence[Any],
    *,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
    modes: Sequence[bool] | None = None,
    stepped: Sequence[nn.Parameter] = (),
) -> Joint:
    """What a step of training computes: `loss(model(*inputs), *targets)` and its gradients.

    Modules are in the modes that the caller has them in, or in these `modes`, whether each trains. With `autocast` the
    step runs in autocast to that type, and with `scaled` gradients are those of the loss times a further input. The
    model is never run, copies of it are. `stepped` are the parameters that will be stepped: the loss may depend on them
    through the model alone.
    """
    require_module(model)

    from escalade.engine.capture.tracers import exporting

    def run() -> Joint:
        with undisturbed(model, autocast=False) as outside, exporting():
            ours = [*model.parameters(), *model.buffers()]  # which tracing replaces, and nothing writes to
            copied = Original(model, ours, outside.named).copied(evaluates=False)
            for module, mode in zip(copied.modules(), modes or (), strict=False):
                module.training = mode
            trace_factors(copied)
            step = _Step(copied, loss, len(inputs), autocast, scaled, (*stepped, *model.parameters()))
            try:
                return _captured(step, inputs, targets)
            finally:
                step.let_go()

    return torch.compiler.disable(run)()


def _captured(step: _Step, inputs: Sequence[Any], targets: Sequence[Any]) -> Joint:
    from torch._functorch.aot_autograd import aot_export_module

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"a training step is given {type(value).__name__}; it takes tensors, other arguments belong into the "
                "model or the loss"
            )
        return mode.from_tensor(value.detach(), static_shapes=True)

    given = [fake(value) for value in (*inputs, *targets)]
    if step.scaled:
        given.append(fake(torch.ones((), device=given[0].device)))
    step.hollow(mode)
    try:
        with torch.enable_grad(), torch.autograd.set_detect_anomaly(False), operators_whole():
            with mode:
                step.prepare(given)
            module, signature = aot_export_module(step, given, trace_joint=True, output_loss_index=0)
    except CaptureError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"{step.title} or its loss decides by the values of its tensors what to compute{_place(error)}, and a plan "
            f"is fixed before there are any ({error.func}): take that out of both, or train behind "
            "torch.compile(model, backend='escalade')"
        ) from error
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"{step.title} cannot be captured as a training step: {type(error).__name__}: {first}"
        ) from error
    assert isinstance(module, torch.fx.GraphModule)
    return _JointReader(module, signature, step).joint()


class _Body(nn.Module):
    """A model, and the buffers that it has after it was run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.after: dict[str, torch.Tensor] = {}

    def forward(self, *given: torch.Tensor) -> Any:
        result = self.model(*given)
        self.after = dict(self.model.named_buffers())
        return result


class _Step(nn.Module):
    """A model with its loss, as a module whose parameters are the model's, each once."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        inputs: int,
        autocast: torch.dtype | None,
        scaled: bool,
        outside: Sequence[nn.Parameter],
    ) -> None:
        super().__init__()
        self._step = (
            _Body(model),
            loss,
            inputs,
            autocast,
        )  # no submodule: its parameters would be there twice
        self.title = type(model).__name__
        self.scaled = scaled
        self.parameter_names = {f"p{n}": name for n, (name, _) in enumerate(model.named_parameters())}
        self.buffer_names = {f"b{n}": name for n, (name, _) in enumerate(model.named_buffers())}
        self._outside = [one for one in outside if one.requires_grad]
        self._assigned: frozenset[str] = frozenset()
        self._alike: frozenset[str] = frozenset()

    def let_go(self) -> None:
        """Forgets the caller's model: PyTorch's tracers hold a step until Python searches for garbage."""
        del self._step, self._outside

    def hollow(self, mode: FakeTensorMode) -> None:
        """Takes tensors like the model's, without contents."""
        model = self._step[0].model
        named = dict(model.named_parameters()) | dict(model.named_buffers())

        def like(name: str) -> torch.Tensor:
            return mode.from_tensor(named[name].detach(), static_shapes=True)

        for own, name in self.parameter_names.items():
            self.register_parameter(own, nn.Parameter(like(name), named[name].requires_grad))
        for own, name in self.buffer_names.items():
            self.register_buffer(own, like(name))

    def prepare(self, given: Sequence[torch.Tensor]) -> None:
        """Learns from two runs what the step does beside computing a loss. Parameters that the loss does not depend on
        have no gradients."""
        wanted = {own: one for own, one in self.named_parameters() if one.requires_grad}
        if not wanted:
            raise CaptureError(f"{self.title} has no parameters to train: none of them requires gradients")
        memory = {own: _memory(one) for own, one in (*self.named_parameters(), *self.named_buffers())}
        with _Calls() as first:
            loss = self(*given)[0]
        self._require_tensors_kept(memory)
        if self._assigned:
            with _Calls() as first:
                loss = self(*given)[0]
        if loss.numel() != 1 or not loss.is_floating_point():
            raise CaptureError(
                f"the loss is {loss.dtype} of {list(loss.shape)}; a training step takes a loss of one number"
            )
        if not loss.requires_grad:
            raise CaptureError(f"the loss depends on no parameter of {self.title}")
        gradients = torch.autograd.grad(loss, [*wanted.values(), *self._outside], allow_unused=True)
        self._require_through_model(gradients[len(wanted) :])
        seen: set[int] = set()
        for (own, parameter), gradient in zip(wanted.items(), gradients, strict=False):
            parameter.requires_grad_(gradient is not None)
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise CaptureError(
                    f"the gradient of {self.parameter_names[own]} is {gradient.layout}: a training step takes dense "
                    "ones, as of layers with sparse=False"
                )
            if id(gradient) in seen:
                self._alike |= {own}
            seen.add(id(gradient))
        with _Calls() as second:
            self(*given)
        if first.made != second.made:
            raise CaptureError(
                f"{self.title} or its loss computes something else each time it runs, as by a count that it keeps or "
                "by Python's random numbers; a training step does the same at every call: give it what changes as a "
                "tensor, or let PyTorch draw it, as torch.rand does"
            )

    def _require_tensors_kept(self, memory: Mapping[str, int]) -> None:
        """Takes note of buffers that were assigned; a tensor whose memory was changed for another's is refused."""
        named = {**self.parameter_names, **self.buffer_names}
        for own, before in memory.items():
            if _memory(getattr(self, own)) != before:
                raise CaptureError(
                    f"{self.title} sets the data of its {named[own]} when it runs; a training step takes buffers that "
                    "are written in place, as copy_ does, or assigned, and leaves parameters to the optimiser"
                )
        after = self._step[0].after
        for own, name in self.buffer_names.items():
            before, now = getattr(self, own), after.get(name)
            if now is before:
                continue
            if now is None or now.shape != before.shape or now.dtype != before.dtype:
                new = "none" if now is None else f"{now.dtype} of {list(now.shape)}"
                raise CaptureError(
                    f"{self.title} makes its buffer {name}, {before.dtype} of {list(before.shape)}, {new} when it "
                    "runs; a training step takes buffers that stay as large and of one type"
                )
            self._assigned |= {own}

    def _require_through_model(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._outside, gradients, strict=True):
            if gradient is not None:
                raise CaptureError(
                    f"the loss reads a parameter of {list(parameter.shape)} by itself, not in what {self.title} "
                    "returns; a training step has gradients through the model alone: hold that parameter in the model, "
                    "and have the model return what the loss is to know of it"
                )

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        body, loss, inputs, autocast = self._step
        own = {**self.parameter_names, **self.buffer_names}
        # What is assigned anew may be kept for the gradients as it was, and is written to in the end.
        state = {
            f"model.{name}": getattr(self, tensor).clone()
            if tensor in self._assigned
            else getattr(self, tensor)
            for tensor, name in own.items()
        }
        for tensor in self._alike:  # AOTAutograd tells gradients apart by the nodes that make them
            getattr(self, tensor).register_hook(torch.clone)
        targets = given[inputs:-1] if self.scaled else given[inputs:]
        with torch.autocast(given[0].device.type, autocast, enabled=autocast is not None):
            result = loss(torch.func.functional_call(body, state, given[:inputs]), *targets)
        if not isinstance(result, torch.Tensor):
            raise CaptureError(f"the loss is {type(result).__name__}; a training step takes a tensor")
        for tensor in self._assigned:
            getattr(self, tensor).copy_(body.after[self.buffer_names[tensor]].detach())
        return (result * given[-1], result.detach()) if self.scaled else (result,)


class _Calls(TorchDispatchMode):
    """Takes down what is called, and with which numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace != "prim":  # of which tensors are asked where they are, and keep the answer
            self.made.append((function, *map(_number, pytree.tree_leaves((args, kwargs)))))
        return function(*args, **(kwargs or {}))


_MOST_NUMBERS = 64


def _number(value: Any) -> Any:
    """What tells an argument from another: a number itself, of tensors how large they are and, of those with contents,
    the first elements."""
    if not isinstance(value, torch.Tensor):
        return repr(value) if isinstance(value, float) else value
    if isinstance(value, FakeTensor):
        return value.shape, value.dtype
    with _disable_current_modes():
        return value.shape, value.dtype, repr(value.detach().flatten()[:_MOST_NUMBERS].tolist())


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(error: Exception) -> str:
    """The line of the model's code, or of a layer of PyTorch's, that was running."""
    torchs, own = pathlib.Path(torch.__file__).parent, pathlib.Path(__file__).parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        folders = pathlib.Path(frame.filename).parents
        if torchs / "nn" in folders or not {torchs, own} & set(folders):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


class _JointReader(FunctionalReader):
    """The step that AOTAutograd has traced."""

    def __init__(self, module: torch.fx.GraphModule, signature: Any, step: _Step) -> None:
        super().__init__(module, step.title)
        self._signature = signature
        self._step = step

    def joint(self) -> Joint:
        step = self._step
        named = [*step.parameter_names.values(), *step.buffer_names.values()]
        given = [node.name for node in self._module.graph.nodes if node.op == "placeholder"]
        names = [name.replace(".", "_") for name in named]
        names += [f"input_{number}" for number in range(len(given) - len(named))]
        if step.scaled:
            names[-1] = SCALE
        sources = [name.rpartition(".")[0] for name in named]
        graph = self.read(names, sources + [""] * (len(names) - len(named)))
        trained = [name for own, name in step.parameter_names.items() if getattr(step, own).requires_grad]
        changed = self._changed()
        results = self.results
        new, gradients = results[: len(changed)], results[len(results) - len(trained) :]
        losses = results[len(changed) : len(results) - len(trained)]
        if len(losses) != 1 + step.scaled:
            raise CaptureError(f"{step.title} changes one value in two places of its own when it runs")
        self.returning(graph, [losses[-1], *gradients, *new])
        parameters, buffers = (tuple(own.values()) for own in (step.parameter_names, step.buffer_names))
        return Joint(graph, parameters, buffers, tuple(trained), tuple(changed), tuple(self.held))

    def _changed(self) -> list[str]:
        """The buffers that the step writes to, in the order of the results that hold their new values."""
        signature, step = self._signature, self._step
        if signature.parameters_to_mutate or signature.user_inputs_to_mutate:
            raise CaptureError(
                f"{step.title} writes to its parameters or its inputs when it runs; a training step leaves inputs as "
                "they are, and parameters to the optimiser"
            )
        return [step.buffer_names[own] for own in signature.buffers_to_mutate.values()]
