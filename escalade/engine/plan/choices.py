"""Choose what computes each node of a plan: a rung with its config, or PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.lowering import Forms, Lowered, Placement
from escalade.engine.nodes.side_outputs import side_buffer_of
from escalade.engine.nodes.views import Concatenate, Slice
from escalade.engine.passes import FusionLevel
from escalade.engine.plan.plan import PlanStep
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card, DeviceOrCard
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice, choose
from escalade.ops.choose.pytorch import reason_for_pytorch
from escalade.ops.choose.table import Table


class StepChoices:
    """The step of each node, chosen as if every value were dense in its own buffer.

    Tuning tables were measured that way.
    """

    def __init__(
        self,
        nodes: Mapping[str, Node],
        forms: Forms,
        place: DeviceOrCard,
        avoid: frozenset[str],
        fusion: FusionLevel,
        pytorch_nodes: Mapping[str, str],
        decided: Table | None,
        deterministic: bool,
    ) -> None:
        self._nodes = dict(nodes)
        self._forms, self._place, self._avoid, self._fusion = forms, place, avoid, fusion
        self.pytorch_nodes = pytorch_nodes
        """Nodes forced to PyTorch although a rung supports them, with the reason."""
        self._decided = decided
        self._deterministic = deterministic
        self._steps: dict[str, PlanStep] = {}
        self.chosen: dict[tuple[str, Problem], Choice] = {}

    def set_nodes(self, nodes: Mapping[str, Node]) -> None:
        """Replace the graph's nodes and drop all cached steps."""
        self._nodes, self._steps = dict(nodes), {}

    def of(self, node: Node) -> PlanStep:
        if node.name not in self._steps:
            self._steps[node.name] = self._step(node)
        return replace(self._steps[node.name], node=node)

    def _step(self, node: Node) -> PlanStep:
        operator = operator_of(node)
        if operator.is_alias(node, self._forms):
            return PlanStep(node, is_alias=True)
        if node.name in self.pytorch_nodes:
            return PlanStep(node, why_pytorch=self.pytorch_nodes[node.name])
        side_output = side_buffer_of(node)
        # The producer's kernel writes it along with its own result.
        if side_output is not None:
            producer = self.of(self._nodes[side_output.node])
            return PlanStep(node, side_output=side_output) if producer.recipe else PlanStep(node)
        may_lower = node.is_floating or (operator.signature is not None and operator.signature.indices)
        forms = self._forms.of(node) if may_lower and self._inputs_have_node_dtype(node) else None
        try:
            lowered = None if forms is None else operator.lower(node, forms)
            choice = None if lowered is None else self._choice(lowered)
        except UnsupportedError as error:  # no problem describes it or no rung supports it, but PyTorch may
            return PlanStep(node, why_pytorch=str(error))
        if lowered is None or choice is None:
            return PlanStep(node, why_pytorch=_why_pytorch(node))
        if lowered.at_placements is not None and not all(map(self.has_memory, node.inputs.values())):
            # PyTorch's result may be a view: our copy kernel would need a dense copy of it first.
            return PlanStep(node)
        _check_output_size(node, lowered, self._forms.value(node.name))
        if self._fusion is FusionLevel.naive:
            return PlanStep(node, lowered, choice, choice.rung.recipe(choice.problem, choice.config))
        if choice.problem != lowered.problem:
            raise UnsupportedError(
                f"{lowered.problem.name} needs layout {choice.problem.layout}; the plan has {lowered.problem.layout}"
            )
        reason = reason_for_pytorch(lowered.operation, choice, self._place, self._avoid)
        if reason is not None and not self._deterministic:
            return PlanStep(node, why_pytorch=reason)
        return PlanStep(node, lowered, choice, choice.rung.recipe(choice.problem, choice.config))

    def _inputs_have_node_dtype(self, node: Node) -> bool:
        """Return True if every floating input has the node's own dtype, as its kernels require."""
        forms = self._forms
        if not forms.typed or operator_of(node).mixes_types:
            return True
        types = {
            forms.constant_type(name) if forms.is_constant(name) else forms.value(name).dtype
            for role, name in node.inputs.items()
            if role not in operator_of(node).fp32_roles
        }
        return all(kind is getattr(torch, node.dtype) for kind in types if kind.is_floating_point)

    def _choice(self, lowered: Lowered) -> Choice:
        if self._fusion is FusionLevel.naive:
            return _lowest_rung(lowered, self._place)
        key = lowered.operation.name, lowered.problem
        if key not in self.chosen:  # networks repeat their layers
            self.chosen[key] = choose(
                lowered.operation, lowered.problem, self._place, avoid=self._avoid, decided=self._decided
            )
        return self.chosen[key]

    def has_memory(self, name: str) -> bool:
        """Return True if a value is stored in the plan's memory, False if PyTorch's allocator places it."""
        node = self._nodes.get(name)
        if node is None:
            return True
        operator = operator_of(node)
        if operator.is_alias(node, self._forms) or Slice.matches(node):
            return self.has_memory(node.inputs["x"])
        return Concatenate.matches(node) or not self.of(node).in_pytorch

    def _lowered_copy(self, node: Node) -> Lowered | None:
        forms = self._forms.of(node)
        lowered = None if forms is None else operator_of(node).lower(node, forms)
        return lowered if lowered is not None and lowered.at_placements is not None else None

    def is_copy_at_offsets(self, node: Node) -> bool:
        """Return True if `at_offsets` takes a node."""
        return self._lowered_copy(node) is not None

    def at_offsets(self, node: Node, placements: Mapping[str, Placement]) -> PlanStep:
        """Return the step of a copy node whose inputs or result are subbuffers, given by role."""
        lowered = self._lowered_copy(node)
        assert lowered is not None and lowered.at_placements is not None, f"{node.name} is not a copy"
        problem = lowered.at_placements(placements)
        assert problem is not None, f"{node.name} cannot copy these subbuffers"
        lowered = replace(lowered, problem=problem)
        choice = self._choice(lowered)
        return PlanStep(node, lowered, choice, choice.rung.recipe(choice.problem, choice.config))

    def accepts_misaligned(self, node: Node) -> bool:
        """Return True if a node reads and writes at any element offset, as copy kernels and PyTorch do."""
        step = self.of(node)
        return step.in_pytorch or step.is_copy

    def accepts_pitch(self, node: Node, role: str, pitch: int) -> bool:
        """Return True if a node reads or writes a role whose rows are `pitch` elements apart."""
        step = self.of(node)
        if step.is_copy:
            return step.lowered is not None and step.lowered.with_pitches({role: pitch}) is not None
        return step.in_pytorch or (step.runs and pitched_problem(step, {role: pitch}) is not None)


