"""Concatenations and slices without copies, as subbuffers of other values.

Members of a concatenation are written straight into its buffer, and slices are read from their source. When NHWC images
are concatenated over channels, a member's pixels have the pitch of the whole buffer. That works if the node that writes
a value and all nodes that read it accept the offset and pitch; otherwise one kernel copies it. A concatenation that
extends another shares its buffer, as in DenseNet, where every layer appends features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.movement import Move
from escalade.engine.nodes.side_outputs import side_buffer_of
from escalade.engine.nodes.views import Concatenate, Slice, concatenated_values
from escalade.engine.plan.choices import StepChoices
from escalade.ops.base.dtypes import VECTOR_BYTES

RESULT = "y"


@dataclass(frozen=True)
class Subbuffer:
    """Location of a value inside the buffer of another, `root`."""

    root: str
    offset: int
    """Elements from the start of the root's buffer."""
    pitch: int
    """Elements from row to row; 0 if dense."""


@dataclass(frozen=True)
class SubbufferLayout:
    """A graph with the copies that subbuffers need, and the subbuffers by value name."""

    graph: Graph
    forms: Mapping[str, Form]
    subbuffers: Mapping[str, Subbuffer]
    in_place: frozenset[str]
    """Concatenations and slices that need no kernel."""
    fused_copies: frozenset[str] = frozenset()
    """Concatenations that copy some members, with one kernel for all; the other members are written in place."""

    def is_aligned(self, name: str) -> bool:
        """Return True if a value's offset and pitch allow vector accesses."""
        subbuffer = self.subbuffers.get(name)
        size = self.forms[name].dtype.itemsize
        return subbuffer is None or not any(
            number * size % VECTOR_BYTES for number in (subbuffer.offset, subbuffer.pitch)
        )


@dataclass(frozen=True)
class _Slice:
    """A slice of `parent` along one dimension, starting at index `first`."""

    parent: str
    dimension: int
    first: int


def assign_subbuffers(
    graph: Graph,
    forms: Mapping[str, Form],
    lowering_forms: Forms,
    choices: StepChoices,
) -> SubbufferLayout:
    """Decide which values are subbuffers of others, and insert copies where readers or writers cannot use them.

    New copies are added to `lowering_forms`. Results of PyTorch steps stay in PyTorch's memory, and so do slices of
    them, unless all of it is returned in slices; as members of a concatenation they are copied.
    """
    if not any(Concatenate.matches(node) or Slice.matches(node) for node in graph):
        return SubbufferLayout(graph, forms, {}, frozenset())
    assignment = _SubbufferAssignment(graph.copy(), dict(forms), lowering_forms, choices)
    assignment.place_slices()
    assignment.place_concatenations()
    assignment.fuse_copies()
    assignment.copy_for_refusing_readers()
    subbuffers = {name: assignment.subbuffer(name) for name in assignment.within}
    padded = {
        name: replace(assignment.forms[name], pitch=subbuffer.pitch) for name, subbuffer in subbuffers.items()
    }
    in_place = (
        frozenset((*assignment.members, *assignment.runs, *assignment.slices)) - assignment.fused_copies
    )
    forms = {**assignment.forms, **padded}
    return SubbufferLayout(assignment.graph, forms, subbuffers, in_place, frozenset(assignment.fused_copies))


