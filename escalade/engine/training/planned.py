"""Plan a captured training step for one batch size, on the model's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import nn

from escalade.device.strides import ALIGNMENT, empty, is_aligned, is_packed, layout_of, same_order
from escalade.engine.capture.joint import Joint
from escalade.engine.explain import Explanation, explain_plan, mebibytes
from escalade.engine.graph.forms import InputFormat
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.aten import is_random
from escalade.engine.passes import FusionLevel, optimize_step
from escalade.engine.passes.casts import Cast, drop_output_casts, lift_casts
from escalade.engine.passes.simplify import drop_counters
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.kernels import avoid_failed
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.planner import make_plan
from escalade.engine.training.optimizers import Gradients, ParameterGroup, state_bytes
from escalade.engine.training.program import KernelStep, OperatorStep, ReferenceStep, StepProgram
from escalade.engine.training.recompute import fit_memory
from escalade.engine.training.settings import GRAPH, RUNGS, StepSettings
from escalade.engine.training.update import Accumulator
from escalade.errors import CompileError, UnsupportedError
from escalade.ops.base.card import TWIN, Card

CHECKS_PLANS = False
"""True in tests of passes: on the CPU the plan itself is computed, node by node, instead of the captured operators."""


class PlannedStep:
    """A training step for one input size. Parameters and buffers are read and written in place; inputs are copied."""

    def __init__(
        self,
        joint: Joint,
        model: nn.Module,
        stepped: Set[nn.Parameter],
        inputs: list[torch.Tensor],
        scale: torch.Tensor | None,
        settings: StepSettings,
        accumulator: Accumulator | None = None,
    ) -> None:
        """Plan the step and prepare its kernels.

        `stepped` are the optimizer's parameters; `inputs` are on the model's device.
        """
        dtype, plan_only = settings.products, settings.plan_only
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        joint = joint.with_gradients_of([name for name in joint.trained if parameters[name] in stepped])
        graph = joint.graph
        names = [entry.name for entry in graph.inputs]
        device = (*parameters.values(), *buffers.values())[0].device
        by_kernels = device.type != "cpu" or settings.on_twin or plan_only is not None
        casts = lift_casts(graph) if by_kernels or CHECKS_PLANS else []
        drop_output_casts(graph, range(1, 1 + len(joint.trained)))
        first = 1 + len(joint.trained)
        behind = dict(zip((*joint.parameters, *joint.buffers), names, strict=False))
        counted = drop_counters(graph, {first + n: behind[name] for n, name in enumerate(joint.changed)})
        own = [*(parameters[name] for name in joint.parameters), *(buffers[name] for name in joint.buffers)]
        bound = dict(zip(names, (_require_packed(one.detach()) for one in own), strict=False))
        given = dict(zip(names[len(own) :], inputs, strict=False))
        bound |= {
            name: empty(one.shape, one.dtype, layout_of(one), one.device) for name, one in given.items()
        }
        if scale is not None:
            bound[names[-1]] = scale
        bound |= {cast.name: torch.empty_like(bound[cast.source], dtype=cast.dtype) for cast in casts}
        alone = _inputs_read_as_cast(graph, casts, given)
        self._inputs = [bound[alone.get(name, name)] for name in given]
        for name in alone:  # only its cast is stored
            del bound[name]
        graph.inputs = tuple(entry for entry in graph.inputs if entry.name not in alone)
        owned = sum(one.nbytes for one in own)
        self.bound_bytes = {
            "parameters and buffers": owned,
            "inputs and copies in 16 bits": sum(one.nbytes for one in bound.values()) - owned,
        }
        """Bytes of the tensors that the plan reads besides its arena, by purpose."""
        self._copy_inputs(inputs)  # preparing kernels runs the plan once, and targets must be valid indices
        self._casts = _Copies(
            (bound[cast.source], bound[cast.name]) for cast in casts if cast.source not in alone
        )
        formats = {name: InputFormat.of(tensor) for name, tensor in bound.items()}
        input_layouts = {name: each.layout for name, each in formats.items() if each.layout != "flat"}
        places = dict(zip(joint.parameters, names, strict=False))
        returned = {
            output: input_layouts[places[name]]
            for name, output in zip(joint.trained, graph.outputs[1:], strict=False)
            if places[name] in input_layouts
        }
        constants = ConstantCache(dtype, device, typed=True)
        card = plan_only or (Card.of(device) if by_kernels else None)
        graph = optimize_step(graph, input_layouts, returned, dtype, card, settings.without)
        fusion = FusionLevel.naive if RUNGS in settings.without else FusionLevel.fused
        plan_of = partial(
            make_plan, dtype=dtype, place=plan_only or device, formats=formats, fusion=fusion, bound=True
        )
        if settings.memory is not None:
            graph = fit_memory(graph, plan_of, settings.memory, card or TWIN)
        planned = partial(plan_of, graph)
        ready = partial(
            KernelStep, constants=constants, device=device, bound=bound, prepare=self._casts.run,
            as_graph=GRAPH not in settings.without,
        )  # fmt: skip
        self.program: StepProgram
        if by_kernels and plan_only is None:
            self.program = _prepare_kernels(planned, ready)
        elif plan_only is not None or CHECKS_PLANS:
            self.program = ReferenceStep(planned(), constants, bound, self._casts.run)
        else:
            kept = [index for index in range(len(joint.results)) if index not in counted]
            self.program = OperatorStep(planned(), joint.module(), [bound[name] for name in names], kept)
        self._loss, *results = self.program.results()
        trained = [parameters[name] for name in joint.trained]
        self._all_reduce: Callable[[], None] | None = None
        self._total: torch.Tensor | None = None
        if settings.reduce is None and accumulator is None:
            found = zip(trained, results, strict=False)
            self._gradients = {one: _with_parameter_strides(one, gradient) for one, gradient in found}
            self._gradient_copies = _Copies(())
        else:
            flat, self._gradients, self._gradient_copies = _flatten_gradients(trained, results)
            if accumulator is not None:
                self._call_gradients, self._total = flat, accumulator.like(flat)
                self._gradients = _views_by_parameter(self._total, trained)
            self._all_reduce = partial(
                settings.reduce or _nothing, flat if self._total is None else self._total
            )
        tensors = parameters | buffers
        changed = {first + n: tensors[name] for n, name in enumerate(joint.changed)}
        self._counters = _Increments((changed.pop(place), step) for place, step in counted.items())
        end = len(trained) + len(changed)
        self._updates_by_model = _Copies(zip(results[len(trained) : end], changed.values(), strict=True))
        self._parts = results[end:]
        self.groups: list[ParameterGroup] | None = None

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Return what the loss returned besides its own value in the last run."""
        return tuple(one.clone() for one in self._parts)

    @property
    def types(self) -> dict[nn.Parameter, torch.dtype]:
        """The dtypes of the gradients."""
        return {parameter: gradient.dtype for parameter, gradient in self._gradients.items()}

    def explain(self, optimizer: torch.optim.Optimizer, device: str) -> Explanation:
        """Describe the plan, and the memory that a step takes by purpose."""
        parts = {
            "activations, gradients and workspaces": self.program.plan.arena_bytes,
            **self.bound_bytes,
            "optimizer state": state_bytes(optimizer, self.types),
        }
        purposes = ", ".join(f"{name} {mebibytes(size)}" for name, size in parts.items())
        note = f"Planned peak {mebibytes(sum(parts.values()))}: {purposes}."
        found = explain_plan(self.program.plan, device=device)
        return replace(found, notes=(*found.notes, note))

    def set_optimizer(
        self,
        groups: list[ParameterGroup],
        step: Callable[[list[ParameterGroup], Gradients], None],
        *,
        on_device: bool = True,
    ) -> None:
        """End each run with an update of these groups by `step`, which is part of a CUDA graph if it is `on_device`."""
        if self._loss.is_cuda:
            for group in groups:
                group.warm_up(self._gradients)

        gradients, total = self._gradients, self._total
        changes: list[Callable[[], object]] = [self._updates_by_model.run, self._counters.run]
        before: list[Callable[[], object]] = [self._gradient_copies.run]  # before gradients are exchanged
        if total is not None:
            before += [partial(total.add_, self._call_gradients), *changes]
        after = [] if total is not None else changes
        all_reduce = self._all_reduce
        if not on_device:
            before, after = [*before, *after], []
            all_reduce = all_reduce or _exchange_nothing
        elif all_reduce is None:
            before, after = [], [*before, *after]

        def finish() -> None:
            for work in after:
                work()
            step(groups, gradients)
            if total is not None:
                total.zero_()

        def pack() -> None:
            for work in before:
                work()

        self.program.finish_with(finish, pack, all_reduce, on_device=on_device)
        self.groups = groups

    def run(self, inputs: Sequence[torch.Tensor], updates: bool = True) -> torch.Tensor:
        """Run one step, up to the gradients or including the update of parameters, and return the loss."""
        self._copy_inputs(inputs)
        self.program.run(updates)
        return self._loss.clone()

    def _copy_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)


