"""Training steps: gradients of slices, and writes to slices, as one node that moves elements.

Autograd pads the gradient of a slice with zeros, once per dimension, and adds the gradients of all slices of a value.
Slices that do not overlap, such as those of patch merging, are parts of one result instead. A range of rows and columns
of an image is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.graph import Graph, Node, dtype_name
from escalade.engine.nodes.aten import fill_value
from escalade.engine.nodes.base import AtenCall
from escalade.engine.nodes.movement import Box, SliceScatter
from escalade.engine.nodes.rearrange import Pad2d
from escalade.engine.nodes.views import Slice
from escalade.engine.passes.stacks import resolve_scatters, sum_terms, summed, view
from escalade.ops.base.dtypes import NAMES
from escalade.ops.copy import MOST_PARTS

_IMAGE_RANK = 4


@dataclass(frozen=True)
class _Part:
    """A value that is stored at a box of another one; it may lack dimensions in which the box has one index."""

    source: str
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.box))


def scatter_slices(graph: Graph) -> None:
    """Turn gradients of slices, and writes to slices, into padding or into one copy of all parts."""
    resolve_scatters(graph)
    _join_sums(graph)
    for name in reversed(tuple(graph.nodes)):  # the outermost dimension first: it includes the others
        node = graph.nodes.get(name)
        part = None if node is None else _gradient_of_slice(graph, node)
        if node is not None and part is not None:
            _place(graph, node, part)
    for node in graph:
        _write_slice(graph, node)
    graph.remove_dead_code()


def _join_sums(graph: Graph) -> None:
    """Make the gradients of slices that do not overlap parts of one value, instead of a sum of padded ones."""
    for name in reversed(tuple(graph.nodes)):
        node = graph.nodes.get(name)
        terms = [] if node is None or name in graph.outputs else sum_terms(graph, node)
        found = {term: _gradient_of_slice(graph, graph.nodes[term]) for term in terms if term in graph.nodes}
        parts = {term: part for term, part in found.items() if part is not None}
        if node is None or any(dtype_name(graph.dtype_of(term)) != node.dtype for term in terms):
            continue
        if len({*terms}) < len(terms):  # one of them is added twice
            continue
        groups: list[dict[str, _Part]] = []
        for term, part in parts.items():
            fitting = (one for one in groups if all(_are_disjoint(part, other) for other in one.values()))
            group = next(fitting, None)
            if group is None:
                groups.append(group := {})
            group[term] = part
        joined = [group for group in groups if 1 < len(group) < MOST_PARTS]
        if not joined:
            continue
        rest = [term for term in terms if not any(term in group for group in joined)]
        whole = [_scattered(graph, node, None, list(group.values())) for group in joined]
        graph.remove(node, instead=summed(graph, node, [*whole, *rest], node.shape))
        graph.remove_dead_code()


def _are_disjoint(part: _Part, other: _Part) -> bool:
    return any(not {*one} & {*two} for one, two in zip(part.box, other.box, strict=True))


def _gradient_of_slice(graph: Graph, node: Node) -> _Part | None:
    """Return what a node pads with zeros, through further such nodes that only it reads, and where it is."""
    part = None
    current: Node | None = node
    while current is not None and (inner := _padded_once(graph, current)) is not None:
        box = inner.box
        if part is not None:
            if len(box) != len(part.box):
                break
            box = tuple(
                outer[one.start : one.stop : one.step] for outer, one in zip(part.box, box, strict=True)
            )
        part = _Part(inner.source, box)
        current = graph.nodes.get(inner.source)
        if current is not None and (graph.only_user(current.name) is None or current.dtype != node.dtype):
            break
    return part


def _padded_once(graph: Graph, node: Node) -> _Part | None:
    if node.calls not in ("slice_backward", "select_backward") or getattr(torch, node.dtype) not in NAMES:
        return None
    call = AtenCall(node)
    source = call.value("grad_output")
    if source is None or dtype_name(graph.dtype_of(source)) != node.dtype:
        return None
    return _part_of(source, node, call)


def _part_of(source: str, node: Node, call: AtenCall) -> _Part | None:
    """Return the part of a node's result that a call selects along `dim`, by `index` or `start`, `end` and `step`."""
    dimension, sizes = call("dim", 0), node.shape
    if not isinstance(dimension, int) or not all(isinstance(size, int) for size in sizes):
        return None
    whole = [range(size) for size in sizes]  # type: ignore[arg-type]
    along = whole[dimension]
    if node.calls.startswith("select"):
        index = call("index", 0)
        chosen = along[index:][:1]
    else:
        chosen = along[call("start") : call("end") : call("step", 1)]
    if not chosen:
        return None
    whole[dimension] = chosen
    return _Part(source, tuple(whole))