class _SubbufferAssignment:
    def __init__(
        self,
        graph: Graph,
        forms: dict[str, Form],
        lowering_forms: Forms,
        choices: StepChoices,
    ) -> None:
        self.graph, self.forms = graph, forms
        self._lowering_forms, self._choices = lowering_forms, choices
        self.within: dict[str, _Slice] = {}
        self.members: dict[str, list[str]] = {}
        """Members of each concatenation, before any of them was replaced by a copy."""
        self.slices: set[str] = set()
        self.runs: set[str] = set()
        """Concatenations of adjacent members of another one."""
        self.fused_copies: set[str] = set()
        """Concatenations that copy the members that cannot be written in place."""
        self._copies: set[str] = set()
        """Copies that replace members that cannot be written in place."""

    def subbuffer(self, name: str) -> Subbuffer:
        """Return the location of a value, which is its own root if it is inside no other."""
        if name not in self.within:
            return Subbuffer(name, 0, 0)
        span = self.within[name]
        parent, form = self.subbuffer(span.parent), self.forms[span.parent]
        pitch = parent.pitch or form.row
        if span.dimension == form.order[-1]:
            offset = span.first
        else:
            inner = form.order[form.order.index(span.dimension) + 1 : -1]
            offset = span.first * prod(form.shape[d] for d in inner) * pitch
        own = self.forms[name]
        dense = own.rows <= 1 or own.row == pitch
        return Subbuffer(parent.root, parent.offset + offset, 0 if dense else pitch)

    def place_slices(self) -> None:
        for node in self.graph:
            if not Slice.matches(node) or node.inputs["x"] in self.graph.constants:
                continue
            a, x = node.attributes, node.inputs["x"]
            if self._has_memory(x) and _can_be_subbuffer(node, self.forms):
                self.within[node.name] = _Slice(x, a["dimension"], a["first"])
                self.slices.add(node.name)

    def _has_memory(self, name: str) -> bool:
        """Return True if a value is stored in the plan's memory, False if PyTorch's allocator places it."""
        node = self.graph.nodes.get(name)
        if node is None or name in self.within or self._members_of(node):
            return True
        if operator_of(node).is_alias(node, self._lowering_forms):
            return self._has_memory(node.inputs["x"])
        return not self._choices.of(node).in_pytorch or self._is_returned_in_slices(name)

    def _is_returned_in_slices(self, name: str) -> bool:
        """Return True if nothing reads a value but slices that are returned: one copy of it has them all."""
        readers = self.graph.readers(name)
        return len(readers) > 1 and all(
            Slice.matches(reader) and self._is_returned(reader.name) for reader in readers
        )

    def _is_returned(self, name: str) -> bool:
        """Return True if a value, or nothing but a view of it, is returned."""
        readers = self.graph.readers(name)
        if not readers:
            return name in self.graph.outputs
        (reader,) = readers if len(readers) == 1 else (None,)
        return (
            reader is not None
            and operator_of(reader).is_alias(reader, self._lowering_forms)
            and self._is_returned(reader.name)
        )

    def _members_of(self, node: Node) -> list[str]:
        """Return the members of a concatenation that subbuffers can represent; empty for any other node."""
        if not Concatenate.matches(node):
            return []
        names = concatenated_values(node)
        form = self.forms[node.name]
        same_form = all(
            self._is_expanded(name, node)
            or (self.forms[name].dtype, self.forms[name].layout) == (form.dtype, form.layout)
            for name in names
        )
        is_contiguous = _is_contiguous_slice(form, node.attributes["dimension"])
        return names if same_form and form.elements and is_contiguous else []

    def _is_expanded(self, name: str, node: Node) -> bool:
        """Return True for a constant, or a value that a concatenation expands: copies of these are its members."""
        if name not in self.forms:
            return True
        dimension, form, own = node.attributes["dimension"], self.forms[node.name], self.forms[name]
        expanded = (*form.shape[:dimension], own.shape[dimension], *form.shape[dimension + 1 :])
        return own.shape != expanded and own.dtype == form.dtype

    def _length(self, name: str, dimension: int) -> int:
        return self._lowering_forms.sizes(name)[dimension]

    def place_concatenations(self) -> None:
        """Place the largest concatenation first, so that smaller ones it extends become subbuffers of it."""
        concatenations = [node for node in self.graph if Concatenate.matches(node)]
        for node in sorted(concatenations, key=lambda node: -self.forms[node.name].elements):
            members, dimension = self._members_of(node), node.attributes["dimension"]
            if not members:
                continue
            names = self._merge_adjacent(members, dimension)
            run = None if node.name in self.within else self._find_run(names, dimension)
            if run is not None:
                self.within[node.name] = run
                self.runs.add(node.name)
            else:
                self._place_members(node, names, dimension)

    def _merge_adjacent(self, names: Sequence[str], dimension: int) -> list[str]:
        """Replace adjacent slices that together cover all of a value by that value."""
        found: list[str] = []
        at = 0
        while at < len(names):
            span = self.within.get(names[at])
            end, reached = at, 0
            while span and end < len(names) and self.within.get(names[end]) == replace(span, first=reached):
                reached += self.forms[names[end]].shape[dimension]
                end += 1
            if span and span.dimension == dimension:
                parent = self.forms[span.parent].shape[dimension]
                if reached == parent:
                    found.append(span.parent)
                    at = end
                    continue
            found.append(names[at])
            at += 1
        return found

    def _find_run(self, names: Sequence[str], dimension: int) -> _Slice | None:
        """Return the slice where these values are already adjacent, in this order, or None."""
        for parent, members in self.members.items():
            if self.graph.nodes[parent].attributes["dimension"] != dimension:
                continue
            for start in range(len(members) - len(names) + 1):
                if members[start : start + len(names)] == list(names):
                    first = sum(self._length(name, dimension) for name in members[:start])
                    return _Slice(parent, dimension, first)
        return None

    def _place_members(self, node: Node, names: Sequence[str], dimension: int) -> None:
        """Make every member, or a copy of it, a subbuffer of the concatenation."""
        self.members[node.name] = list(names)
        first, inputs = 0, {}
        for number, name in enumerate(names):
            span, length = _Slice(node.name, dimension, first), self._length(name, dimension)
            first += length
            if self._is_expanded(name, node) or not self._fits(name, span):
                whole = self.forms[node.name]
                shape = (*whole.shape[:dimension], length, *whole.shape[dimension + 1 :])
                name = self._insert_copy(name, replace(whole, shape=shape, pitch=0))
                self._copies.add(name)
            self.within[name] = span
            inputs[f"x{number}"] = name
        self.graph.nodes[node.name] = replace(self.graph.nodes[node.name], inputs=inputs)

    def fuse_copies(self) -> None:
        """Let each concatenation copy its own members with one kernel, unless a run of them is read before it."""
        for name in self.members:
            node = self.graph.nodes[name]
            copies = {role: value for role, value in node.inputs.items() if value in self._copies}
            is_read_before = any(self.within[run].parent == name for run in self.runs)
            if not copies or is_read_before or not self._choices.of(node).is_copy:
                continue
            sources = {role: self.graph.nodes[copy].inputs["x0"] for role, copy in copies.items()}
            fused = node.with_inputs(**sources).with_attributes(moved=tuple(copies))
            if not self._choices.is_copy_at_offsets(fused):  # as in typed graphs, if a member is a constant
                continue
            for copy in copies.values():
                del self.graph.nodes[copy], self.within[copy]
            self.graph.nodes[name] = fused
            self.fused_copies.add(name)

    def _fits(self, name: str, span: _Slice) -> bool:
        """Return True if the producer of a value and all its readers accept it at this location."""
        producer = self.graph.nodes.get(name)
        if producer is None or name in self.within:
            return False
        if operator_of(producer).is_alias(producer, self._lowering_forms):
            return False
        self.within[name] = span
        subbuffer = self.subbuffer(name)
        del self.within[name]
        if name in self.members:  # `copy_for_refusing_readers` handles its readers
            return True
        readers = self.graph.readers(name)
        return self._accepts(producer, RESULT, name, subbuffer) and all(
            self._accepts(reader, role, name, subbuffer)
            for reader in readers
            for role, value in reader.inputs.items()
            if value == name
        )

    def _accepts(self, node: Node, role: str, name: str, subbuffer: Subbuffer) -> bool:
        """Return True if a node can read or write a value at this location."""
        if role != RESULT and (Concatenate.matches(node) or Slice.matches(node)):
            return True  # these become subbuffers or copies, which accept any location
        if role != RESULT and side_buffer_of(node) is not None:
            return True  # its producer reads the same value
        if not subbuffer.pitch and not subbuffer.offset:
            return True
        size = self.forms[name].dtype.itemsize
        if any(number * size % VECTOR_BYTES for number in (subbuffer.offset, subbuffer.pitch)):
            return self._choices.accepts_misaligned(node) and (
                not subbuffer.pitch or self._choices.accepts_pitch(node, role, subbuffer.pitch)
            )
        if not subbuffer.pitch:
            return True
        return self._choices.accepts_pitch(node, role, subbuffer.pitch)

    def _insert_copy(self, name: str, form: Form) -> str:
        """Insert a copy of a value in this form right after its producer, and return its name."""
        copy = self._new_copy(name, form)
        order = [] if name in self.graph.nodes else [copy]
        for node in self.graph:
            order += [node, copy] if node.name == name else [node]
        self.graph.arrange(order)
        return copy.name

    def _new_copy(self, name: str, form: Form) -> Node:
        copy = Move.copy_of(self.graph.fresh(f"{name}_part"), name, form)
        self.forms[copy.name] = form
        self._lowering_forms.add(copy.name, form)
        return copy

    def copy_for_refusing_readers(self) -> None:
        """Give readers that do not accept a subbuffer a dense copy of it."""
        for name in list(self.within):
            subbuffer = self.subbuffer(name)
            if not subbuffer.pitch and not subbuffer.offset:
                continue
            refusing = {
                (reader.name, role)
                for reader in self.graph.readers(name)
                for role, value in reader.inputs.items()
                if value == name and not self._accepts(reader, role, name, subbuffer)
            }
            if not refusing:
                continue
            copy = self._new_copy(name, replace(self.forms[name], pitch=0))
            readers = {reader for reader, _ in refusing}
            self.graph.insert_before(next(one.name for one in self.graph if one.name in readers), copy)
            for reader, role in refusing:
                self.graph.nodes[reader] = self.graph.nodes[reader].with_inputs(**{role: copy.name})


