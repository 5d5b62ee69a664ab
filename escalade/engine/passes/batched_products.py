"""Batched matrix products in the graph of a training step: their operands and readers behind views."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import AtenCall, is_view_of
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.views import Permute, Reshape
from escalade.engine.passes.gradient_patterns import cast_source
from escalade.engine.passes.stacks import permuted, view
from escalade.engine.passes.views import compose_permute

_SWAPPED = (0, 1, 3, 2)


class Matrix(NamedTuple):
    """An operand of a batched product: a value, or its transpose."""

    name: str
    transposed: bool

    @property
    def turned(self) -> Matrix:
        return Matrix(self.name, not self.transposed)


class Product(NamedTuple):
    """A batched product of a matrix, or of its transpose, and `rows`."""

    node: Node
    rows: Matrix
    transposed: bool
    """True if the node's result is the transpose of that."""
    factor: float
    """Factor of the operand, relative to the matrix."""

    def is_multiple(self, factor: float) -> bool:
        return math.isclose(self.factor, factor, rel_tol=1e-5)


class Readers(NamedTuple):
    """Readers of matrices: products matrix @ rows, products matrixᵀ @ rows, and other nodes."""

    plain: list[Product]
    transposed: list[Product]
    others: list[tuple[Node, float]]
    """With the factor of what they read."""


def operands_of(product: Node) -> tuple[Matrix, Matrix]:
    call = AtenCall(product)
    first, second = call.value("self"), call.value("mat2")
    assert first is not None and second is not None
    return Matrix(first, False), Matrix(second, False)


def matrix_shape(graph: Graph, matrix: Matrix) -> Shape:
    *lead, rows, columns = graph.shape_of(matrix.name)
    return (*lead, columns, rows) if matrix.transposed else (*lead, rows, columns)


def matrix_readers(graph: Graph, name: str, linear: bool = False) -> Readers | None:
    """Return the readers of a value behind views and casts, and if `linear` behind multiples; None for an output."""
    found = Readers([], [], [])
    pending = [(name, False, 1.0)]
    while pending:
        value, transposed, factor = pending.pop()
        if value in graph.outputs:
            return None
        for node in graph.readers(value):
            if node.calls == "bmm":
                first, second = operands_of(node)
                if first.name == second.name:
                    return None
                is_left = first.name == value
                rows = second if is_left else first.turned
                product = Product(node, rows, not is_left, factor)
                # x @ m is (mᵀ @ xᵀ)ᵀ
                (found.transposed if transposed == is_left else found.plain).append(product)
            elif (step := _followed(graph, node, value, linear)) is not None:
                pending.append((node.name, transposed != step[0], factor * step[1]))
            else:
                found.others.append((node, factor))
    return found


def _followed(graph: Graph, node: Node, value: str, linear: bool) -> tuple[bool, float] | None:
    """Return if a view turns matrices, and the factor of a multiple of them; None for any other node."""
    shape = graph.shape_of(value)
    if Reshape.matches(node) and "order" not in node.attributes and node.shape[-2:] == shape[-2:]:
        return False, 1.0
    if Permute.matches(node):
        rank = len(shape)
        order = tuple(node.attributes["order"])
        is_turn = order == (*range(rank - 2), rank - 1, rank - 2)
        return (True, 1.0) if is_turn else None
    if cast_source(node, graph) == value:
        return False, 1.0
    if linear and Pointwise.matches(node) and node.shape == shape:
        (role,) = node.roles_of(value)[:1]
        if all(not graph.dtype_of(node.inputs[one]).is_floating_point for one in node.inputs if one != role):
            slope = slope_of(graph, node, role, masked=0)
            return None if slope is None or slope.has_offset else (False, slope.factor)
    return None


class _Slope(NamedTuple):
    factor: float
    has_offset: bool
    masks: bool