def _prepare_kernels(planned: Callable[..., Plan], ready: Callable[[Plan], KernelStep]) -> KernelStep:
    """Plan and prepare kernels. If a kernel does not compile, warn and plan again without its rung.

    Preparing runs the plan once; the random numbers it draws are restored.
    """
    avoid: frozenset[str] = frozenset()
    while True:
        plan = planned(avoid=avoid)
        draws = any(step.in_pytorch and is_random(step.node) for step in plan.steps)
        try:
            with torch.random.fork_rng(enabled=draws):
                return ready(plan)
        except CompileError as error:
            avoid = avoid_failed(plan, error, avoid)


def _nothing(_: torch.Tensor) -> None:
    """Exchange no gradients: the step of one process."""


def _exchange_nothing() -> None:
    """Exchange no gradients, between work that is captured and work that is not."""


class _Copies:
    """Copies between pairs of tensors, one launch per combination of dtypes."""

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


class _Increments:
    """Integers added to tensors, one launch per integer."""

    def __init__(self, steps: Iterable[tuple[torch.Tensor, int]]) -> None:
        self._groups: dict[int, list[torch.Tensor]] = {}
        for tensor, step in steps:
            self._groups.setdefault(step, []).append(tensor)

    def run(self) -> None:
        for step, tensors in self._groups.items():
            torch._foreach_add_(tensors, step)


