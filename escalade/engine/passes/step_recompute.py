"""Training steps: recompute activations in backward kernels that read the activations' inputs anyway.

The gradient of a batch normalization reads x, so its kernel can also write relu(norm(x)) again, for the price of one
write. The buffer of the forward pass is then free after its last forward reader. Weight gradients read the second copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import is_random
from escalade.engine.nodes.base import activation_of
from escalade.engine.nodes.batch_norm import RECOMPUTED, BatchNorm, BatchNormBackward, BatchNormTraining
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.side_outputs import (
    SideOutput,
    replace_producer,
    side_buffer_of,
    side_outputs_of,
    with_producer,
)
from escalade.engine.nodes.views import Concatenate, Slice
from escalade.engine.passes.estimates import Estimates, assumed_forms
from escalade.engine.passes.gradient_patterns import depends_on, sort_nodes
from escalade.engine.passes.pointwise import has_room, with_result

ENOUGH = 0.75
"""Fraction of the peak at which recomputation stops: below it, time is worth more than memory."""
MOST_TIME = 0.02
"""Time budget for recomputation, relative to the DRAM time of all values; a real step takes longer than that time."""


@dataclass(frozen=True)
class Span:
    """Bytes that are live from node `first` through node `last`."""

    first: int
    last: int
    bytes: int


@dataclass(frozen=True)
class Candidate:
    """A value that may be freed after node `early`, because it is recomputed before its next reader."""

    name: str
    bytes: int
    early: int
    end: int
    """The first node after `early` at which the value is live again, or was dead already."""
    extended: tuple[Span, ...]
    """Live ranges that recomputation adds. A span excludes its first node, where the bytes are live anyway."""
    us: float
    """Estimated time to recompute the value."""
    host: str = ""
    """The node whose kernel writes the value as a side output; empty: a second copy of the value's own node."""

    def apply(self, live: list[int]) -> None:
        """Update the live bytes per node as if the value were recomputed."""
        for place in range(self.early + 1, self.end):
            live[place] -= self.bytes
        for span in self.extended:
            for place in range(span.first + 1, span.last + 1):
                live[place] += span.bytes

    def saves_at(self, place: int) -> int:
        if not self.early < place < self.end:
            return 0
        return self.bytes - sum(span.bytes for span in self.extended if span.first < place <= span.last)


def choose(live: list[int], left: list[Candidate], most_bytes: float, most_us: float) -> Iterator[Candidate]:
    """Yield candidates until at most `most_bytes` are live; the most bytes saved at the peak per microsecond first.

    `live` is updated per candidate. Between candidates the caller may remove others from `left`.
    """
    while max(live) > most_bytes:
        peak = live.index(max(live))
        useful = [one for one in left if one.saves_at(peak) > 0 and one.us <= most_us]
        if not useful:
            return
        best = max(useful, key=lambda one: (one.saves_at(peak) / one.us, one.name))
        best.apply(live)
        most_us -= best.us
        left.remove(best)
        yield best