def slope_of(graph: Graph, node: Node, role: str, masked: float = -math.inf) -> _Slope | None:
    """Return the factor of a function that is affine in an input, and what is added; None for others.

    Where a mask selects a number instead, that must be `masked`. A number such as -1e9 is not: rows that consist of it
    have equal weights and no gradients.
    """
    expression = operator_of(node).expression(node)
    if expression is None or role not in expression.inputs:
        return None
    points = torch.tensor([0.0, 1.0, -3.0, 0.37, 11.0], dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    slope, has_offset, masks = None, False, False
    for trial in range(4):
        inputs = {role: points}
        for number, (other, name) in enumerate(node.inputs.items()):
            if other != role:
                drawn = torch.randn((), dtype=torch.float64, generator=generator)
                is_mask = not graph.dtype_of(name).is_floating_point
                inputs[other] = torch.tensor(bool(trial >> (number % 2) & 1)) if is_mask else drawn
        (result,) = expression.evaluate(inputs)
        offset = float(result[0])
        if bool((result == offset).all()) and offset == masked:
            has_offset, masks = has_offset or offset != 0, True
            continue
        factor = float((result[1] - offset).float())
        if not torch.allclose(result, factor * points + offset, rtol=1e-6, atol=1e-6):
            return None
        if slope is not None and not math.isclose(slope, factor, rel_tol=1e-9):
            return None
        slope, has_offset = factor, has_offset or offset != 0
    return None if slope is None else _Slope(slope, has_offset, masks)


def multiple_of(graph: Graph, node: Node | None) -> float | None:
    """Return the positive factor of a node that multiplies a value by a number, and does nothing else."""
    if not Pointwise.matches(node) or len(node.inputs) != 1:
        return None
    ((role, name),) = node.inputs.items()
    is_alike = graph.shape_of(name) == node.shape and graph.dtype_of(name) == graph.dtype_of(node.name)
    slope = slope_of(graph, node, role) if is_alike and name not in graph.constants else None
    return slope.factor if slope is not None and not slope.has_offset and slope.factor > 0 else None


def source_product(graph: Graph, value: str) -> tuple[Matrix, Matrix] | None:
    """Return the operands of the product that a value is, behind views and casts that nothing else reads."""
    transposed = False
    while (node := graph.nodes.get(value)) is not None and graph.only_user(value) is not None:
        if node.calls == "bmm":
            first, second = operands_of(node)
            return (second.turned, first.turned) if transposed else (first, second)
        if len(node.inputs) != 1:
            return None
        (before,) = node.inputs.values()
        step = _followed(graph, node, before, linear=False)
        if step is None:
            return None
        transposed, value = transposed != step[0], before
    return None


def _traced(graph: Graph, name: str) -> tuple[str, torch.Tensor]:
    """Return the value that another one is a view of, and that view as a meta tensor."""
    node = graph.nodes.get(name)
    if Permute.matches(node) or (Reshape.matches(node) and "order" not in node.attributes):
        root, before = _traced(graph, node.inputs["x"])
        after = operator_of(node).compute(node, {"x": before})
        if is_view_of(after, before):
            return root, after
    return name, torch.empty(graph.shape_of(name), device="meta")  # type: ignore[arg-type]


def is_same_matrix(graph: Graph, first: Matrix, second: Matrix) -> bool:
    """Return True if two operands are the same view of one value."""

    def key(matrix: Matrix) -> tuple[object, ...]:
        root, found = _traced(graph, matrix.name)
        found = found.mT if matrix.transposed else found
        steps = [step for size, step in zip(found.shape, found.stride(), strict=True) if size > 1]
        return root, tuple(found.shape), *steps, found.storage_offset()

    return key(first) == key(second)


def unmerged(graph: Graph, name: str) -> str:
    """Return the value of four dimensions that an operand merges the first two of; else the operand itself."""
    node = graph.nodes.get(name)
    if Reshape.matches(node) and "order" not in node.attributes:
        source = node.inputs["x"]
        shape = graph.shape_of(source)
        if len(shape) == 4 and shape[-2:] == node.shape[-2:]:
            return source
    if Permute.matches(node) and tuple(node.attributes["order"]) == (0, 2, 1):
        source = unmerged(graph, node.inputs["x"])
        if source != node.inputs["x"]:
            return source
    return name


def rows_of(graph: Graph, before: Node, matrix: Matrix, lead: tuple[int, int]) -> str:
    """Return an operand as [batch][heads][tokens][size]."""
    name, transposed = matrix
    node = graph.nodes.get(name)
    if Permute.matches(node) and tuple(node.attributes["order"]) == (0, 2, 1):
        name, transposed = node.inputs["x"], not transposed
    source = unmerged(graph, name)
    if tuple(graph.shape_of(source)[:-2]) != lead:
        source = view(graph, before, name, (*lead, *graph.shape_of(name)[-2:]))
    return permuted(graph, before, source, _SWAPPED) if transposed else source


def replace_product(graph: Graph, product: Product, found: str) -> None:
    """Let the readers of a product read a value of four dimensions instead."""
    node = graph.nodes[product.node.name]
    if product.transposed:
        found = permuted(graph, node, found, _SWAPPED)
    shape = graph.shape_of(found)
    graph.nodes[node.name] = Reshape.instead_of(node, {"x": found})
    for reader in graph.readers(node.name):
        if Reshape.matches(reader) and "order" not in reader.attributes:
            if reader.shape == shape:
                graph.remove(reader, instead=found)
            else:
                graph.nodes[reader.name] = reader.with_inputs(x=found)
    for reader in graph.readers(found):
        if Permute.matches(reader):
            compose_permute(graph, reader)