def pitched_problem(step: PlanStep, pitches: Mapping[str, int]) -> Problem | None:
    """Return a step's problem with the rows of these roles padded to a pitch, or None if its rung refuses it."""
    assert step.lowered is not None and step.choice is not None
    try:
        problem = step.lowered.with_pitches(pitches)
    except UnsupportedError:
        return None
    return problem if problem is not None and step.choice.rung.refusal(problem) is None else None


def _check_output_size(node: Node, lowered: Lowered, form: Form) -> None:
    """Refuse a node whose kernel would write more or fewer bytes than the graph has for the result."""
    result = lowered.operation.output(lowered.problem, torch.device("meta"))
    if result.nbytes != form.bytes:
        raise UnsupportedError(
            f"{node.source or node.name} writes {result.nbytes} bytes ({lowered.problem.name}), but its shape "
            f"{list(form.shape)} in the graph takes {form.bytes}"
        )


def _lowest_rung(lowered: Lowered, place: DeviceOrCard) -> Choice:
    """Choose the lowest rung that supports the problem and keeps no state between calls."""
    for rung in lowered.operation.ladder.on(Card.of(place)):
        if rung.refusal(lowered.problem) is None:
            choice = choose(lowered.operation, lowered.problem, place, rung.name)
            if not rung.recipe(choice.problem, choice.config).shared_state:
                return replace(choice, why="the lowest rung of its ladder")
    raise UnsupportedError(f"no rung of {lowered.operation.name} supports {lowered.problem.name}")


def _why_pytorch(node: Node) -> str:
    """Return why PyTorch computes a node for which there are kernels in other cases; empty if there are none."""
    if Conv2d.matches(node) and node.attributes.get("layout") == "nchw":
        return "as a lone layer in NCHW it is a matrix product in PyTorch, which saves two layout conversions"
    if Aten.matches(node) and node.dtype == "float64":
        return "float64, which no kernel computes in"
    return ""
