"""Removal of stacks and of `slice_scatter`: readers use the stacked or scattered values directly.

Weighted branches of a network are often a reduction over a stacked dimension: `(stack(a, b) * softmax(w)).sum(1)`.
Channels that are split into groups, as in `x.view(batch, 2, channels, height, width).sum(1)`, are a stack of slices,
which stay in NHWC.

Functionalized in-place writes to a slice leave `slice_scatter` behind. `y = x[:, :16]; y += z` is captured as a sum, a
copy of x with the sum scattered over its first channels, and a slice of that copy. A read within the written range
reads the sum instead, a read outside of it reads x, and a read of both reads a concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeGuard

from escalade.engine.graph.graph import ATEN, Graph, Node, Reference, Shape, dtype_name
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import AtenCall, Operator
from escalade.engine.nodes.elementwise import Add
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.views import Concatenate, Permute, Reshape, Slice, concatenated_values

_COMBINE = {"sum": "x + a", "mean": "x + a", "amax": "maximum(x, a)", "amin": "minimum(x, a)"}
"""Expression that combines two items, by kind of the reduction."""
_MAX_ITEMS = 8  # items per stack that fit one expression
_ALIGNED = 8  # channels from slice to slice that are a whole number of 16-byte accesses in every dtype


def resolve_stacks(graph: Graph) -> None:
    """Replace sums, means and extrema over a stacked dimension by functions of the items."""
    for node in graph:
        if not Reduce.matches(node) or len(node.attributes["dims"]) != 1 or "before" in node.attributes:
            continue
        kind, (dim,) = node.attributes["kind"], node.attributes["dims"]
        if kind in _COMBINE and (count := _item_count(graph, node.inputs["x"], dim)):
            items = [_item(graph, node, node.inputs["x"], dim, index) for index in range(count)]
            _combine(graph, node, kind, items)
    graph.remove_dead_code()


def _item_count(graph: Graph, name: str, dim: int) -> int:
    """Return the number of items in a stack along `dim`, or a pointwise function of one; 0 for other values."""
    node = graph.nodes.get(name)
    if node is None or not node.is_floating:
        return 0
    stacked = _stacked(graph, node)
    if stacked is not None:
        items, dimension = stacked
        same_dtype = {dtype_name(graph.dtype_of(item)) for item in items} == {node.dtype}
        return len(items) if same_dtype and dimension == dim and 1 < len(items) <= _MAX_ITEMS else 0
    if Reshape.matches(node):
        count = node.shape[dim]
        return count if isinstance(count, int) and count <= _MAX_ITEMS and _is_split(graph, node, dim) else 0
    if operator_of(node).expression(node) is None or name in graph.constants:
        return 0
    counts = []
    for value in node.inputs.values():
        shape = graph.shape_of(value)
        if len(shape) != len(node.shape) or value in graph.constants:
            return 0
        counts.append(_item_count(graph, value, dim))
    result = max(counts, default=0)
    return result if node.shape[dim] == result else 0


def _is_split(graph: Graph, node: Node, dim: int) -> bool:
    """Return True if a reshape only splits a dimension of its operand into `dim` and the next, in aligned slices."""
    if graph.shape_of(node.inputs["x"]) != _merged_shape(node.shape, dim):
        return False
    length = node.shape[dim + 1]
    return dim > 0 and isinstance(length, int) and length % _ALIGNED == 0


def _merged_shape(shape: Shape, dim: int) -> Shape | None:
    """Return the shape with `dim` and the next dimension merged; None if there is none, or one depends on the batch."""
    both = shape[dim : dim + 2]
    if len(both) < 2 or not all(isinstance(size, int) for size in both):
        return None
    return (*shape[:dim], math.prod(both), *shape[dim + 2 :])  # type: ignore[arg-type]


def _stacked(graph: Graph, node: Node) -> tuple[list[str], int] | None:
    """Return the items of a stack, or of a concatenation of values with a new dimension, and that dimension."""
    if Concatenate.matches(node):
        dim = node.attributes["dimension"]
        parts = [graph.nodes.get(name) for name in concatenated_values(node)]
        items = [
            part.inputs["x"]
            for part in parts
            if Reshape.matches(part)
            and part.shape[dim] == 1
            and graph.shape_of(part.inputs["x"]) == _drop_dim(node.shape, dim)
        ]
        return (items, dim) if len(items) == len(parts) else None
    if node.calls != "stack":
        return None
    call = AtenCall(node)
    tensors, dim = call("tensors", ()), call("dim", 0)
    if not isinstance(dim, int) or not all(isinstance(tensor, Reference) for tensor in tensors):
        return None
    return [node.inputs[tensor.role] for tensor in tensors], dim % len(node.shape)


def _item(graph: Graph, before: Node, name: str, dim: int, index: int) -> str:
    """Return an item of a value along `dim`, adding nodes before `before` if needed."""
    node = graph.nodes.get(name)
    stacked = None if node is None else _stacked(graph, node)
    if stacked is not None and stacked[1] == dim:
        return stacked[0][index]
    shape = graph.shape_of(name)
    is_expression = node is not None and operator_of(node).expression(node) is not None
    if node is not None and is_expression and _item_count(graph, name, dim):
        inputs = {role: _item(graph, before, value, dim, index) for role, value in node.inputs.items()}
        item = replace(node, name=f"{name}_{index}", inputs=inputs, shape=_drop_dim(shape, dim))
        return graph.add(item, before=before.name)
    dtype = dtype_name(graph.dtype_of(name))

    def add(operator: type[Operator], value: str, shape: Shape, **attributes: int) -> str:
        made = operator.node(f"{name}_{index}", {"x": value}, attributes, shape, dtype)
        return graph.add(made, before=before.name)

    dropped, merged = _drop_dim(shape, dim), _merged_shape(shape, dim)
    if shape[dim] == 1:
        return add(Reshape, name, dropped)
    if merged is None or dim == 0:
        part = add(Slice, name, (*shape[:dim], 1, *shape[dim + 1 :]), dimension=dim, first=index)
        return add(Reshape, part, dropped)
    # A slice of the merged dimension is one of channels, or of rows: offset and pitch describe it.
    source = node.inputs["x"] if Reshape.matches(node) else name
    whole = source if graph.shape_of(source) == merged else add(Reshape, name, merged)
    length = dropped[dim]
    assert isinstance(length, int)
    return add(Slice, whole, dropped, dimension=dim, first=index * length)


def _drop_dim(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


def _combine(graph: Graph, node: Node, kind: str, items: list[str]) -> None:
    """Replace a reduction node by functions of the items."""
    shape = _drop_dim(graph.shape_of(node.inputs["x"]), node.attributes["dims"][0])

    def add(expression: str, **inputs: str) -> str:
        attributes = {"expression": expression}
        combined = Pointwise.node(f"{node.name}_of_items", inputs, attributes, shape, node.dtype)
        return graph.add(combined, before=node.name)

    result, *others = items
    for other in others:
        result = add(_COMBINE[kind], x=result, a=other)
    if kind == "mean":
        result = add(f"x / {len(items)}", x=result)
    if node.attributes["keepdim"] or node.name in graph.outputs:
        graph.nodes[node.name] = Reshape.instead_of(node, {"x": result})
    else:
        graph.remove(node, instead=result)


@dataclass(frozen=True)
class _SliceWrite:
    """A range in one dimension of `value` that `source` is written to."""

    value: str
    source: str
    dimension: int
    first: int
    end: int


def join_slices(graph: Graph) -> None:
    """Read adjacent slices of one value that are concatenated again as one slice, or as the whole value."""
    for node in graph:
        if not Concatenate.matches(node):
            continue
        dim, joined = node.attributes["dimension"], list[str]()
        for name in concatenated_values(node):
            before, part = graph.nodes.get(joined[-1]) if joined else None, graph.nodes.get(name)
            if before is None or part is None or not _is_behind(part, before, dim):
                joined.append(name)
                continue
            size = before.shape[dim] + part.shape[dim]
            whole, shape = before.inputs["x"], (*part.shape[:dim], size, *part.shape[dim + 1 :])
            if shape != graph.shape_of(whole):
                both = replace(before, name=f"{node.name}_slice", shape=shape)
                whole = graph.add(both, before=node.name)
            joined[-1] = whole
        if len(joined) == 1 and graph.shape_of(joined[0]) == node.shape and node.name not in graph.outputs:
            graph.remove(node, instead=joined[0])
        elif 1 < len(joined) < len(node.inputs):
            graph.nodes[node.name] = replace(node, inputs={f"x{n}": name for n, name in enumerate(joined)})


def _is_behind(part: Node, before: Node, dim: int) -> bool:
    """Return True for two slices of one value of which one starts where the other ends."""
    if not Slice.matches(part) or not Slice.matches(before) or part.inputs != before.inputs:
        return False
    end = before.attributes["first"] + before.shape[dim]
    return part.attributes == {"dimension": dim, "first": end} and before.attributes["dimension"] == dim


def resolve_scatters(graph: Graph) -> None:
    """Replace slice scatters by reads of their sources, or by concatenations."""
    for node in graph:
        write = _slice_write(graph, node)
        if write is not None and graph.shape_of(write.source) == node.shape:
            graph.remove(node, instead=write.source)
    for name in reversed(
        tuple(graph.nodes)
    ):  # last first: a later write may remove all reads of an earlier one
        write = _slice_write(graph, graph.nodes[name]) if name in graph.nodes else None
        if write is None:
            continue
        for reader in graph.users().get(name, []):
            _redirect_read(graph, reader, write)
        if graph.users().get(name) or name in graph.outputs:
            _to_concatenation(graph, graph.nodes[name], write)
        else:
            del graph.nodes[name]


def _slice_write(graph: Graph, node: Node) -> _SliceWrite | None:
    """Return the write of a contiguous range that a node makes to a copy of a value."""
    if node.calls != "slice_scatter" or not node.is_floating:
        return None
    call = AtenCall(node)
    value, source, dimension = call.value("self"), call.value("src"), call("dim", 0)
    if value is None or source is None or call("step", 1) != 1 or not isinstance(dimension, int):
        return None
    if graph.typed and dtype_name(graph.dtype_of(source)) != node.dtype:
        return None
    dimension %= len(node.shape)
    size, length, start = node.shape[dimension], graph.shape_of(source)[dimension], call("start", 0)
    if graph.shape_of(source) == node.shape:
        return _SliceWrite(value, source, dimension, 0, 0)
    if not (isinstance(size, int) and isinstance(length, int) and isinstance(start, int)):
        return None  # a range of the batch
    if {value, source} & graph.constants.keys():
        return None
    first = min(max(start + size if start < 0 else start, 0), size)
    return _SliceWrite(value, source, dimension, first, first + length)


def _redirect_read(graph: Graph, reader: Node, write: _SliceWrite) -> None:
    """Redirect a slice that is entirely inside or outside the written range to its source."""
    if not Slice.matches(reader) or reader.attributes["dimension"] != write.dimension:
        return
    first, length = reader.attributes["first"], reader.shape[write.dimension]
    assert isinstance(length, int)
    if first >= write.end or first + length <= write.first:
        graph.nodes[reader.name] = reader.with_inputs(x=write.value)
    elif write.first <= first and first + length <= write.end:
        if reader.shape == graph.shape_of(write.source):
            graph.remove(reader, instead=write.source)
        else:
            inside = reader.with_attributes(first=first - write.first)
            graph.nodes[reader.name] = inside.with_inputs(x=write.source)


def _to_concatenation(graph: Graph, node: Node, write: _SliceWrite) -> None:
    """Replace the write by a concatenation of the source and the unwritten rest of the value."""
    dimension = write.dimension
    size = node.shape[dimension]
    assert isinstance(size, int)
    parts = []
    for first, end in ((0, write.first), (write.first, write.end), (write.end, size)):
        if first == write.first and end == write.end:
            parts.append(write.source)
        elif end > first:
            shape = (*node.shape[:dimension], end - first, *node.shape[dimension + 1 :])
            attributes = {"dimension": dimension, "first": first}
            rest = Slice.node(f"{node.name}_rest", {"x": write.value}, attributes, shape, node.dtype)
            parts.append(graph.add(rest, before=node.name))
    inputs: dict[str, str | None] = {f"x{number}": part for number, part in enumerate(parts)}
    graph.nodes[node.name] = Concatenate.instead_of(node, inputs, dimension=dimension)


@dataclass(frozen=True)
class _PaddedGradient:
    """The gradient of the range from `first` to `end` in one dimension, padded with zeros to the whole value."""

    source: str
    dimension: int
    first: int
    end: int


def join_gradients(graph: Graph) -> None:
    """Concatenate the gradients of a value's parts, which autograd pads with zeros and adds.

    Then no zeros are written, and views of the whole become views of the parts.
    """
    for name in reversed(tuple(graph.nodes)):  # outermost sums first
        node = graph.nodes.get(name)
        if not _is_sum(node) or name in graph.outputs:
            continue
        terms = sum_terms(graph, node)
        if any(dtype_name(graph.dtype_of(term)) != node.dtype for term in terms):
            continue
        joined = _joined(graph, node, terms, node.shape)
        if joined is not None:
            graph.remove(node, instead=joined)
            graph.remove_dead_code()  # sums within this one
    for node in graph:
        if node.calls == "stack" and node.is_floating and node.name not in graph.outputs:
            _to_concatenated_items(graph, node)
    for node in graph:
        if Concatenate.matches(node):
            _join_views(graph, node)
    graph.remove_dead_code()


def _is_sum(node: Node | None) -> TypeGuard[Node]:
    return Add.matches(node) and not node.attributes["relu"]


def sum_terms(graph: Graph, node: Node) -> list[str]:
    """Return the values that a sum adds, including those of sums that only it reads; none for any other node."""
    if not _is_sum(node):
        return []
    terms = []
    for name in node.inputs.values():
        inner = graph.nodes.get(name)
        if _is_sum(inner) and inner.dtype == node.dtype and graph.only_user(name) is not None:
            terms += sum_terms(graph, inner)
        else:
            terms.append(name)
    return terms


def _joined(graph: Graph, before: Node, terms: Sequence[str], shape: Shape) -> str | None:
    """Return a sum of which the padded gradients are concatenated; None if there are none of different parts."""
    gradients = {name: _padded_gradient(graph, name, before.dtype) for name in terms}
    rest = [name for name in terms if gradients[name] is None]
    joined = []
    for dimension in dict.fromkeys(one.dimension for one in gradients.values() if one is not None):
        spans: dict[tuple[int, int], list[str]] = {}
        names = []
        for name in terms:
            if (one := gradients[name]) is not None and one.dimension == dimension:
                spans.setdefault((one.first, one.end), []).append(one.source)
                names.append(name)
        if len(names) > 1 and all(end <= first for (_, end), (first, _) in pairwise(sorted(spans))):
            joined.append(_concatenation(graph, before, shape, dimension, spans))
        else:
            rest += names
    return summed(graph, before, [*joined, *rest], shape) if joined else None


def _concatenation(
    graph: Graph, before: Node, shape: Shape, dimension: int, spans: Mapping[tuple[int, int], Sequence[str]]
) -> str:
    """Return the sum of gradients that are padded to disjoint ranges, given by these ranges."""
    size, reached, parts = shape[dimension], 0, list[str]()
    assert isinstance(size, int)
    for (first, end), sources in (*sorted(spans.items()), ((size, size), ())):
        if first > reached:
            gap = _with_size(shape, dimension, first - reached)
            parts.append(_zeros(graph, before, gap, like=next(iter(spans.values()))[0]))
        if end > first:
            part = _with_size(shape, dimension, end - first)
            terms = [view(graph, before, source, part) for source in sources]
            parts.append(_joined(graph, before, terms, part) or summed(graph, before, terms, part))
        reached = end
    if len(parts) == 1:
        return parts[0]
    inputs = {f"x{number}": part for number, part in enumerate(parts)}
    attributes = {"dimension": dimension}
    whole = Concatenate.node(f"{before.name}_parts", inputs, attributes, shape, before.dtype)
    return graph.add(whole, before=before.name)


def _with_size(shape: Shape, dimension: int, size: int) -> Shape:
    return (*shape[:dimension], size, *shape[dimension + 1 :])


def _zeros(graph: Graph, before: Node, shape: Shape, like: str) -> str:
    attributes = {"target": "aten::new_zeros", "arguments": {"self": Reference("in0"), "size": shape}}
    zeros = Node(f"{before.name}_zeros", ATEN, {"in0": like}, attributes, shape, before.dtype)
    return graph.add(zeros, before=before.name)


def summed(graph: Graph, before: Node, names: Sequence[str], shape: Shape) -> str:
    """Return a sum of values, adding nodes before `before`."""
    total, *others = names
    for other in others:
        inputs = {"x": total, "residual": other}
        added = Add.node(f"{before.name}_sum", inputs, {"relu": False}, shape, before.dtype)
        total = graph.add(added, before=before.name)
    return total


def _padded_gradient(graph: Graph, name: str, dtype: str) -> _PaddedGradient | None:
    """Return the gradient that a value of this dtype is, padded with zeros; None for any other value."""
    node = graph.nodes.get(name)
    if node is None or node.calls not in ("select_backward", "slice_backward") or node.dtype != dtype:
        return None
    call = AtenCall(node)
    source, dimension, sizes = call.value("grad_output"), call("dim", 0), node.shape
    if source is None or not isinstance(dimension, int) or dtype_name(graph.dtype_of(source)) != dtype:
        return None
    dimension %= len(sizes)
    size = sizes[dimension]
    is_item = node.calls == "select_backward"
    first = call("index" if is_item else "start", 0)
    length = 1 if is_item else graph.shape_of(source)[dimension]
    if not (isinstance(size, int) and isinstance(first, int) and isinstance(length, int)):
        return None
    if not length or call("step", 1) != 1:
        return None
    first = min(max(first + size if first < 0 else first, 0), size)
    return _PaddedGradient(source, dimension, first, first + length)


def view(graph: Graph, before: Node, name: str, shape: Shape) -> str:
    """Return a value in another shape, adding a node before `before` if needed."""
    while Reshape.matches(node := graph.nodes.get(name)) and "order" not in node.attributes:
        name = node.inputs["x"]
    if graph.shape_of(name) == shape:
        return name
    made = Reshape.node(f"{name}_view", {"x": name}, {}, shape, dtype_name(graph.dtype_of(name)))
    return graph.add(made, before=before.name)


def permuted(graph: Graph, before: Node, name: str, order: tuple[int, ...]) -> str:
    """Return a permutation of a value, adding nodes before `before` if needed."""
    sizes = graph.shape_of(name)
    shape = tuple(sizes[dim] for dim in order)
    kept = [dim for dim in order if sizes[dim] != 1]
    if kept == sorted(kept):
        return view(graph, before, name, shape)
    if Permute.matches(node := graph.nodes.get(name)):
        first = node.attributes["order"]
        return permuted(graph, before, node.inputs["x"], tuple(first[dim] for dim in order))
    made = Permute.node(
        f"{name}_moved", {"x": name}, {"order": order}, shape, dtype_name(graph.dtype_of(name))
    )
    return graph.add(made, before=before.name)


def _to_concatenated_items(graph: Graph, node: Node) -> None:
    """Replace a stack by a concatenation of its items with a new dimension."""
    stacked = _stacked(graph, node)
    names = stacked[0] if stacked is not None else []
    if stacked is None or len(names) < 2 or graph.constants.keys() & {*names}:
        return
    if {dtype_name(graph.dtype_of(name)) for name in names} != {node.dtype}:
        return
    shape = _with_size(node.shape, stacked[1], 1)
    items = {f"x{number}": view(graph, node, name, shape) for number, name in enumerate(names)}
    graph.nodes[node.name] = Concatenate.instead_of(node, items, dimension=stacked[1])


def _join_views(graph: Graph, node: Node) -> None:
    """Replace a permutation of a concatenation by a concatenation of permuted parts."""
    chain, dimensions = [node], [node.attributes["dimension"]]
    lengths = [graph.shape_of(name)[dimensions[0]] for name in concatenated_values(node)]
    while (reader := graph.only_user(chain[-1].name)) is not None:
        moved = _moved_dimension(reader, chain[-1].shape, dimensions[-1], lengths)
        if moved is None:
            break
        dimension, lengths = moved
        chain.append(reader)
        dimensions.append(dimension)
    if not any(map(Permute.matches, chain)):
        return
    *inner, last = chain
    parts = concatenated_values(node)
    own = [graph.shape_of(name)[dimensions[0]] for name in parts]
    for before, reader, dimension in zip(inner, chain[1:], dimensions[1:], strict=True):
        if Permute.matches(reader):
            parts = [permuted(graph, last, name, reader.attributes["order"]) for name in parts]
        else:
            _, own = _moved_dimension(reader, before.shape, dimensions[chain.index(before)], own) or (0, own)
            sizes = [_with_size(reader.shape, dimension, length) for length in own]
            parts = [view(graph, last, name, shape) for name, shape in zip(parts, sizes, strict=True)]
    inputs = {f"x{number}": part for number, part in enumerate(parts)}
    graph.nodes[last.name] = Concatenate.instead_of(last, inputs, dimension=dimensions[-1])


def _moved_dimension(
    reader: Node, shape: Shape, dimension: int, lengths: list[int]
) -> tuple[int, list[int]] | None:
    """Return the dimension, and the lengths in it, that parts have behind a view; None if they are torn apart."""
    if Permute.matches(reader):
        return reader.attributes["order"].index(dimension), lengths
    if not Reshape.matches(reader) or "order" in reader.attributes:
        return None
    outer = math.prod(shape[:dimension])  # type: ignore[arg-type]
    inner = math.prod(shape[dimension + 1 :])  # type: ignore[arg-type]
    for moved, size in enumerate(reader.shape):
        rest = math.prod(reader.shape[moved + 1 :])  # type: ignore[arg-type]
        if size == 1 or not rest or math.prod(reader.shape[:moved]) != outer:  # type: ignore[arg-type]
            continue
        if any(length * inner % rest for length in lengths):
            return None
        return moved, [length * inner // rest for length in lengths]
    return None