def recompute_in_gradients(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Recompute activations in gradient kernels until the peak falls to `ENOUGH` or the time budget is spent."""
    forms = assumed_forms(graph, dtype)
    spans = _spans(graph, forms)
    live = [0] * (len(graph.nodes) + 1)
    for span in spans.values():
        for place in range(max(span.first, 0), span.last + 1):
            live[place] += span.bytes
    card = estimates.card
    moved = sum(
        forms.value(name).bytes
        for node in graph
        for name in {node.name, *node.inputs.values()}
        if name not in graph.constants
    )
    left = list(fused_candidates(graph, spans, card.transfer_us))
    chosen = list(choose(live, left, ENOUGH * max(live), MOST_TIME * moved / card.rates.dram))
    for candidate in chosen:
        write_again(graph, candidate)
    graph.remove_dead_code()  # views that nothing reads any more would keep their sources alive


def _spans(graph: Graph, forms: Forms) -> dict[str, Span]:
    """Return the live range of each buffer; a concatenation and its members count as one buffer."""
    places = {node.name: place for place, node in enumerate(graph)}
    owner: dict[str, str] = {}
    for node in graph:
        if Slice.matches(node) or operator_of(node).is_alias(node, forms):
            owner[node.name] = node.inputs["x"]
        elif Concatenate.matches(node):
            owner |= {
                name: node.name for name in node.inputs.values() if name in places and name not in owner
            }

    def root(name: str) -> str:
        while name in owner:
            name = owner[name]
        return name

    found: dict[str, Span] = {}
    for place, node in enumerate(graph):
        producer = side_buffer_of(node)
        first = place if producer is None else places[producer.node]
        last = len(places) if node.name in graph.outputs else place
        for name, begin, end in (
            (node.name, first, last),
            *((one, place, place) for one in node.inputs.values()),
        ):
            home = root(name)
            if home not in places:
                continue
            span = found.get(home) or Span(begin, end, forms.value(home).bytes)
            found[home] = replace(span, first=min(span.first, begin), last=max(span.last, end))
    return found


def fused_candidates(
    graph: Graph,
    spans: Mapping[str, Span],
    time: Callable[[int], float],
    places: Mapping[str, int] | None = None,
) -> Iterator[Candidate]:
    """Yield the values that the kernel of a later node can recompute; `time` estimates the cost of writing bytes."""
    places = places or {node.name: place for place, node in enumerate(graph)}
    for node in graph:
        own = spans.get(node.name)
        if own is None or node.name in graph.outputs or not _is_computable(node, graph):
            continue
        early, waiting = _last_readers(node, graph, places)
        hosts = sorted(
            (one for one in _hosts(node, graph) if places[one.name] > early), key=lambda one: places[one.name]
        )
        host = next((one for one in hosts if _can_wait(waiting, one, graph, places)), None)
        if host is None:
            continue
        at = places[host.name]
        extended = [Span(at - 1, at, own.bytes)] if at > own.last else []
        read = {_viewed(name, graph) for one in waiting for name in one.inputs.values()}
        for name in sorted(read - {node.name}):
            other = spans.get(name)
            if other is not None and other.last < at:
                extended.append(Span(other.last, at, other.bytes))
        end = min(at, own.last + 1)
        yield Candidate(node.name, own.bytes, early, end, tuple(extended), time(own.bytes), host.name)


def _is_computable(node: Node, graph: Graph) -> bool:
    """Return True for normalizations without a residual, and for pointwise functions."""
    if not node.is_floating or is_random(node):
        return False
    if BatchNorm.matches(node) or BatchNormTraining.matches(node):
        return "residual" not in node.inputs and len(node.shape) == 4
    expression = operator_of(node).expression(node)
    return expression is not None and len(expression.results) == 1 and bool(expression.calls)


def _last_readers(node: Node, graph: Graph, places: Mapping[str, int]) -> tuple[int, list[Node]]:
    """Return the position before the longest gap between readers (views included), and the readers after the gap.

    The list is empty if nothing reads the value.
    """
    readers = sorted(_readers(node.name, graph), key=lambda one: places[one.name])
    uses = [places[node.name], *(places[one.name] for one in readers)]
    early, late = max(pairwise(uses), key=lambda pair: pair[1] - pair[0], default=(0, 0))
    return early, [one for one in readers if places[one.name] >= late]


def _readers(name: str, graph: Graph) -> Iterator[Node]:
    for one in graph.readers(name):
        if operator_of(one).is_view:
            yield from _readers(one.name, graph)
        elif side_buffer_of(one) is None:
            yield one


def _viewed(name: str, graph: Graph) -> str:
    """Return the value that a value is a view of."""
    while name in graph.nodes and operator_of(graph.nodes[name]).is_view:
        name = graph.nodes[name].inputs["x"]
    return name


def _hosts(node: Node, graph: Graph) -> Iterator[Node]:
    """Yield the nodes whose kernels read all inputs that a value is computed from."""
    is_norm = BatchNorm.matches(node) or BatchNormTraining.matches(node)
    large = [name for name in node.inputs.values() if graph.shape_of(name) == node.shape]
    if not large:
        return
    for host in graph.readers(node.inputs["x"] if is_norm else large[0]):
        if host.name == node.name or node.name in host.inputs.values():
            continue
        if (host.shape, host.dtype) != (node.shape, node.dtype):
            continue
        if is_norm and BatchNormBackward.matches(host):
            same = all(host.inputs[role] == node.inputs[role] for role in ("x", "weight"))
            if same and not host.attributes.get("recompute"):
                yield host
        reads_all = Pointwise.matches(host) and set(host.inputs.values()) >= set(large)
        if reads_all and not is_norm and has_room(host, node):
            yield host


def _can_wait(waiting: Collection[Node], host: Node, graph: Graph, places: Mapping[str, int]) -> bool:
    """Return True if a host can recompute a value for these readers, i.e. depends on none of them."""
    return bool(waiting) and not depends_on(host.name, [one.name for one in waiting], graph, places)


def write_again(graph: Graph, candidate: Candidate) -> None:
    """Make the value a side output of its host for its last readers, unless the host now depends on them."""
    node, host = graph.nodes[candidate.name], graph.nodes[candidate.host]
    places = {one.name: place for place, one in enumerate(graph)}
    _, waiting = _last_readers(node, graph, places)
    if not _can_wait(waiting, host, graph, places):
        return
    fused, buffer = _writing(node, host)
    replace_producer(graph, fused)
    name = graph.fresh(f"{node.name}_again")
    graph.append(SideOutput.of(fused, name, buffer, node.shape, node.dtype))
    _redirect(graph, node.name, name, {one.name for one in waiting})
    for one in waiting:
        for other in side_outputs_of(one, graph):
            graph.nodes[other.name] = with_producer(other, graph.nodes[one.name])
    sort_nodes(graph)


def _redirect(graph: Graph, old: str, new: str, waiting: Collection[str]) -> None:
    """Let these nodes read `new` instead of `old`; views in between are duplicated."""
    for one in graph.readers(old):
        if operator_of(one).is_view:
            if any(reader.name in waiting for reader in _readers(one.name, graph)):
                view = graph.add(replace(one.with_inputs(x=new), name=f"{one.name}_again"))
                _redirect(graph, one.name, view, waiting)
        elif one.name in waiting:
            inputs = {role: new if value == old else value for role, value in one.inputs.items()}
            graph.nodes[one.name] = replace(one, inputs=inputs)


def _writing(node: Node, host: Node) -> tuple[Node, str]:
    """Return the host with the value as a side output, and the name of that output's buffer."""
    if BatchNormBackward.matches(host):
        function = activation_of(node).text
        return host.with_inputs(bias=node.inputs["bias"]).with_attributes(recompute=function), RECOMPUTED
    return with_result(host, node)
