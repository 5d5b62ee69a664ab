"""Nodes that only move elements as problems of the operation that copies them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Operator, is_view_of
from escalade.engine.nodes.lowering import Forms, Lowered, Lying, Moved
from escalade.engine.nodes.signature import RESULT
from escalade.ops.copy import COPY, MOST_PARTS, CopyProblem, Part

SOURCES = tuple(f"x{number}" for number in range(MOST_PARTS))
"""The roles of what is moved."""
_BY_BYTES = {1: "uint8", 2: "fp16", 4: "fp32"}
"""What elements of so many bytes are moved as."""


def lower_moved(operator: Operator, node: Node, forms: Forms) -> Lowered | None:
    """The problem of a node whose inputs are x0, x1, …; None if it computes anything, or no kernel moves its type."""
    at_places = partial(_problem, operator, node, forms)
    problem = at_places({})
    return None if problem is None else Lowered(COPY, problem, at_places=at_places)


def _problem(operator: Operator, node: Node, forms: Forms, places: Mapping[str, Lying]) -> CopyProblem | None:
    """The problem over values that lie inside others, by role."""
    names = {**node.inputs, RESULT: node.name}
    if any(forms.is_constant(name) for name in names.values()):
        return None
    given = {
        role: replace(forms.value(name), pitch=places[role].pitch if role in places else 0)
        for role, name in names.items()
    }
    result = given.pop(RESULT)
    if not result.elements or any(form.dtype != result.dtype for form in given.values()):
        return None
    inputs = {role: form.meta_tensor() for role, form in given.items()}
    target = result.meta_tensor()
    moved = operator.moved(node, inputs, target)
    if moved is None:
        return None
    read = [role for role in given if any(is_view_of(one.source, inputs[role]) for one in moved)]
    aligned = math.gcd(*(places[role].first for role in (*read, RESULT) if role in places))
    room = ((result.rows - 1) * (result.pitch or result.row)) + result.row
    return problem_of(moved, inputs, room, result.dtype, aligned)


def problem_of(
    moved: Sequence[Moved],
    inputs: Mapping[str, torch.Tensor],
    room: int,
    dtype: torch.dtype,
    aligned: int = 0,
) -> CopyProblem | None:
    """The problem of what is moved from the memory of x0, x1, … to a result with so much room; None for types of more
    bytes than kernels move at once."""
    if dtype.itemsize not in _BY_BYTES:
        return None
    sources = {x.untyped_storage()._cdata: int(role.removeprefix("x")) for role, x in inputs.items()}
    parts = [_part(one, sources[one.source.untyped_storage()._cdata]) for one in moved]
    return CopyProblem.of(room, parts, _BY_BYTES[dtype.itemsize], aligned)


def _part(moved: Moved, source: int) -> Part:
    sizes, steps, first = (
        tuple(moved.source.shape),
        list(moved.source.stride()),
        int(moved.source.storage_offset()),
    )
    assert sizes == tuple(moved.target.shape), "what is moved has the sizes of where it goes"
    if moved.source.numel():
        for axis in moved.reversed:
            first += (sizes[axis] - 1) * steps[axis]
            steps[axis] = -steps[axis]
    return Part(source, sizes, tuple(steps), moved.target.stride(), first, int(moved.target.storage_offset()))
