"""Capture of a training step (model, loss, and gradients of the parameters) as one graph, by AOTAutograd.

The graph is functional: parameters and buffers are inputs, and new values of buffers, such as the running statistics of
BatchNorm, are outputs.
"""

from __future__ import annotations

import pathlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from escalade.engine.capture.call_log import CallLog, Constants, memory_of
from escalade.engine.capture.data_attribute import FollowData
from escalade.engine.capture.example_inputs import require_module
from escalade.engine.capture.functional import FunctionalReader, operators_with_kernels
from escalade.engine.capture.global_state import preserve_global_state
from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.capture.reader import CaptureError
from escalade.engine.capture.step_fake_tensor import step_fake_tensor_mode
from escalade.engine.graph.aten import memory_order, takes_any_layout, to_memory_order
from escalade.engine.graph.graph import Graph
from escalade.engine.graph.trees import flatten
from escalade.engine.nodes.recurrent import AS_ONE_OPERATOR

Loss = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
SCALE = "scale"
"""Name of the optional graph input that scales the loss before the backward pass."""


class ModelWithLoss(nn.Module):
    """A model, and a loss with parameters or buffers of its own, which are part of the step like the model's."""

    def __init__(self, model: nn.Module, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss


class _Originals(nn.Module):
    """The model, the loss, and parameters outside of the model that the loss may read, to be copied together."""

    def __init__(self, model: nn.Module, loss: Loss, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.others = [*parameters]


@dataclass(frozen=True)
class Joint:
    """A training step for inputs of one size.

    Inputs of the graph, in order: parameters, buffers, inputs of the model and the loss, and the loss scale if there is
    one. Outputs: the loss, gradients, new values of `changed`, and what else the loss returned.
    """

    graph: Graph
    parameters: tuple[str, ...]
    """Names of all parameters in the model, each once."""
    buffers: tuple[str, ...]
    trained: tuple[str, ...]
    """Parameters with a gradient among the outputs."""
    changed: tuple[str, ...]
    """Buffers, and parameters that the model writes to itself, with a new value among the outputs."""
    traced: torch.fx.GraphModule
    """AOTAutograd's graph: from the graph's inputs to results that include its outputs."""
    results: tuple[int, ...]
    """Index of each graph output among these results."""
    constants: tuple[torch.Tensor, ...] = ()
    """Constants of the loss, such as class weights; the graph has copies of them."""

    def with_gradients_of(self, trained: Sequence[str]) -> Joint:
        """Return the step with the gradients of only these parameters."""
        indices = [0, *(1 + self.trained.index(name) for name in trained)]
        indices += range(1 + len(self.trained), len(self.graph.outputs))
        graph = self.graph.copy()
        graph.outputs = tuple(self.graph.outputs[index] for index in indices)
        graph.output_types = tuple(self.graph.output_types[index] for index in indices)
        graph.remove_dead_code()
        results = tuple(self.results[index] for index in indices)
        return replace(self, graph=graph, trained=tuple(trained), results=results)

    def module(self) -> torch.fx.GraphModule:
        """Return PyTorch's operators of the step, from the graph's inputs to its outputs."""
        return _with_results(self.traced, self.results)


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
    """Capture `loss(model(*inputs), *targets)` and its gradients.

    Inputs and targets may be containers of tensors and plain values, which are constants of the step.

    Only copies of the model run. Modules are in the caller's training modes, or in `modes`. With `autocast` the step
    runs under autocast to that dtype. With `scaled` the graph has an additional input that multiplies the loss.
    `stepped` are the optimizer's parameters: the loss may depend on them only through the model.
    """
    require_module(model)

    from escalade.engine.capture.export_context import (
        export_context,
        ignore_checkpoints,
        trace_factors,
    )

    def run() -> Joint:
        originals = _Originals(model, loss, stepped)
        with (
            preserve_global_state(originals, autocast=False) as global_state,
            export_context(),
            ignore_checkpoints(),
        ):
            copies = OriginalModel(originals, None, global_state.named)  # tracing replaces the tensors

            def copy() -> _Originals:
                global_state.restore()
                copied = copies.copy(evaluation=False)
                assert isinstance(copied, _Originals)
                for module, mode in zip(copied.model.modules(), modes or (), strict=False):
                    module.training = mode
                trace_factors(copied)
                return copied

            tensors, structure = flatten((tuple(inputs), tuple(targets)))
            step = _Step(copy, structure, autocast, scaled, (*stepped, *model.parameters()))
            try:
                return _captured(step, tensors)
            finally:
                step.release()

    return torch.compiler.disable(run)()


def _captured(step: _Step, tensors: Sequence[torch.Tensor]) -> Joint:
    from torch._functorch.aot_autograd import aot_export_module

    from escalade.engine.capture.export_context import joint_graph_traced_once

    mode = step_fake_tensor_mode(allow_non_fake_inputs=True)

    if step.scaled:
        tensors = [*tensors, torch.ones((), device=tensors[0].device)]
    arguments = [mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in tensors]
    step.make_fake(mode)
    try:
        with (
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),
            operators_with_kernels(AS_ONE_OPERATOR),
            FollowData(),
        ):
            with mode, enable_python_dispatcher():  # as AOTAutograd does
                step.prepare(arguments)
            with joint_graph_traced_once(), _use_lazy_graph_module(True):
                module, signature = aot_export_module(step, arguments, trace_joint=True, output_loss_index=0)
    except CaptureError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureError(
            f"{step.title} or its loss branches on the values of its tensors{_location(error)}, but a plan is fixed "
            f"before the values are known ({error.func}): remove the branch, or train with "
            "torch.compile(model, backend='escalade')"
        ) from error
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CaptureError(
            f"{step.title} cannot be captured as a training step: {type(error).__name__}: {first}"
        ) from error
    assert isinstance(module, torch.fx.GraphModule)
    return _JointReader(module, signature, step).joint()


class _BufferObserver(nn.Module):
    """Runs a model and its loss, and records the buffers after each run."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        # In a tuple: submodules would have their parameters registered again.
        self._functions: tuple[nn.Module, Loss] = (model, loss)
        if isinstance(model, ModelWithLoss):
            self._functions = model.model, model.loss
        self.after: dict[str, torch.Tensor] = {}

    def forward(self, inputs: Sequence[Any], targets: Sequence[Any]) -> Any:
        model, loss = self._functions
        result = loss(model(*inputs), *targets)
        self.after = dict(self.model.named_buffers())
        return result


class _Step(nn.Module):
    """A model with its loss as one module that has each of the model's parameters once."""

    def __init__(
        self,
        copy: Callable[[], _Originals],
        structure: pytree.TreeSpec,
        autocast: torch.dtype | None,
        scaled: bool,
        caller_parameters: Sequence[nn.Parameter],
    ) -> None:
        super().__init__()
        copied = copy()
        model = copied.model
        # In a tuple, not a submodule: its parameters would be registered twice.
        self._step = (_BufferObserver(model, copied.loss), structure, autocast)
        self._copy: Callable[[], _Originals] | None = copy
        self._fills_caches = False
        self.title = type(model.model if isinstance(model, ModelWithLoss) else model).__name__
        self.scaled = scaled
        self.parts = 0
        """Tensors that the loss returns besides its own."""
        self.parameter_names = {f"p{n}": name for n, (name, _) in enumerate(model.named_parameters())}
        self.buffer_names = {f"b{n}": name for n, (name, _) in enumerate(model.named_buffers())}
        read = (*caller_parameters, *copied.others, *model.parameters())
        self._read_parameters = [parameter for parameter in read if parameter.requires_grad]
        """The caller's parameters, and the copies of them that a loss may hold."""
        self._assigned: frozenset[str] = frozenset()
        """Buffers that the model assigns."""
        self.written: tuple[str, ...] = ()
        """Parameters that the model writes to."""
        self._shared_gradients: frozenset[str] = frozenset()

    def release(self) -> None:
        """Drop the caller's model: PyTorch's tracers keep a step alive until the next garbage collection."""
        del self._step, self._copy, self._read_parameters

    def make_fake(self, mode: FakeTensorMode) -> None:
        """Register fake tensors in place of the model's parameters and buffers."""
        model = self._step[0].model
        named = dict(model.named_parameters()) | dict(model.named_buffers())

        def like(name: str) -> torch.Tensor:
            return mode.from_tensor(named[name].detach(), static_shapes=True)

        for own, name in self.parameter_names.items():
            self.register_parameter(own, nn.Parameter(like(name), named[name].requires_grad))
        for own, name in self.buffer_names.items():
            self.register_buffer(own, like(name))

    def prepare(self, arguments: Sequence[torch.Tensor]) -> None:
        """Run the step on fake tensors to find its side effects and the parameters that the loss depends on."""
        wanted = {own: parameter for own, parameter in self.named_parameters() if parameter.requires_grad}
        if not wanted:
            raise CaptureError(f"{self.title} has no parameters to train: none of them requires gradients")
        memory = {own: memory_of(tensor) for own, tensor in (*self.named_parameters(), *self.named_buffers())}
        constants = Constants()
        with CallLog(constants) as first:
            loss = self(*arguments)[0]
        made = constants.calls
        self._require_tensors_kept(memory)
        self.written = tuple(own for own in self.parameter_names if memory[own] in first.written)
        if self._assigned or self.written:
            with CallLog(constants) as first:
                loss = self(*arguments)[0]
        if loss.numel() != 1 or not loss.is_floating_point():
            raise CaptureError(
                f"the loss is {loss.dtype} of shape {list(loss.shape)}; a training step takes a floating-point loss of "
                "one number: reduce it, as with mean()"
            )
        if not loss.requires_grad:
            raise CaptureError(f"the loss depends on no parameter of {self.title}")
        with CallLog(Constants()):
            gradients = torch.autograd.grad(
                loss, [*wanted.values(), *self._read_parameters], allow_unused=True
            )
        self._require_through_model(gradients[len(wanted) :])
        seen: set[int] = set()
        for (own, parameter), gradient in zip(wanted.items(), gradients, strict=False):
            parameter.requires_grad_(gradient is not None)
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise CaptureError(
                    f"the gradient of {self.parameter_names[own]} is {gradient.layout}: a training step takes dense "
                    "gradients; use sparse=False"
                )
            if id(gradient) in seen:
                self._shared_gradients |= {own}
            seen.add(id(gradient))
        if any(gradient is None for gradient in gradients[: len(wanted)]):
            with CallLog(
                constants
            ) as first:  # autograd calls other operators for parameters that need no gradient
                self(*arguments)
        before = constants.calls
        with CallLog(constants) as second:
            self(*arguments)
        same = first.calls == second.calls
        if same and constants.calls - before != made:
            # It keeps constants of its first run, such as masks or positions: each run is then the first of a copy.
            self._fills_caches = True
            with CallLog(Constants()) as first:
                self(*arguments)
            same = first.calls == second.calls
        if not same:
            raise CaptureError(
                f"{self.title} or its loss computes something else each time it runs, for example by a counter or "
                "Python's random numbers; a training step runs the same operations at every call: pass what changes as "
                "a tensor, or draw it with PyTorch, as torch.rand does"
            )

    def _require_tensors_kept(self, memory: Mapping[str, int]) -> None:
        """Record buffers that were assigned; reject tensors whose storage was replaced."""
        named = {**self.parameter_names, **self.buffer_names}
        for own, before in memory.items():
            if memory_of(getattr(self, own)) != before:
                raise CaptureError(
                    f"{self.title} sets the data of its {named[own]} when it runs; a training step supports buffers "
                    "that are written in place, as by copy_, or assigned, and leaves parameters to the optimizer"
                )
        after = self._step[0].after
        for own, name in self.buffer_names.items():
            before, now = getattr(self, own), after.get(name)
            if now is before:
                continue
            if now is None or now.shape != before.shape or now.dtype != before.dtype:
                new = "none" if now is None else f"{now.dtype} of {list(now.shape)}"
                raise CaptureError(
                    f"{self.title} changes its buffer {name} from {before.dtype} of {list(before.shape)} to {new} when "
                    "it runs; in a training step shapes and dtypes of buffers are fixed"
                )
            self._assigned |= {own}

    def _require_through_model(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._read_parameters, gradients, strict=True):
            if gradient is not None:
                raise CaptureError(
                    f"the loss reads a parameter of shape {list(parameter.shape)} directly, not through what "
                    f"{self.title} returns; a training step computes gradients through the model only: make the "
                    "parameter part of the model, and return from the model what the loss needs of it"
                )

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self._fills_caches:
            assert self._copy is not None
            with _disable_current_modes():
                copied = self._copy()
            self._step = (_BufferObserver(copied.model, copied.loss), *self._step[1:])
        body, structure, autocast = self._step
        own = {**self.parameter_names, **self.buffer_names}
        # Autograd may save the old value of a buffer that is assigned, so the run uses a clone of it. So it does of a
        # parameter that is written to, because AOTAutograd supports no such writes.
        state = {
            f"model.{name}": getattr(self, tensor).clone()
            if tensor in self._assigned or tensor in self.written
            else getattr(self, tensor)
            for tensor, name in own.items()
        }
        for tensor in self._shared_gradients:  # AOTAutograd identifies a gradient by its node
            getattr(self, tensor).register_hook(torch.clone)
        given = pytree.tree_unflatten(arguments[: structure.num_leaves], structure)
        with torch.autocast(arguments[0].device.type, autocast, enabled=autocast is not None):
            returned = torch.func.functional_call(body, state, given)
        results: tuple[Any, ...] = returned if isinstance(returned, tuple) and returned else (returned,)
        result, *parts = results
        for one in results:
            if not isinstance(one, torch.Tensor):
                raise CaptureError(
                    f"the loss returns {type(one).__name__}; it must return a tensor, or a tuple of tensors of which "
                    "the first is the loss"
                )
        self.parts = len(parts)
        for tensor in self._assigned:
            getattr(self, tensor).copy_(body.after[self.buffer_names[tensor]].detach())
        # Clones: AOTAutograd identifies a result by its node, and a part may be an input or another part.
        written = (state[f"model.{self.parameter_names[tensor]}"] for tensor in self.written)
        rest = tuple(one.detach().clone() for one in (*written, *parts))
        return (result * arguments[-1], result.detach(), *rest) if self.scaled else (result, *rest)


def _location(error: Exception) -> str:
    """Return the file and line of the model's code, or of a PyTorch layer, that raised."""
    torch_folder, own = pathlib.Path(torch.__file__).parent, pathlib.Path(__file__).parents[2]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        folders = pathlib.Path(frame.filename).parents
        if torch_folder / "nn" in folders or not {torch_folder, own} & set(folders):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""


def _with_results(module: torch.fx.GraphModule, indices: Sequence[int]) -> torch.fx.GraphModule:
    """Return the module with some of its results, in this order, and without its fake tensors."""
    made = torch.fx.GraphModule(module, module.graph)  # copies the graph
    output = next(iter(made.graph.find_nodes(op="output")))
    output.args = (tuple(output.args[0][index] for index in indices),)
    made.graph.eliminate_dead_code()
    for node in made.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and not takes_any_layout(node.target):
            _pass_dense(made.graph, node)
    for node in made.graph.nodes:
        node.meta = {}
    made.recompile()
    return made


def _pass_dense(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Give an operator that may ignore strides its operands dense, in the order of dimensions they had in capture."""
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim():
            with graph.inserting_before(node):
                dense = graph.call_function(to_memory_order, (operand, memory_order(value)))
            node.replace_input_with(operand, dense)


class _JointReader(FunctionalReader):
    """Reads the joint graph that AOTAutograd has traced."""

    def __init__(self, module: torch.fx.GraphModule, signature: Any, step: _Step) -> None:
        super().__init__(module, step.title)
        self._signature = signature
        self._step = step

    def joint(self) -> Joint:
        step = self._step
        named = [*step.parameter_names.values(), *step.buffer_names.values()]
        arguments = [node.name for node in self._module.graph.nodes if node.op == "placeholder"]
        names = [name.replace(".", "_") for name in named]
        names += [f"input_{number}" for number in range(len(arguments) - len(named))]
        if step.scaled:
            names[-1] = SCALE
        sources = [name.rpartition(".")[0] for name in named]
        graph = self.read(names, sources + [""] * (len(names) - len(named)))
        trained = [name for own, name in step.parameter_names.items() if getattr(step, own).requires_grad]
        changed = self._changed()
        results = self.results
        first_gradient = len(results) - len(trained)
        losses = range(len(changed), first_gradient)
        written = [step.parameter_names[own] for own in step.written]
        if len(losses) != 1 + step.scaled + len(written) + step.parts:
            raise CaptureError(f"{step.title} writes to one value through two attributes; use one of them")
        gradients, new = range(first_gradient, len(results)), range(len(changed))
        chosen = (losses[step.scaled], *gradients, *new, *losses[1 + step.scaled :])
        changed += written
        self.set_outputs(graph, [results[index] for index in chosen])
        parameters, buffers = (tuple(own.values()) for own in (step.parameter_names, step.buffer_names))
        constants = tuple(self.constants)
        return Joint(
            graph, parameters, buffers, tuple(trained), tuple(changed), self._module, chosen, constants
        )

    def _changed(self) -> list[str]:
        """Return the buffers that the step writes to, in the order of their new values among the results."""
        signature, step = self._signature, self._step
        if signature.parameters_to_mutate or signature.user_inputs_to_mutate:
            raise CaptureError(
                f"{step.title} writes to its inputs when it runs; in a training step inputs are read-only"
            )
        return [step.buffer_names[own] for own in signature.buffers_to_mutate.values()]
