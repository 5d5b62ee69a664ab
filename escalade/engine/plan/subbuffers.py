"""Values that lie inside others: what is joined is written in its place, what is taken is read where it is.

A concatenation over channels of images in NHWC is one buffer, whose parts have their pixels as far apart as the
whole's. A value can lie so if whoever makes it can write it so, and whoever reads it can read it so; where one of them
cannot, one kernel copies it. Concatenations of which one begins, or goes on, as another does are one buffer: that is
how a network that joins ever more features does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import Forms, Taken
from escalade.engine.nodes.move import Move
from escalade.engine.plan.choices import Choices
from escalade.ops.base.dtypes import VECTOR_BYTES

RESULT = "y"


@dataclass(frozen=True)
class Place:
    """A value's place in the buffer of another."""

    whole: str
    first: int
    """Elements from the beginning of that one."""
    pitch: int
    """Elements from row to row; 0: it is dense."""


@dataclass(frozen=True)
class Parts:
    """A graph in which every value can lie where it is to lie, and the places of those inside others."""

    graph: Graph
    forms: Mapping[str, Form]
    places: Mapping[str, Place]
    in_place: frozenset[str]
    """The nodes for which nothing is left to do: what they join or take is where it belongs."""
    gathered: frozenset[str] = frozenset()
    """The nodes that copy some of what they join, all of it at once; the rest is where it belongs."""

    def is_aligned(self, name: str) -> bool:
        """Whether a value begins, and goes on from row to row, where wide accesses may."""
        place = self.places.get(name)
        size = self.forms[name].dtype.itemsize
        return place is None or not any(number * size % VECTOR_BYTES for number in (place.first, place.pitch))


@dataclass(frozen=True)
class _Range:
    """A range of a value's dimension."""

    whole: str
    dimension: int
    first: int


def arrange(
    graph: Graph,
    forms: Mapping[str, Form],
    asking: Forms,
    choices: Choices,
) -> Parts:
    """Decides which values lie inside others, and copies where that cannot be.

    `asking` answers for the forms that the graph has so far. What PyTorch makes lies where PyTorch puts it, and a range
    of it is PyTorch's too; joined with others, it is copied to its place.
    """
    if not any(_is_joint(node) or operator_of(node).taken(node) for node in graph):
        return Parts(graph, forms, {}, frozenset())
    work = _Arranging(graph.copy(), dict(forms), asking, choices)
    work.place_taken()
    work.place_joined()
    work.gather_copies()
    work.copy_for_readers()
    places = {name: work.place(name) for name in work.within}
    apart = {name: replace(work.forms[name], pitch=place.pitch) for name, place in places.items()}
    in_place = frozenset((*work.members, *work.runs, *work.taken)) - work.gathered
    return Parts(work.graph, {**work.forms, **apart}, places, in_place, frozenset(work.gathered))


def _is_joint(node: Node) -> bool:
    return operator_of(node).concatenated(node) is not None


