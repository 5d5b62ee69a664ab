"""Who does each node of a plan: a rung with its config, or PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import Forms, Lowered, Lying
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.step import Step
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card, Place
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice, choose
from escalade.ops.choose.pytorch import reason_for_pytorch
from escalade.ops.choose.table import Table


class Choices:
    """Who does each node, chosen as if every value lay by itself: what was measured is so."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        asking: Forms,
        place: Place,
        avoid: frozenset[str],
        fusion: FusionLevel,
        in_pytorch: Mapping[str, str],
        decided: Table | None,
        deterministic: bool,
    ) -> None:
        self._nodes = dict(nodes)
        self._asking, self._place, self._avoid, self._fusion = asking, place, avoid, fusion
        self._in_pytorch = in_pytorch
        self._decided = decided
        self._deterministic = deterministic
        self._made: dict[str, Step] = {}
        self.chosen: dict[tuple[str, Problem], Choice] = {}

    @property
    def forced(self) -> Mapping[str, str]:
        """The nodes that PyTorch is to do although a rung could."""
        return self._in_pytorch

    def rewritten(self, nodes: Mapping[str, Node]) -> None:
        """Asks again for every node: these are the graph's from now on."""
        self._nodes, self._made = dict(nodes), {}

    def of(self, node: Node) -> Step:
        """The step of a node."""
        if node.name not in self._made:
            self._made[node.name] = self._step(node)
        return replace(self._made[node.name], node=node)

    def _step(self, node: Node) -> Step:
        operator = operator_of(node)
        if operator.is_alias(node, self._asking):
            return Step(node, is_alias=True)
        if node.name in self._in_pytorch:
            return Step(node, why_pytorch=self._in_pytorch[node.name])
        beside = operator.beside(node)
        if beside is not None:
            maker = self.of(self._nodes[beside.node])
            return Step(node, beside=beside) if maker.recipe else Step(node)
        forms = self._asking.of(node) if node.is_floating and self._has_its_types(node) else None
        try:
            lowered = None if forms is None else operator.lower(node, forms)
            choice = None if lowered is None else self._choice(lowered)
        except UnsupportedError as error:  # PyTorch may do what no problem can say, and what no rung can do
            return Step(node, why_pytorch=str(error))
        if lowered is None or choice is None:
            return Step(node, why_pytorch=operator.left_to_pytorch(node))
        if lowered.at_places is not None and not all(map(self.has_memory, node.inputs.values())):
            return Step(node)  # what PyTorch has made may be a view, which it copies once and not twice
        _require_room(node, lowered, self._asking.value(node.name))
        if self._fusion is FusionLevel.naive:
            return Step(node, lowered, choice, choice.rung.recipe(choice.problem, choice.config))
        if choice.problem != lowered.problem:
            raise UnsupportedError(f"{lowered.problem.name} would need another layout than the plan's")
        reason = reason_for_pytorch(lowered.operation, choice, self._place, self._avoid)
        if reason is not None and not self._deterministic:
            return Step(node, why_pytorch=reason)
        return Step(node, lowered, choice, choice.rung.recipe(choice.problem, choice.config))

    def _has_its_types(self, node: Node) -> bool:
        """Whether all that a node reads is of the floating type that its kernels take."""
        asking = self._asking
        if not asking.typed or operator_of(node).mixes_types:
            return True
        types = {
            asking.constant_type(name) if asking.is_constant(name) else asking.value(name).dtype
            for name in node.inputs.values()
        }
        return all(kind is getattr(torch, node.dtype) for kind in types if kind.is_floating_point)

    def _choice(self, lowered: Lowered) -> Choice:
        """Networks repeat their layers: each problem is thought about once."""
        if self._fusion is FusionLevel.naive:
            return _foot(lowered, self._place)
        asked = lowered.operation.name, lowered.problem
        if asked not in self.chosen:
            self.chosen[asked] = choose(
                lowered.operation, lowered.problem, self._place, avoid=self._avoid, decided=self._decided
            )
        return self.chosen[asked]

    def has_memory(self, name: str) -> bool:
        """Whether a value lies in the plan's memory, and not wherever PyTorch puts it."""
        node = self._nodes.get(name)
        if node is None:
            return True
        operator = operator_of(node)
        if operator.is_alias(node, self._asking) or operator.taken(node) is not None:
            return self.has_memory(node.inputs["x"])
        return operator.concatenated(node) is not None or not self.of(node).in_pytorch

    def placed(self, node: Node, places: Mapping[str, Lying]) -> Step:
        """The step of a node that is done wherever its values lie, over those that lie inside others, by role."""
        forms = self._asking.of(node)
        lowered = None if forms is None else operator_of(node).lower(node, forms)
        assert lowered is not None and lowered.at_places is not None, f"{node.name} is done wherever it lies"
        problem = lowered.at_places(places)
        assert problem is not None, f"{node.name} is done wherever it lies"
        lowered = replace(lowered, problem=problem)
        choice = self._choice(lowered)
        return Step(node, lowered, choice, choice.rung.recipe(choice.problem, choice.config))

    def takes_anywhere(self, node: Node) -> bool:
        """Whether a node's kernels take its values wherever they begin; PyTorch does."""
        step = self.of(node)
        return step.in_pytorch or step.is_moved

    def takes(self, node: Node, role: str, pitch: int) -> bool:
        """Whether a node takes a role's rows so many elements apart; PyTorch takes all."""
        step = self.of(node)
        if step.is_moved:
            return step.lowered is not None and step.lowered.apart({role: pitch}) is not None
        return step.in_pytorch or (step.runs and problem_apart(step, {role: pitch}) is not None)


def problem_apart(step: Step, pitches: Mapping[str, int]) -> Problem | None:
    """A step's problem with rows of these roles apart; None where its rung does not take it."""
    assert step.lowered is not None and step.choice is not None
    try:
        problem = step.lowered.apart(pitches)
    except UnsupportedError:
        return None
    return problem if problem is not None and step.choice.rung.refusal(problem) is None else None


def _require_room(node: Node, lowered: Lowered, form: Form) -> None:
    """A kernel writes what its problem says, whatever the graph says."""
    result = lowered.operation.output(lowered.problem, torch.device("meta"))
    if result.nbytes != form.bytes:
        raise UnsupportedError(
            f"{node.source or node.name} gives {result.nbytes} bytes ({lowered.problem.name}); the graph has "
            f"{form.bytes} for it, sizes {list(form.shape)}"
        )


def _foot(lowered: Lowered, place: Place) -> Choice:
    """The lowest rung that can do it, in memory that is the plan's own."""
    for rung in lowered.operation.ladder.on(Card.of(place)):
        if rung.refusal(lowered.problem) is None:
            choice = choose(lowered.operation, lowered.problem, place, rung.name)
            if not rung.recipe(choice.problem, choice.config).shared_state:
                return replace(choice, why="the foot of its ladder")
    raise UnsupportedError(f"no rung of {lowered.operation.name} can do {lowered.problem.name}")