def _place(graph: Graph, node: Node, part: _Part) -> None:
    """Replace a node by a part of its result, padded with zeros."""
    if part.shape == node.shape:
        graph.remove(node, instead=view(graph, node, part.source, node.shape))
        return
    is_range = all(one.step == 1 or len(one) == 1 for one in part.box)
    if len(node.shape) == _IMAGE_RANK and part.shape[:2] == node.shape[:2] and is_range:
        source = view(graph, node, part.source, part.shape)
        sides = zip(part.box[2:], node.shape[2:], strict=True)
        pads = tuple(pad for one, size in sides for pad in (one[0], size - one[-1] - 1))  # type: ignore[operator]
        graph.nodes[node.name] = Pad2d.instead_of(node, {"x": source}, pads=pads, mode="constant", value=0.0)
        return
    graph.remove(node, instead=_scattered(graph, node, None, [part]))


def _scattered(graph: Graph, before: Node, base: str | None, parts: Sequence[_Part]) -> str:
    """Return a value of a node's shape with these parts; without a base, the rest is zeros."""
    inputs = {"x0": base or _row(graph, before, 0.0)}
    for number, part in enumerate(parts, 1):
        constant = graph.constants.get(part.source)
        inputs[f"x{number}"] = (
            view(graph, before, part.source, part.shape)
            if constant is None
            else _row(graph, before, constant.flatten()[0].item())
        )
    rows = tuple(role for role, name in inputs.items() if name in graph.constants)
    attributes = {"boxes": tuple(part.box for part in parts), "rows": rows}
    made = SliceScatter.node(f"{before.name}_parts", inputs, attributes, before.shape, before.dtype)
    return graph.add(replace(made, source=before.source), before=before.name)


def _row(graph: Graph, before: Node, number: float) -> str:
    """Return a row of one number, as long as the longest dimension of a node."""
    row = torch.full((max(before.shape),), number, dtype=getattr(torch, before.dtype))  # type: ignore[type-var,arg-type]
    return graph.add_constant(f"{before.name}_row", row)


def _write_slice(graph: Graph, node: Node) -> None:
    """Replace a write to a slice of a copy of a value, and one into that slice's own slice."""
    if node.calls not in ("slice_scatter", "select_scatter") or not node.is_floating or 0 in node.shape:
        return
    call = AtenCall(node)
    base, source = call.value("self"), call.value("src")
    if (
        base is None
        or source is None
        or {dtype_name(graph.dtype_of(one)) for one in (base, source)} != {node.dtype}
    ):
        return
    part = _part_of(source, node, call)
    filled = fill_value(base, graph) if base not in graph.constants else _only_number(graph.constants[base])
    is_varied = source in graph.constants and _only_number(graph.constants[source]) is None
    if part is None or is_varied or (base in graph.constants and filled != 0):
        return
    inner = graph.nodes.get(source)
    if (
        SliceScatter.matches(inner)
        and len(inner.attributes["boxes"]) == 1
        and _reads(graph, inner, base, part)
    ):
        (box,) = inner.attributes["boxes"]
        box = tuple(outer[one.start : one.stop : one.step] for outer, one in zip(part.box, box, strict=True))
        part = _Part(inner.inputs["x1"], box)
    graph.remove(node, instead=_scattered(graph, node, None if filled == 0 else base, [part]))


def _only_number(constant: torch.Tensor) -> float | None:
    """Return the number that all elements of a constant are."""
    numbers = constant.flatten()
    return numbers[0].item() if numbers.numel() and bool((numbers == numbers[0]).all()) else None


def _reads(graph: Graph, inner: Node, base: str, part: _Part) -> bool:
    """Return True if a scatter's own base is this part of the outer one's base."""
    read = graph.nodes.get(inner.inputs["x0"])
    if not Slice.matches(read) or read.inputs["x"] != base:
        return False
    dimension, first = read.attributes["dimension"], read.attributes["first"]
    length = read.shape[dimension]
    return part.shape == read.shape and part.box[dimension] == range(first, first + length)
