"""Removal of casts: a model's own casts to 16 bits, and those that autocast adds to a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph, Input, Node, dtype_name
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import is_rounding
from escalade.engine.nodes.mlp import MlpBackward
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.side_outputs import readers_of, side_outputs_of
from escalade.engine.nodes.views import Permute, Reshape, Slice
from escalade.engine.passes.gradient_patterns import cast_source


@dataclass(frozen=True)
class Cast:
    """An input that holds another input's values in a different dtype."""

    name: str
    source: str
    dtype: torch.dtype


def lift_casts(graph: Graph) -> list[Cast]:
    """Turn casts of inputs into inputs, so that the caller can do all casts in one kernel."""
    inputs = {entry.name for entry in graph.inputs}
    casts: dict[tuple[str, str], Cast] = {}
    for node in graph:
        source = cast_source(node, graph)
        if source is None or source not in inputs or node.name in graph.outputs:
            continue
        cast = casts.setdefault((source, node.dtype), Cast(node.name, source, getattr(torch, node.dtype)))
        graph.remove(node, instead=cast.name)
        if cast.name == node.name:
            graph.inputs = (*graph.inputs, Input(node.name, node.shape, node.dtype))
    return list(casts.values())


def drop_output_casts(graph: Graph, indices: range) -> None:
    """Replace casts among the outputs with these indices by their sources."""
    outputs, types = list(graph.outputs), list(graph.output_types)
    for index in indices:
        node = graph.nodes.get(outputs[index])
        source = cast_source(node, graph)
        if source is not None and source in graph.nodes:
            outputs[index], types[index] = source, graph.nodes[source].dtype
    graph.outputs, graph.output_types = tuple(outputs), tuple(types)
    graph.remove_dead_code()


def drop_rounding(graph: Graph, dtype: str) -> None:
    """Remove the model's casts to 16 bits where the plan rounds anyway.

    A 16-bit plan rounds every value; any plan converts a value that is only returned to the model's dtype.
    """
    types = dict(zip(graph.outputs, graph.output_types, strict=True))
    for node in graph:
        if not is_rounding(node, graph):
            continue
        source = next(iter(node.inputs.values()))
        is_only_returned = types.get(node.name) == node.dtype and not graph.readers(node.name)
        is_rounded = STORAGE[dtype].itemsize == 2 or is_only_returned
        if is_rounded and graph.dtype_of(source) is not torch.float64:
            graph.remove(node, instead=source)


def narrow_autocast_layers(graph: Graph) -> None:
    """Remove autocast's casts to fp32 before a layer and back after it: its kernel computes in fp32 anyway."""
    for node in graph:
        operator = operator_of(node)
        if not operator.computes_in_fp32 or node.name in graph.outputs or not node.inputs:
            continue
        # Parameters of layers that mix dtypes stay fp32.
        roles = [role for role in node.inputs if not operator.mixes_types or role in operator.values]
        sources = {role: cast_source(graph.nodes.get(node.inputs[role]), graph) for role in roles}
        readers = readers_of(node, graph)
        types = {graph.dtype_of(name) if name is not None else None for name in sources.values()}
        types |= {graph.dtype_of(reader.name) if cast_source(reader, graph) else None for reader in readers}
        (narrow,) = types if len(types) == 1 else (None,)
        is_returned = any(reader.name in graph.outputs for reader in readers)
        if narrow not in (torch.float16, torch.bfloat16) or is_returned:
            continue
        dtype = dtype_name(narrow)
        for side_output in side_outputs_of(node, graph):
            graph.nodes[side_output.name] = side_output.with_inputs(**sources)
        graph.nodes[node.name] = replace(node.with_inputs(**sources), dtype=dtype)
        for reader in readers:
            graph.remove(reader, instead=node.name)
    graph.remove_dead_code()


def fuse_casts(graph: Graph) -> None:
    """Fuse casts into the layers before and after them, also through moves: these then move fewer bytes."""
    for node in graph:
        fuse_casts_of(graph, node)
    graph.remove_dead_code()


