"""A captured training step planned for one size of batch, over the model's own tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from escalade.device.strides import ALIGNMENT, empty, is_aligned, is_packed, layout_of, same_order
from escalade.engine.capture.joint import Joint
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes import operator_of
from escalade.engine.passes import optimize_step
from escalade.engine.passes.casts import Cast, drop_output_casts, lift_casts
from escalade.engine.passes.counters import drop_counters
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.planner import make_plan
from escalade.engine.plan_cache import failing_rung
from escalade.engine.training.optimizers import Stepped
from escalade.engine.training.program import KernelStep, ReferenceStep, StepProgram
from escalade.engine.training.techniques import GRAPH, RUNGS
from escalade.errors import CompileError, UnsupportedError
from escalade.ops.base.card import Card

logger = logging.getLogger("escalade")

Gradients = Mapping[nn.Parameter, torch.Tensor]
Reduce = Callable[[torch.Tensor], None]
"""Makes of the gradients of one process, all in one tensor, those of all processes."""


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
        without: frozenset[str],
        reduce: Reduce | None,
        plan_only: Card | None = None,
    ) -> None:
        """`stepped` are the parameters that the optimiser has; `inputs` lie where the model does; `without` names
        techniques that are left out. With `plan_only` kernels are chosen for that card, and
        not compiled."""
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        joint = joint.with_gradients_of([name for name in joint.trained if parameters[name] in stepped])
        graph = joint.graph
        names = [entry.name for entry in graph.inputs]
        casts = lift_casts(graph)
        drop_output_casts(graph, range(1, 1 + len(joint.trained)))
        first = 1 + len(joint.trained)
        behind = dict(zip(joint.buffers, names[len(joint.parameters) :], strict=False))
        counted = drop_counters(graph, {first + n: behind[name] for n, name in enumerate(joint.changed)})
        own = [*(parameters[name] for name in joint.parameters), *(buffers[name] for name in joint.buffers)]
        bound = dict(zip(names, (_required(one.detach()) for one in own), strict=False))
        given = dict(zip(names[len(own) :], inputs, strict=False))
        bound |= {
            name: empty(one.shape, one.dtype, layout_of(one), one.device) for name, one in given.items()
        }
        if scale is not None:
            bound[names[-1]] = scale
        bound |= {cast.name: torch.empty_like(bound[cast.source], dtype=cast.dtype) for cast in casts}
        alone = _alone(graph, casts, given)
        self._inputs = [bound[alone.get(name, name)] for name in given]
        self._bring_in(inputs)  # a plan is run when it is made, and targets are indices
        self._casts = _Copies(
            (bound[cast.source], bound[cast.name]) for cast in casts if cast.source not in alone
        )
        formats = {name: InputFormat.of(tensor) for name, tensor in bound.items()}
        given_as = {name: each.layout for name, each in formats.items() if each.layout != "flat"}
        places = dict(zip(joint.parameters, names, strict=False))
        returned = {
            output: given_as[places[name]]
            for name, output in zip(joint.trained, graph.outputs[1:], strict=False)
            if places[name] in given_as
        }
        device = own[0].device
        constants = ConstantCache(dtype, device, typed=True)
        by_kernels = device.type != "cpu" or on_twin or plan_only is not None
        card = plan_only or (Card.of(device) if by_kernels else None)
        graph = optimize_step(graph, given_as, returned, dtype, card, without)
        fusion = FusionLevel.naive if RUNGS in without else FusionLevel.fused
        planned = partial(make_plan, graph, dtype, plan_only or device, formats, fusion=fusion, bound=True)
        ready = partial(
            KernelStep, constants=constants, device=device, bound=bound, prepare=self._casts.run,
            as_graph=GRAPH not in without,
        )  # fmt: skip
        self.program: StepProgram = (
            _by_kernels(planned, ready)
            if by_kernels and plan_only is None
            else ReferenceStep(planned(), constants, bound, self._casts.run)
        )
        self._loss, *results = self.program.results()
        trained = [parameters[name] for name in joint.trained]
        self._meet: Callable[[], None] | None = None
        if reduce is None:
            self._gradients, self._widened = _of_one_type(trained, results)
        else:
            flat, self._gradients, self._widened = _one_behind_another(trained, results)
            self._meet = partial(reduce, flat)
        changed = {first + n: buffers[name] for n, name in enumerate(joint.changed)}
        self._counted = _Counts((changed.pop(place), step) for place, step in counted.items())
        self._new = _Copies(zip(results[len(trained) :], changed.values(), strict=True))
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

        gradients, alone = self._gradients, self._meet is None
        works = [self._widened.run] if alone else []
        works += [self._new.run, self._counted.run]

        def finish() -> None:
            for work in works:
                work()
            step(groups, gradients)

        self.program.finish_with(finish, None if alone else self._widened.run, self._meet)
        self.groups = groups

    def run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """One step; the loss."""
        self._bring_in(inputs)
        self.program.run()
        return self._loss.clone()

    def _bring_in(self, inputs: Sequence[torch.Tensor]) -> None:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)


def _by_kernels(planned: Callable[..., Plan], ready: Callable[[Plan], KernelStep]) -> KernelStep:
    """The plan made ready. A kernel that does not compile is passed over for the next rung, and said so; random numbers
    that it draws when it is made are put back."""
    avoid: frozenset[str] = frozenset()
    while True:
        plan = planned(avoid=avoid)
        draws = any(step.in_pytorch and operator_of(step.node).is_random(step.node) for step in plan.steps)
        try:
            with torch.random.fork_rng(enabled=draws):
                return ready(plan)
        except CompileError as error:
            failed = failing_rung(plan, error)
            if failed is None or failed in avoid:
                raise
            logger.warning("%s did not compile; the next rung takes its place. %s", failed, error)
            avoid |= {failed}


class _Copies:
    """Tensors written into others, all of a kind in one launch."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._groups: dict[
            tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]
        ] = {}
        for source, target in pairs:
            sources, targets = self._groups.setdefault((source.dtype, target.dtype), ([], []))
            sources.append(source)
            targets.append(target)

    def run(self) -> None:
        for sources, targets in self._groups.values():
            torch._foreach_copy_(targets, sources)


