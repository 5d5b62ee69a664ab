"""A captured training step planned for one size of batch, over the model's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import torch
from torch import nn

from escalade.engine.capture.joint import Joint
from escalade.engine.graph.forms import InputFormat
from escalade.engine.passes import optimise_step
from escalade.engine.plan.caller import ALIGNMENT
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.plan import make_plan
from escalade.engine.training.optimisers import Stepped
from escalade.engine.training.program import KernelStep, ReferenceStep, StepProgram
from escalade.errors import UnsupportedError

Gradients = Mapping[nn.Parameter, torch.Tensor]


class Planned:
    """What runs a step for inputs of one size: parameters and buffers are read and written where the model has them,
    inputs are copied to where the plan reads them."""

    def __init__(
        self,
        joint: Joint,
        model: nn.Module,
        stepped: Set[nn.Parameter],
        inputs: list[torch.Tensor],
        scale: torch.Tensor | None,
        dtype: str,
        on_twin: bool,
    ) -> None:
        """`stepped` are the parameters that the optimiser has; `inputs` lie where the model does."""
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        joint = joint.stepping([name for name in joint.trained if parameters[name] in stepped])
        own = [*(parameters[name] for name in joint.parameters), *(buffers[name] for name in joint.buffers)]
        self._inputs = [torch.empty_like(one, memory_format=torch.preserve_format) for one in inputs]
        scales = [] if scale is None else [scale]
        tensors = [*(_required(one.detach()) for one in own), *self._inputs, *scales]
        graph = joint.graph
        bound = {given.name: one for given, one in zip(graph.inputs, tensors, strict=True)}
        formats = {name: InputFormat.of(tensor) for name, tensor in bound.items()}
        given_as = {name: each.layout for name, each in formats.items() if each.layout != "flat"}
        places = dict(zip(joint.parameters, (entry.name for entry in graph.inputs), strict=False))
        returned = {
            output: given_as[places[name]]
            for name, output in zip(joint.trained, graph.outputs[1:], strict=False)
            if places[name] in given_as
        }
        graph = optimise_step(graph, given_as, returned)
        device = tensors[0].device
        plan = make_plan(graph, dtype, device, formats, bound=True)
        constants = Constants(dtype, device, typed=True)
        self.program: StepProgram = (
            ReferenceStep(plan, constants, bound)
            if device.type == "cpu" and not on_twin
            else KernelStep(plan, constants, device, bound)
        )
        self._loss, *results = self.program.results()
        self._gradients = {parameters[name]: one for name, one in zip(joint.trained, results, strict=False)}
        self._changed = [buffers[name] for name in joint.changed]
        self._new = results[len(joint.trained) :]
        self.groups: list[Stepped] | None = None

    @property
    def types(self) -> dict[nn.Parameter, torch.dtype]:
        """The types of the gradients."""
        return {parameter: gradient.dtype for parameter, gradient in self._gradients.items()}

    def step_by(self, groups: list[Stepped], step: Callable[[list[Stepped], Gradients], None]) -> None:
        """Has each run end with a step of these groups."""
        if self._loss.is_cuda:
            for group in groups:
                group.rehearse(self._gradients)

        def finish() -> None:
            by_type: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
            for old, new in zip(self._changed, self._new, strict=True):
                olds, news = by_type.setdefault(old.dtype, ([], []))
                olds.append(old)
                news.append(new)
            for olds, news in by_type.values():
                torch._foreach_copy_(olds, news)
            step(groups, self._gradients)

        self.program.finish_with(finish)
        self.groups = groups

    def run(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        """One step; the loss."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        self.program.run()
        return self._loss.clone()


def _required(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the model's that kernels can read and write where it is."""
    dense = tensor.is_contiguous() or (
        tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    )
    if not dense or tensor.data_ptr() % ALIGNMENT:
        raise UnsupportedError(
            f"a parameter or buffer of {list(tensor.shape)} with strides {list(tensor.stride())}: a training step "
            "takes those that lie without gaps, in PyTorch's order or in channels_last"
        )
    return tensor
