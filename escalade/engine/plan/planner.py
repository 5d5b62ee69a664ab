"""From a graph whose sizes are numbers to a plan: kernels for every node, and a place for every value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from escalade.device.precompilation import Expected
from escalade.engine.graph.forms import STORAGE, Form, InputFormat
from escalade.engine.graph.graph import Graph, Input, Node
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.lowering import OWN, Forms, Lying
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.choices import Choices, problem_apart
from escalade.engine.plan.liveness import Lives, arenas, lying_outside
from escalade.engine.plan.moves import gather_moves
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.step import ConstantForm, Step
from escalade.engine.plan.subbuffers import RESULT, Parts, arrange
from escalade.engine.plan.subbuffers import Place as Inside
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Place
from escalade.ops.choose.table import Table


def make_plan(
    graph: Graph,
    dtype: str,
    place: Place,
    formats: Mapping[str, InputFormat],
    avoid: frozenset[str] = frozenset(),
    fusion: FusionLevel = FusionLevel.fused,
    in_pytorch: Mapping[str, str] = MappingProxyType({}),
    bound: bool = False,
    decided: Table | None = None,
    deterministic: bool = False,
    expected: Expected | None = None,
) -> Plan:
    """Kernels for every node of a graph whose sizes are numbers, and a place for every value.

    `in_pytorch` names nodes that PyTorch is to do although a rung could, with the reason. Where inputs are `bound`,
    they lie in tensors that are the same at every run, and have no place here. `decided` has choices that were made
    before. In a `deterministic` plan PyTorch adds up nothing: it may choose another way for it at each run.
    Programs are `expected` as soon as they are known.
    """
    dense = value_forms(graph, dtype, formats)
    asking = Forms(dtype, dense, graph.constants, graph.typed)
    choices = Choices(graph.nodes, asking, place, avoid, fusion, in_pytorch, decided, deterministic)
    graph = gather_moves(graph, dense, choices)
    parts = arrange(graph, dense, asking, choices)
    graph, forms = parts.graph, parts.forms
    steps = _with_makers([_expecting(_step(node, parts, choices), expected) for node in graph])
    if deterministic:
        _require_kernels(steps)
    constants = dict.fromkeys(
        step.constant(role)
        for step in steps
        for role, name in step.node.inputs.items()
        if name in graph.constants
    ) | dict.fromkeys(ConstantForm(name, OWN) for name in graph.outputs if name in graph.constants)
    lasting = {
        step.workspace_name(workspace): workspace
        for step in steps
        if step.recipe
        for workspace in step.recipe.lasting
        if workspace.zeroed or step.has_weights_ready(graph.constants)
    }
    values = Lives.of(graph, steps, parts, frozenset(one.name for one in graph.inputs if bound))
    outside = {} if bound else lying_outside(graph, steps, values, forms)
    inner, outer = arenas(steps, values, forms, lasting, outside)
    roots = {**inner.offsets, **{name: inner.bytes + offset for name, offset in outer.offsets.items()}}
    aliases = {
        name: roots[values.root(name)] + values.offset(name, parts)
        for name in values.owner
        if name not in values.apart
    }
    return Plan(
        dtype,
        graph,
        tuple(steps),
        forms,
        {**roots, **aliases},
        inner.bytes,
        inner.lifetimes,
        lasting,
        tuple(constants),
        outside,
        outer.bytes,
        values.apart,
        choices.chosen,
    )


def _expecting(step: Step, expected: Expected | None) -> Step:
    if step.recipe and expected:
        expected.add(step.recipe.programs)
    return step


def _with_makers(steps: Sequence[Step]) -> list[Step]:
    """The steps, those in PyTorch whose results no kernel writes after all."""
    made = {step.node.name for step in steps if step.recipe}
    return [step if step.beside is None or step.beside.node in made else Step(step.node) for step in steps]


def value_forms(graph: Graph, dtype: str, formats: Mapping[str, InputFormat]) -> dict[str, Form]:
    """How every value lies in memory."""
    storage = STORAGE[dtype]
    forms = {given.name: _input_form(graph, given, formats[given.name], storage) for given in graph.inputs}
    return forms | stored_forms(graph, dtype)


def _input_form(graph: Graph, given: Input, format: InputFormat, storage: torch.dtype) -> Form:
    """Images lie as they come, for a kernel to convert; anything else as its readers want it, by the copy that
    brings it in. So do images of a type that their reader has no kernel for.
    """
    dtype = getattr(torch, given.dtype)
    if graph.typed:  # its readers know how inputs lie
        return Form(given.shape, dtype, format.layout)  # type: ignore[arg-type]
    if dtype.is_floating_point and len(given.shape) == 4:
        readers = graph.readers(given.name)

        def takes(type: torch.dtype) -> bool:
            return all(operator_of(node).takes_image_type(type, storage) for node in readers)

        own = next((type for type in (format.dtype, torch.float32) if takes(type)), storage)
        layout = format.layout if all(_reads_any_layout(node, given) for node in readers) else graph.images
        return Form(given.shape, own, layout)  # type: ignore[arg-type]
    return Form(given.shape, storage if dtype.is_floating_point else dtype, "flat")  # type: ignore[arg-type]


def _reads_any_layout(node: Node, given: Input) -> bool:
    """Whether a node reads an input as it comes; others were told how it lies."""
    operator = operator_of(node)
    return operator.takes_image_as_it_comes(node, given) or operator.layouts(node, {}).read is None


def _require_kernels(steps: Sequence[Step]) -> None:
    for step in steps:
        node, operator = step.node, operator_of(step.node)
        if step.in_pytorch and node.is_floating and not operator.is_exact(node):
            raise UnsupportedError(
                f"deterministic=True has Escalade's kernels do all that adds up, and {node.source or node.name} "
                f"({operator.title(node)}) is left to PyTorch, which may do it in another way each time"
            )


def _lying(places: Mapping[str, Inside]) -> dict[str, Lying]:
    return {role: Lying(place.first, place.pitch) for role, place in places.items()}


def _step(node: Node, parts: Parts, choices: Choices) -> Step:
    """The step of a node over values where they lie."""
    if node.name in parts.in_place:
        return Step(node, is_alias=True)
    roles = {**node.inputs, RESULT: node.name}
    used = {role: parts.places[name] for role, name in roles.items() if name in parts.places}
    if node.name in parts.gathered:
        return choices.placed(node, _lying(used))
    step = choices.of(node)
    if step.is_moved:
        return choices.placed(node, _lying(used)) if used else step
    if step.lowered is None or step.choice is None or not used:
        return step
    if not all(parts.is_aligned(roles[role]) for role in used):
        return Step(node)
    problem = problem_apart(step, {role: place.pitch for role, place in used.items() if place.pitch})
    assert problem is not None, f"{step.choice.rung.name} has said that it takes {node.name} apart"
    lowered, choice = replace(step.lowered, problem=problem), replace(step.choice, problem=problem)
    return Step(node, lowered, choice, choice.rung.recipe(problem, choice.config))