class _Counts:
    """Tensors that whole numbers are added to, all that get the same in one launch."""

    def __init__(self, steps: Iterable[tuple[torch.Tensor, int]]) -> None:
        self._groups: dict[int, list[torch.Tensor]] = {}
        for tensor, step in steps:
            self._groups.setdefault(step, []).append(tensor)

    def run(self) -> None:
        for step, tensors in self._groups.items():
            torch._foreach_add_(tensors, step)


def _alone(graph: Graph, casts: list[Cast], given: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The inputs of which nothing is read but one cast, which they can be brought in as."""
    read = {name for node in graph for name in node.inputs.values()} | set(graph.outputs)
    by_source: dict[str, list[str]] = {}
    for cast in casts:
        by_source.setdefault(cast.source, []).append(cast.name)
    return {
        name: made[0] for name, made in by_source.items() if len(made) == 1 and name in given.keys() - read
    }


def _of_one_type(
    trained: list[nn.Parameter], results: list[torch.Tensor]
) -> tuple[dict[nn.Parameter, torch.Tensor], _Copies]:
    """Gradients of these parameters, and what widens some of them: one launch steps those of one type."""
    found = {one: _lying_as(one, result) for one, result in zip(trained, results, strict=False)}
    if len({gradient.dtype for gradient in found.values()}) <= 1:
        return found, _Copies(())
    narrow = {one: gradient for one, gradient in found.items() if gradient.dtype is not one.dtype}
    wide = {one: torch.empty_like(gradient, dtype=one.dtype) for one, gradient in narrow.items()}
    return {**found, **wide}, _Copies((gradient, wide[one]) for one, gradient in narrow.items())


def _one_behind_another(
    trained: list[nn.Parameter], results: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor], _Copies]:
    """Room for all gradients in the parameters' type, its parts, and what fills it: processes meet once."""
    step = ALIGNMENT // torch.float32.itemsize
    ends = list(accumulate(-(-one.numel() // step) * step for one in trained))
    flat = torch.zeros(ends[-1] if ends else 0, dtype=torch.float32, device=results[0].device)
    places = {
        one: flat.as_strided(one.shape, one.stride(), begin)
        for one, begin in zip(trained, [0, *ends], strict=False)
    }
    return flat, places, _Copies(zip(results, places.values(), strict=False))


def _lying_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A gradient with the strides of its parameter, if its elements lie in that order."""
    alike = same_order(parameter.shape, parameter.stride(), gradient.stride())
    return gradient.as_strided(parameter.shape, parameter.stride()) if alike else gradient


def _required(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the model's that kernels can read and write where it is."""
    if not is_packed(tensor, layout_of(tensor)) or not is_aligned(tensor):
        raise UnsupportedError(
            f"a parameter or buffer of {list(tensor.shape)} with strides {list(tensor.stride())} at address "
            f"{tensor.data_ptr()}: a training step takes those that lie without gaps, in PyTorch's order or in "
            f"channels_last, from a multiple of {ALIGNMENT} bytes on"
        )
    return tensor