def _inputs_read_as_cast(
    graph: Graph, casts: list[Cast], given: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    """Return the inputs that are only read through one cast, with its name: they are copied in as that dtype."""
    read = {name for node in graph for name in node.inputs.values()} | set(graph.outputs)
    by_source: dict[str, list[str]] = {}
    for cast in casts:
        by_source.setdefault(cast.source, []).append(cast.name)
    return {
        name: made[0] for name, made in by_source.items() if len(made) == 1 and name in given.keys() - read
    }


def _flatten_gradients(
    trained: list[nn.Parameter], results: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[nn.Parameter, torch.Tensor], _Copies]:
    """Return one fp32 tensor for all gradients, its views by parameter, and the copies that fill it.

    Processes then exchange gradients once.
    """
    *_, size = _flat_offsets(trained)
    flat = torch.zeros(size, dtype=torch.float32, device=results[0].device)
    places = _views_by_parameter(flat, trained)
    return flat, places, _Copies(zip(results, places.values(), strict=False))


def _flat_offsets(trained: list[nn.Parameter]) -> list[int]:
    """Return the aligned offset of each parameter's gradient in one flat tensor, and the total size."""
    step = ALIGNMENT // torch.float32.itemsize
    return list(accumulate((-(-one.numel() // step) * step for one in trained), initial=0))


def _views_by_parameter(flat: torch.Tensor, trained: list[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    return {
        one: flat.as_strided(one.shape, one.stride(), begin)
        for one, begin in zip(trained, _flat_offsets(trained), strict=False)
    }


def _with_parameter_strides(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the strides of its parameter if both have the same order in memory."""
    is_same_order = same_order(parameter.shape, parameter.stride(), gradient.stride())
    return gradient.as_strided(parameter.shape, parameter.stride()) if is_same_order else gradient


def _require_packed(tensor: torch.Tensor) -> torch.Tensor:
    """Refuse a tensor of the model that kernels cannot read and write in place."""
    if not is_packed(tensor, layout_of(tensor)) or not is_aligned(tensor):
        raise UnsupportedError(
            f"parameter or buffer of shape {list(tensor.shape)} with strides {list(tensor.stride())} at address "
            f"{tensor.data_ptr()}: training steps need dense tensors, contiguous or in channels_last, aligned to "
            f"{ALIGNMENT} bytes"
        )
    return tensor
