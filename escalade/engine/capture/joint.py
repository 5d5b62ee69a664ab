"""Makes one graph of a training step: the model, its loss, and the gradients of its parameters, by AOTAutograd.

The graph is functional. Parameters and buffers are among its inputs; what the step changes besides parameters, such as
the running statistics of BatchNorm, is among its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from escalade.engine.capture.functional import FunctionalReader, upsampling_whole
from escalade.engine.capture.given import require_module
from escalade.engine.capture.reader import CaptureError
from escalade.engine.capture.separate import Original
from escalade.engine.capture.surroundings import undisturbed
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
) -> Joint:
    """What a step of training computes: `loss(model(*inputs), *targets)` and its gradients.

    Modules are in the modes that the caller has them in, or in these `modes`, whether each trains. With `autocast` the
    step runs in autocast to that type, and with `scaled` gradients are those of the loss times a further input. The
    model is never run, copies of it are.
    """
    require_module(model)

    from escalade.engine.capture.tracers import exporting

    def run() -> Joint:
        with undisturbed(model, autocast=False) as outside, exporting():
            ours = [*model.parameters(), *model.buffers()]  # which tracing replaces, and nothing writes to
            copied = Original(model, ours, outside).copied(evaluates=False)
            for module, mode in zip(copied.modules(), modes or (), strict=False):
                module.training = mode
            return _captured(_Step(copied, loss, len(inputs), autocast, scaled), inputs, targets)

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
        with torch.enable_grad(), upsampling_whole():
            with mode:
                step.freeze_unused(given)
            module, signature = aot_export_module(step, given, trace_joint=True, output_loss_index=0)
    except CaptureError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"{step.title} cannot be captured as a training step: {type(error).__name__}: {first}"
        ) from error
    assert isinstance(module, torch.fx.GraphModule)
    return _JointReader(module, signature, step).joint()


class _Step(nn.Module):
    """A model with its loss, as a module whose parameters are the model's, each once."""

    def __init__(
        self, model: nn.Module, loss: Loss, inputs: int, autocast: torch.dtype | None, scaled: bool
    ) -> None:
        super().__init__()
        self._step = (model, loss, inputs, autocast)  # no submodule: its parameters would be there twice
        self.title = type(model).__name__
        self.scaled = scaled
        self.parameter_names = {f"p{n}": name for n, (name, _) in enumerate(model.named_parameters())}
        self.buffer_names = {f"b{n}": name for n, (name, _) in enumerate(model.named_buffers())}

    def hollow(self, mode: FakeTensorMode) -> None:
        """Takes tensors like the model's, without contents."""
        named = dict(self._step[0].named_parameters()) | dict(self._step[0].named_buffers())

        def like(name: str) -> torch.Tensor:
            return mode.from_tensor(named[name].detach(), static_shapes=True)

        for own, name in self.parameter_names.items():
            self.register_parameter(own, nn.Parameter(like(name), named[name].requires_grad))
        for own, name in self.buffer_names.items():
            self.register_buffer(own, like(name))

    def freeze_unused(self, given: Sequence[torch.Tensor]) -> None:
        """Parameters that the loss does not depend on have no gradients."""
        wanted = [one for one in self.parameters() if one.requires_grad]
        if not wanted:
            raise CaptureError(f"{self.title} has no parameters to train: none of them requires gradients")
        loss = self(*given)[0]
        if loss.numel() != 1 or not loss.is_floating_point():
            raise CaptureError(
                f"the loss is {loss.dtype} of {list(loss.shape)}; a training step takes a loss of one number"
            )
        if not loss.requires_grad:
            raise CaptureError(f"the loss depends on no parameter of {self.title}")
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        for parameter, gradient in zip(wanted, gradients, strict=True):
            parameter.requires_grad_(gradient is not None)

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        model, loss, inputs, autocast = self._step
        own = {**self.parameter_names, **self.buffer_names}
        state = {name: getattr(self, tensor) for tensor, name in own.items()}
        targets = given[inputs:-1] if self.scaled else given[inputs:]
        with torch.autocast(given[0].device.type, autocast, enabled=autocast is not None):
            result = loss(torch.func.functional_call(model, state, given[:inputs]), *targets)
        if not isinstance(result, torch.Tensor):
            raise CaptureError(f"the loss is {type(result).__name__}; a training step takes a tensor")
        return (result * given[-1], result.detach()) if self.scaled else (result,)


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
        return Joint(graph, parameters, buffers, tuple(trained), tuple(changed))

    def _changed(self) -> list[str]:
        """The buffers that the step writes to, in the order of the results that hold their new values."""
        signature, step = self._signature, self._step
        if signature.parameters_to_mutate or signature.user_inputs_to_mutate:
            raise CaptureError(
                f"{step.title} writes to its parameters or its inputs when it runs; a training step leaves inputs as "
                "they are, and parameters to the optimiser"
            )
        return [step.buffer_names[own] for own in signature.buffers_to_mutate.values()]