def fuse_casts_of(graph: Graph, node: Node) -> None:
    """Fuse the casts of a node's operands and of its result into it, if its kernels can compute them."""
    operator = operator_of(node)
    if operator.takes_casts:
        for role in operator.values:
            if role in node.inputs:
                _read_uncast(graph, graph.nodes[node.name], role)
        _write_cast(graph, graph.nodes[node.name])


def _read_uncast(graph: Graph, node: Node, role: str) -> None:
    """Let a node read the 16-bit source of an operand that is cast to fp32; moves behind the cast must be its own."""
    moves: list[Node] = []
    readers = {node.name, *(one.name for one in side_outputs_of(node, graph))}
    value = graph.nodes.get(node.inputs[role])
    while value is not None and cast_source(value, graph) is None:
        is_shared = value.name in graph.outputs or any(
            one.name not in readers for one in graph.readers(value.name)
        )
        if is_shared or not _is_move(value):
            return
        moves.append(value)
        readers = {value.name}
        (moved,) = value.inputs.values()
        value = graph.nodes.get(moved)
    source = cast_source(value, graph)
    if source is None or graph.dtype_of(source).itemsize != 2:
        return
    if not moves:
        for one in (node, *side_outputs_of(node, graph)):
            graph.nodes[one.name] = one.with_inputs(**{role: source})
        return
    graph.nodes[moves[-1].name] = moves[-1].with_inputs(**dict.fromkeys(moves[-1].inputs, source))
    for move in moves:
        graph.nodes[move.name] = replace(graph.nodes[move.name], dtype=dtype_name(graph.dtype_of(source)))


def _write_cast(graph: Graph, node: Node) -> None:
    """Let a node write its result in 16 bits if all readers, also those behind moves, cast it to that dtype."""
    moved, readers = _views_and_readers(graph, node, _is_move)
    names = {one.name for one in (*moved, *readers)}
    types = {graph.dtype_of(one.name) if cast_source(one, graph) else None for one in readers}
    (dtype,) = types if len(types) == 1 else (None,)
    if dtype is None or dtype.itemsize != 2 or not names.isdisjoint(graph.outputs):
        return
    for one in moved:
        graph.nodes[one.name] = replace(one, dtype=dtype_name(dtype))
    for cast in readers:
        graph.remove(cast, instead=cast.inputs["x"])


def _is_move(node: Node) -> bool:
    return any(kind.matches(node) for kind in (Reshape, Permute, Slice)) or node.calls in ("roll", "flip")


def widen_mlp_gradients(graph: Graph) -> None:
    """Keep gradients in fp32 that autograd rounds to the dtype of autocast and widens again."""
    for node in graph:
        if not MlpBackward.matches(node):
            continue
        for cast in graph.readers(node.name):
            if cast_source(cast, graph) is not None:
                _read_unrounded(graph, node, cast)
    graph.remove_dead_code()


def _read_unrounded(graph: Graph, node: Node, cast: Node) -> None:
    """Let slices of a rounded result read the result itself, if they are only used in fp32."""
    slices = graph.readers(cast.name)
    if cast.name in graph.outputs or not all(Slice.matches(one) for one in slices):
        return
    for one in slices:
        views, readers = _views_and_readers(graph, one, Reshape.matches)
        if not all(Pointwise.matches(reader) and reader.dtype == node.dtype for reader in readers):
            continue
        for view in views:
            graph.nodes[view.name] = replace(view, dtype=node.dtype)
        graph.nodes[one.name] = graph.nodes[one.name].with_inputs(x=node.name)
        names = {view.name for view in views}
        graph.output_types = tuple(
            node.dtype if name in names else dtype
            for name, dtype in zip(graph.outputs, graph.output_types, strict=True)
        )
        for reader in readers:
            source = cast_source(reader, graph)
            if source in names and reader.name not in graph.outputs:
                graph.remove(reader, instead=source)


def _views_and_readers(
    graph: Graph, value: Node, is_view: Callable[[Node], bool]
) -> tuple[list[Node], list[Node]]:
    """Return a node with all views of its result, and the remaining readers of these, without its side outputs."""
    views: list[Node] = [value]
    readers: list[Node] = []
    for view in views:
        for reader in readers_of(view, graph):
            (views if is_view(reader) else readers).append(reader)
    return views, readers