class _Arranging:
    def __init__(
        self,
        graph: Graph,
        forms: dict[str, Form],
        asking: Forms,
        choices: Choices,
    ) -> None:
        self.graph, self.forms = graph, forms
        self._asking, self._choices = asking, choices
        self.within: dict[str, _Range] = {}
        self.members: dict[str, list[str]] = {}
        """What each whole is joined of: values as they were before any of them was copied."""
        self.taken: set[str] = set()
        """Ranges of what others have made."""
        self.runs: set[str] = set()
        """What is joined of a run of another's members."""
        self.gathered: set[str] = set()
        """What copies those of its members that cannot be written where they belong."""
        self._copies: set[str] = set()
        """Copies of members in their places."""

    def place(self, name: str) -> Place:
        """Where a value lies: in its own buffer if it is in no other."""
        if name not in self.within:
            return Place(name, 0, 0)
        inside = self.within[name]
        whole, form = self.place(inside.whole), self.forms[inside.whole]
        pitch = whole.pitch or form.row
        if inside.dimension == form.order[-1]:
            first = inside.first
        else:
            behind = form.order[form.order.index(inside.dimension) + 1 : -1]
            first = inside.first * prod(form.shape[d] for d in behind) * pitch
        own = self.forms[name]
        dense = own.rows <= 1 or own.row == pitch
        return Place(whole.whole, whole.first + first, 0 if dense else pitch)

    def place_taken(self) -> None:
        """A range of a value is where that is."""
        for node in self.graph:
            taken = operator_of(node).taken(node)
            if taken is None or node.inputs["x"] in self.graph.constants:
                continue
            if self._has_bytes(node.inputs["x"]) and _can_lie_in(node, taken, self.forms):
                self.within[node.name] = _Range(node.inputs["x"], taken.dimension, taken.first)
                self.taken.add(node.name)

    def _has_bytes(self, name: str) -> bool:
        """Whether a value lies in the plan's memory, not wherever PyTorch has put it."""
        node = self.graph.nodes.get(name)
        if node is None or name in self.within or self._parts_of(node):
            return True
        if operator_of(node).is_alias(node, self._asking):
            return self._has_bytes(node.inputs["x"])
        return not self._choices.of(node).in_pytorch

    def _parts_of(self, node: Node) -> list[str]:
        """The values that a node joins, if they can be written where they belong; none of any other node."""
        joined = operator_of(node).concatenated(node)
        if joined is None:
            return []
        names = [node.inputs[role] for role in joined.roles]
        form = self.forms[node.name]
        alike = all(
            name in self.forms
            and (self.forms[name].dtype, self.forms[name].layout) == (form.dtype, form.layout)
            for name in names
        )
        return names if alike and form.elements and _is_run(form, joined.dimension) else []

    def place_joined(self) -> None:
        """The largest first, so that those it goes beyond are parts of it."""
        joints = [node for node in self.graph if _is_joint(node)]
        for node in sorted(joints, key=lambda node: -self.forms[node.name].elements):
            joined = operator_of(node).concatenated(node)
            parts = self._parts_of(node)
            if joined is None or not parts:
                continue
            names = self._merged(parts, joined.dimension)
            run = None if node.name in self.within else self._run_of(names, joined.dimension)
            if run is not None:
                self.within[node.name] = run
                self.runs.add(node.name)
            else:
                self._join(node, names, joined.dimension)

    def _merged(self, names: Sequence[str], dimension: int) -> list[str]:
        """The parts, where those next to each other are all of another value that value instead."""
        found: list[str] = []
        at = 0
        while at < len(names):
            inside = self.within.get(names[at])
            end, reached = at, 0
            while (
                inside and end < len(names) and self.within.get(names[end]) == replace(inside, first=reached)
            ):
                reached += self.forms[names[end]].shape[dimension]
                end += 1
            if inside and inside.dimension == dimension:
                whole = self.forms[inside.whole].shape[dimension]
                if reached == whole:
                    found.append(inside.whole)
                    at = end
                    continue
            found.append(names[at])
            at += 1
        return found

    def _run_of(self, names: Sequence[str], dimension: int) -> _Range | None:
        """Where these lie next to each other already, in this order."""
        for whole, members in self.members.items():
            joined = operator_of(self.graph.nodes[whole]).concatenated(self.graph.nodes[whole])
            if joined is None or joined.dimension != dimension:
                continue
            for start in range(len(members) - len(names) + 1):
                if members[start : start + len(names)] == list(names):
                    first = sum(self.forms[name].shape[dimension] for name in members[:start])
                    return _Range(whole, dimension, first)
        return None

    def _join(self, node: Node, names: Sequence[str], dimension: int) -> None:
        """Every part in its place, or a copy of it."""
        self.members[node.name] = list(names)
        first, inputs = 0, {}
        for number, name in enumerate(names):
            inside = _Range(node.name, dimension, first)
            first += self.forms[name].shape[dimension]
            if not self._fits(name, inside):
                name = self._copied(name)
                self._copies.add(name)
            self.within[name] = inside
            inputs[f"x{number}"] = name
        self.graph.nodes[node.name] = replace(self.graph.nodes[node.name], inputs=inputs)

    def gather_copies(self) -> None:
        """Whoever joins copies makes them itself, all at once, unless some of what is joined is read before that."""
        for name in self.members:
            node = self.graph.nodes[name]
            copies = {role: value for role, value in node.inputs.items() if value in self._copies}
            is_read_before = any(self.within[run].whole == name for run in self.runs)
            if not copies or is_read_before or not self._choices.of(node).is_moved:
                continue
            sources = {role: self.graph.nodes[copy].inputs["x0"] for role, copy in copies.items()}
            for copy in copies.values():
                del self.graph.nodes[copy], self.within[copy]
            self.graph.nodes[name] = node.with_inputs(**sources).with_attributes(moved=tuple(copies))
            self.gathered.add(name)

    def _fits(self, name: str, inside: _Range) -> bool:
        """Whether a value can be written to its place and read there."""
        maker = self.graph.nodes.get(name)
        if maker is None or name in self.within or operator_of(maker).is_alias(maker, self._asking):
            return False
        self.within[name] = inside
        place = self.place(name)
        del self.within[name]
        if name in self.members:  # its readers get a copy if they need one
            return True
        readers = self.graph.readers(name)
        return self._can(maker, RESULT, name, place) and all(
            self._can(reader, role, name, place)
            for reader in readers
            for role, value in reader.inputs.items()
            if value == name
        )

    def _can(self, node: Node, role: str, name: str, place: Place) -> bool:
        """Whether a node takes a value that lies there."""
        operator = operator_of(node)
        if role != RESULT and (operator.concatenated(node) or operator.taken(node)):
            return True  # those are told apart by places
        if not place.pitch and not place.first:
            return True
        size = self.forms[name].dtype.itemsize
        if any(number * size % VECTOR_BYTES for number in (place.first, place.pitch)):
            return self._choices.takes_anywhere(node) and (
                not place.pitch or self._choices.takes(node, role, place.pitch)
            )
        if not place.pitch:
            return True
        return self._choices.takes(node, role, place.pitch)

    def _copied(self, name: str) -> str:
        """A copy of a value, made as soon as that is there."""
        copy = self._new_copy(name)
        order = [] if name in self.graph.nodes else [copy]
        for node in self.graph:
            order += [node, copy] if node.name == name else [node]
        self._reorder(order)
        return copy.name

    def _new_copy(self, name: str) -> Node:
        form = replace(self.forms[name], pitch=0)
        copy = Move.copied(self.graph.fresh(f"{name}_part"), name, form)
        self.forms[copy.name] = form
        self._asking.add(copy.name, form)
        return copy

    def _reorder(self, nodes: Iterable[Node]) -> None:
        self.graph.nodes = {node.name: node for node in nodes}

    def copy_for_readers(self) -> None:
        """Whoever cannot read a value where it lies reads a copy."""
        for name in list(self.within):
            place = self.place(name)
            if not place.pitch and not place.first:
                continue
            unable = {
                (reader.name, role)
                for reader in self.graph.readers(name)
                for role, value in reader.inputs.items()
                if value == name and not self._can(reader, role, name, place)
            }
            if not unable:
                continue
            copy = self._new_copy(name)
            readers = {reader for reader, _ in unable}
            self.graph.insert_before(next(one.name for one in self.graph if one.name in readers), copy)
            for reader, role in unable:
                self.graph.nodes[reader] = self.graph.nodes[reader].with_inputs(**{role: copy.name})


