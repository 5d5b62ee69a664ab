"""Plan a graph with concrete sizes: a kernel for every node, and memory for every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from escalade.device.precompilation import CompileAhead
from escalade.engine.graph.aten import resolve_operator
from escalade.engine.graph.forms import STORAGE, Form, InputFormat
from escalade.engine.graph.graph import Graph, Input, Node
from escalade.engine.nodes import operator_of, reads_raw_image, stored_forms
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.lowering import OWN, Forms, Placement
from escalade.engine.nodes.views import Concatenate
from escalade.engine.passes import FusionLevel
from escalade.engine.plan.choices import StepChoices, pitched_problem
from escalade.engine.plan.liveness import Liveness, assign_arenas, values_outside
from escalade.engine.plan.moves import fuse_moves
from escalade.engine.plan.plan import ConstantForm, Plan, PlanStep
from escalade.engine.plan.subbuffers import RESULT, Subbuffer, SubbufferLayout, assign_subbuffers
from escalade.errors import UnsupportedError
from escalade.ops.base.card import DeviceOrCard
from escalade.ops.choose.table import Table


def make_plan(
    graph: Graph,
    dtype: str,
    place: DeviceOrCard,
    formats: Mapping[str, InputFormat],
    avoid: frozenset[str] = frozenset(),
    fusion: FusionLevel = FusionLevel.fused,
    pytorch_nodes: Mapping[str, str] = MappingProxyType({}),
    bound: bool = False,
    decided: Table | None = None,
    deterministic: bool = False,
    expected: CompileAhead | None = None,
) -> Plan:
    """Choose a kernel for every node of a graph with concrete sizes, and assign memory to every value.

    `pytorch_nodes` forces nodes to PyTorch although a rung supports them, with the reason. `bound` inputs are read from
    the same tensors at every run, so the arena has no space for them. `decided` holds earlier choices. A
    `deterministic` plan leaves no reduction to PyTorch, which may pick another algorithm at each run. Programs are
    added to `expected` as soon as they are known, so that they can be compiled in the meantime.
    """
    dense = value_forms(graph, dtype, formats)
    lowering_forms = Forms(dtype, dense, graph.constants, graph.typed)
    choices = StepChoices(
        graph.nodes, lowering_forms, place, avoid, fusion, pytorch_nodes, decided, deterministic
    )
    graph = fuse_moves(graph, dense, choices)
    layout = assign_subbuffers(graph, dense, lowering_forms, choices)
    graph, forms = layout.graph, layout.forms
    steps = _drop_orphaned_side_outputs(
        [_precompile(_step(node, layout, choices), expected) for node in graph]
    )
    if deterministic:
        _require_kernels(steps)
    constants = dict.fromkeys(
        step.constant(role)
        for step in steps
        for role, name in step.node.inputs.items()
        if name in graph.constants
    ) | dict.fromkeys(ConstantForm(name, OWN) for name in graph.outputs if name in graph.constants)
    # Counters are zeroed once and reset by the kernels that use them. Packed weights can be kept only if no step
    # computes them. All other workspaces are scratch in the arena.
    persistent = {
        step.workspace_name(workspace): workspace
        for step in steps
        if step.recipe
        for workspace in step.recipe.lasting
        if workspace.zeroed or step.weights_are_constant(graph.constants)
    }
    liveness = Liveness.of(graph, steps, layout, frozenset(one.name for one in graph.inputs if bound))
    outside = {} if bound else values_outside(graph, steps, liveness, forms)
    inner, outer = assign_arenas(steps, liveness, forms, persistent, outside)
    roots = {**inner.offsets, **{name: inner.bytes + offset for name, offset in outer.offsets.items()}}
    aliases = {
        name: roots[liveness.root(name)] + liveness.offset(name, layout)
        for name in liveness.owner
        if name not in liveness.pytorch_owned
    }
    return Plan(
        dtype,
        graph,
        tuple(steps),
        forms,
        {**roots, **aliases},
        inner.bytes,
        inner.lifetimes,
        persistent,
        tuple(constants),
        outside,
        outer.bytes,
        liveness.pytorch_owned,
        choices.chosen,
    )


def _precompile(step: PlanStep, expected: CompileAhead | None) -> PlanStep:
    if step.recipe and expected:
        expected.add(step.recipe.programs)
    return step


def _drop_orphaned_side_outputs(steps: Sequence[PlanStep]) -> list[PlanStep]:
    """Give side outputs whose producer has no kernel in the end to PyTorch."""
    producers = {step.node.name for step in steps if step.recipe}
    return [
        step if step.side_output is None or step.side_output.node in producers else PlanStep(step.node)
        for step in steps
    ]


def value_forms(graph: Graph, dtype: str, formats: Mapping[str, InputFormat]) -> dict[str, Form]:
    """Return the memory layout and dtype of every value."""
    storage = STORAGE[dtype]
    forms = {entry.name: _input_form(graph, entry, formats[entry.name], storage) for entry in graph.inputs}
    return forms | stored_forms(graph, dtype)


def _input_form(graph: Graph, entry: Input, format: InputFormat, storage: torch.dtype) -> Form:
    """Return the form in which an input is stored.

    Images keep the caller's dtype and layout if their readers have kernels for it. Other inputs, and other images, are
    converted to the form that their readers need by the copy into the arena.
    """
    dtype = getattr(torch, entry.dtype)
    if graph.typed:  # readers were captured with the inputs' own dtypes and layouts
        return Form(entry.shape, dtype, format.layout)  # type: ignore[arg-type]
    if dtype.is_floating_point and len(entry.shape) == 4:
        readers = graph.readers(entry.name)

        def takes(type: torch.dtype) -> bool:
            return all(_reads_dtype(node, type, storage) for node in readers)

        own = next((type for type in (format.dtype, torch.float32) if takes(type)), storage)
        layout = format.layout if all(_reads_any_layout(node, entry) for node in readers) else graph.images
        return Form(entry.shape, own, layout)  # type: ignore[arg-type]
    return Form(entry.shape, storage if dtype.is_floating_point else dtype, "flat")  # type: ignore[arg-type]


def _reads_any_layout(node: Node, entry: Input) -> bool:
    """Return True if a node reads an input in any layout."""
    return reads_raw_image(node, entry) or operator_of(node).layouts(node, {}).read is None


def _reads_dtype(node: Node, dtype: torch.dtype, storage: torch.dtype) -> bool:
    """Return True if a node's kernels read input images of this dtype, in a plan that stores values in `storage`."""
    dtypes = operator_of(node).image_dtypes
    return dtype is storage or dtypes is None or dtype in dtypes