def can_slice_in_place(node: Node, forms: Mapping[str, Form]) -> bool:
    """Return True if a slice of a dense value starts and continues at vector-aligned addresses."""
    if not Slice.matches(node) or not _can_be_subbuffer(node, forms):
        return False
    parent, dimension, first = forms[node.inputs["x"]], node.attributes["dimension"], node.attributes["first"]
    if dimension != parent.order[-1]:
        inner = parent.order[parent.order.index(dimension) + 1 :]
        steps = [first * prod(parent.shape[d] for d in inner)]
    else:
        steps = [first, parent.row]
    return not any(step * parent.dtype.itemsize % VECTOR_BYTES for step in steps)


def _can_be_subbuffer(node: Node, forms: Mapping[str, Form]) -> bool:
    """Return True if a slice has its source's dtype and layout, and offset and pitch can describe it."""
    parent, own = forms[node.inputs["x"]], forms[node.name]
    has_same_form = (parent.dtype, parent.layout) == (own.dtype, own.layout)
    return has_same_form and _is_contiguous_slice(parent, node.attributes["dimension"])


def _is_contiguous_slice(parent: Form, dimension: int) -> bool:
    """Return True if a slice along `dimension` is one block of memory or equally spaced rows."""
    order = parent.order
    return dimension == order[-1] or prod(parent.shape[d] for d in order[: order.index(dimension)]) == 1