def is_taken_in_place(node: Node, forms: Mapping[str, Form]) -> bool:
    """Whether a range of a value, dense in the plan's memory, is where wide accesses may read it."""
    taken = operator_of(node).taken(node)
    if taken is None or not _can_lie_in(node, taken, forms):
        return False
    whole = forms[node.inputs["x"]]
    if taken.dimension != whole.order[-1]:
        behind = whole.order[whole.order.index(taken.dimension) + 1 :]
        steps = [taken.first * prod(whole.shape[d] for d in behind)]
    else:
        steps = [taken.first, whole.row]
    return not any(step * whole.dtype.itemsize % VECTOR_BYTES for step in steps)


def _can_lie_in(node: Node, taken: Taken, forms: Mapping[str, Form]) -> bool:
    """Whether a range has the type and the order of what it is of, and lies together there, or in rows."""
    whole, own = forms[node.inputs["x"]], forms[node.name]
    return (whole.dtype, whole.layout) == (own.dtype, own.layout) and _is_run(whole, taken.dimension)


def _is_run(whole: Form, dimension: int) -> bool:
    """Whether a range of a dimension is rows, parts of rows, or all that lies together."""
    order = whole.order
    return dimension == order[-1] or prod(whole.shape[d] for d in order[: order.index(dimension)]) == 1