def _is_exact(node: Node) -> bool:
    """Return True if PyTorch computes each element without sums, whose order may vary."""
    operator = operator_of(node)
    if operator.may_alias(node) or Concatenate.matches(node) or operator.expression(node) is not None:
        return True
    return Aten.matches(node) and torch.Tag.pointwise in resolve_operator(node.attributes["target"]).tags


def _require_kernels(steps: Sequence[PlanStep]) -> None:
    for step in steps:
        node, operator = step.node, operator_of(step.node)
        if step.in_pytorch and node.is_floating and not _is_exact(node):
            raise UnsupportedError(
                f"deterministic=True: {node.source or node.name} ({operator.title(node)}) has no kernel here and "
                "PyTorch may compute it with a different algorithm at each run; compile without deterministic=True"
            )


def _placements(subbuffers: Mapping[str, Subbuffer]) -> dict[str, Placement]:
    return {role: Placement(one.offset, one.pitch) for role, one in subbuffers.items()}


def _step(node: Node, layout: SubbufferLayout, choices: StepChoices) -> PlanStep:
    """Return the step of a node, adapted to inputs and results that are subbuffers."""
    if node.name in layout.in_place:
        return PlanStep(node, is_alias=True)
    roles = {**node.inputs, RESULT: node.name}
    used = {role: layout.subbuffers[name] for role, name in roles.items() if name in layout.subbuffers}
    # A concatenation whose kernel copies some of its members.
    if node.name in layout.fused_copies:
        return choices.at_offsets(node, _placements(used))
    step = choices.of(node)
    if step.is_copy:
        return choices.at_offsets(node, _placements(used)) if used else step
    if step.lowered is None or step.choice is None or not used:
        return step
    # Kernels use 16-byte accesses; PyTorch's operators accept any address.
    if not all(layout.is_aligned(roles[role]) for role in used):
        return PlanStep(node)
    problem = pitched_problem(step, {role: one.pitch for role, one in used.items() if one.pitch})
    assert problem is not None, f"{step.choice.rung.name} accepted the pitches of {node.name} before"
    lowered, choice = replace(step.lowered, problem=problem), replace(step.choice, problem=problem)
    return PlanStep(node, lowered, choice, choice.rung.recipe(problem, choice.config))
