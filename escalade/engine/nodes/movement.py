"""Nodes that only move elements, as problems of the copy operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from escalade.engine.graph.forms import NAMES, Form
from escalade.engine.graph.graph import Node, dtype_name
from escalade.engine.nodes.base import Layouts, Operator, Tensors, is_view_of
from escalade.engine.nodes.lowering import NHWC, OWN, STORED, ElementMove, Forms, Lowered, Placement
from escalade.engine.nodes.signature import RESULT
from escalade.ops.copy import COPY, MOST_PARTS, CopyPart, CopyProblem

SOURCES = tuple(f"x{number}" for number in range(MOST_PARTS))
"""Roles of the values that are moved."""
_DTYPES_BY_BYTES = {1: "uint8", 2: "fp16", 4: "fp32"}
"""Dtype that elements of each size are copied as."""


def lower_moves(operator: Operator, node: Node, forms: Forms) -> Lowered | None:
    """Return the copy problem of a node with inputs x0, x1, …; None if it computes anything, or for other dtypes.

    Values that are smaller than what they are copied to are expanded.
    """
    at_placements = partial(_placed_problem, operator, node, forms)
    problem = at_placements({})
    if problem is None:
        return None
    result = forms.value(node.name)
    constants = {
        role: OWN if forms.typed else _constant_form(forms, name, result)[0]
        for role, name in node.inputs.items()
        if forms.is_constant(name)
    }
    return Lowered(COPY, problem, constants, at_placements=at_placements)


def _takes_constant(forms: Forms, name: str, result: Form) -> bool:
    """Return True if a constant can be stored in the result's dtype; in a typed graph if it is."""
    if forms.typed:
        return forms.constant_type(name) == result.dtype and len(forms.sizes(name)) == 1
    return NAMES.get(result.dtype) == forms.stored


def _constant_form(forms: Forms, name: str, result: Form) -> tuple[str, Form]:
    """Return how a copy reads a constant: by name of the form, and in memory."""
    sizes = forms.constant(name)
    if len(sizes) == 4 and result.layout == "nhwc":
        return NHWC, Form(sizes, result.dtype, "nhwc")
    return STORED, Form(sizes, result.dtype, "flat")


def _placed_problem(
    operator: Operator, node: Node, forms: Forms, placements: Mapping[str, Placement]
) -> CopyProblem | None:
    """Return the problem for values inside larger buffers, by role."""
    names = {**node.inputs, RESULT: node.name}
    constants = {role: name for role, name in node.inputs.items() if forms.is_constant(name)}
    if any(not _takes_constant(forms, name, forms.value(node.name)) for name in constants.values()):
        return None
    operands = {
        role: replace(forms.value(name), pitch=placements[role].pitch if role in placements else 0)
        for role, name in names.items()
        if role not in constants
    }
    result = operands.pop(RESULT)
    operands |= {role: _constant_form(forms, name, result)[1] for role, name in constants.items()}
    if not result.elements or any(form.dtype != result.dtype for form in operands.values()):
        return None
    inputs = {role: form.meta_tensor() for role, form in operands.items()}
    moves = operator.element_moves(node, inputs, result.meta_tensor())
    if moves is None:
        return None
    read = [role for role in operands if any(is_view_of(one.source, inputs[role]) for one in moves)]
    aligned = math.gcd(*(placements[role].offset for role in (*read, RESULT) if role in placements))
    elements = ((result.rows - 1) * (result.pitch or result.row)) + result.row
    return copy_problem(moves, inputs, elements, result.dtype, aligned)


def copy_problem(
    moves: Sequence[ElementMove],
    inputs: Mapping[str, torch.Tensor],
    elements: int,
    dtype: torch.dtype,
    aligned: int = 0,
) -> CopyProblem | None:
    """Return the problem of moving elements of x0, x1, … into a buffer; None if no kernel copies the dtype."""
    if dtype.itemsize not in _DTYPES_BY_BYTES:
        return None
    sources = {x.untyped_storage()._cdata: int(role.removeprefix("x")) for role, x in inputs.items()}
    parts = [_part(one, sources[one.source.untyped_storage()._cdata]) for one in moves]
    return CopyProblem.of(elements, parts, _DTYPES_BY_BYTES[dtype.itemsize], aligned)


def _part(move: ElementMove, source: int) -> CopyPart:
    sizes, strides = tuple(move.source.shape), list(move.source.stride())
    offset = int(move.source.storage_offset())
    assert sizes == tuple(move.target.shape), "source and target of a move have the same shape"
    if move.source.numel():
        for axis in move.reversed:
            offset += (sizes[axis] - 1) * strides[axis]
            strides[axis] = -strides[axis]
    return CopyPart(
        source, sizes, tuple(strides), move.target.stride(), offset, int(move.target.storage_offset())
    )


class Move(Operator):
    """Several nodes that only move elements, merged by the plan.

    Each of `nodes` reads inputs by their roles, and results of earlier ones by their numbers. Without nodes it copies
    x0. A result with the bytes of its only input has that as `x`.
    """

    name = "move"
    values = ("x", *SOURCES)

    def __init__(self, operator: Callable[[str], Operator]) -> None:
        """`operator` looks one up by its name."""
        self._operator = operator

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        last, operands = self._last(node, inputs)
        if last is None:
            return operands["x0"].expand(node.shape)  # type: ignore[arg-type]
        return self._operator(last.op).compute(last, operands)

    def _last(self, node: Node, inputs: Tensors) -> tuple[Node | None, Tensors]:
        """Return the last of the nodes, and its operands, computed by the earlier ones."""
        values = dict(inputs)
        nodes: Sequence[Node] = node.attributes["nodes"]
        for number, one in enumerate(nodes):
            operands = {role: values[name] for role, name in one.inputs.items()}
            if number == len(nodes) - 1:
                return one, operands
            values[str(number)] = self._operator(one.op).compute(one, operands)
        return None, values

    def element_moves(
        self, node: Node, inputs: Tensors, result: torch.Tensor
    ) -> Sequence[ElementMove] | None:
        last, operands = self._last(node, inputs)
        if last is None:
            return (ElementMove(operands["x0"].expand(result.shape), result),)
        return self._operator(last.op).element_moves(last, operands, result)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        return lower_moves(self, node, forms)

    def may_alias(self, node: Node) -> bool:
        return True

    def is_alias(self, node: Node, forms: Forms) -> bool:
        return "x" in node.inputs

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts(None, node.attributes["layout"])

    def title(self, node: Node) -> str:
        """Return the title of the last node, the one that the model contains."""
        nodes: Sequence[Node] = node.attributes["nodes"]
        return self._operator(nodes[-1].op).title(nodes[-1]) if nodes else self.name

    @classmethod
    def of(cls, nodes: Sequence[Node], roots: Mapping[str, str], form: Form) -> Node:
        """Return a node that replaces the last of these; `roots` are the values that they read, by role."""
        roles = {name: role for role, name in roots.items()}
        merged = []
        for number, one in enumerate(nodes):
            inputs = {role: roles[name] for role, name in one.inputs.items()}
            merged.append(replace(one, name=str(number), inputs=inputs))
            roles[one.name] = str(number)
        return cls.instead_of(nodes[-1], dict(roots), nodes=tuple(merged), layout=form.layout)

    @classmethod
    def copy_of(cls, name: str, value: str, form: Form) -> Node:
        """Return a node that copies a value."""
        attributes = {"layout": form.layout, "nodes": (), "copy": True}
        return cls.node(name, {"x0": value}, attributes, form.shape, dtype_name(form.dtype))


Box = tuple[range, ...]
"""Indices along each dimension."""


class SliceScatter(Operator):
    """x1, x2, … at disjoint boxes of a value; the rest is that of x0.

    A box is a slice, with a step, of every dimension. Inputs in `rows` are rows of one number, which fill what they
    are for.
    """

    name = "slice_scatter"
    preferred_layout = None
    values = SOURCES

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x0 = inputs["x0"]
        y = (x0[:1] if "x0" in node.attributes["rows"] else x0).expand(node.shape).clone()  # type: ignore[arg-type]
        for number, box in enumerate(node.attributes["boxes"], 1):
            part = inputs[f"x{number}"]
            y[as_slices(box)] = part[0] if f"x{number}" in node.attributes["rows"] else part
        return y

    def element_moves(
        self, node: Node, inputs: Tensors, result: torch.Tensor
    ) -> Sequence[ElementMove] | None:
        rows, boxes = node.attributes["rows"], node.attributes["boxes"]
        moves = []
        for number, box in enumerate(boxes, 1):
            target, part = result[as_slices(box)], inputs[f"x{number}"]
            moves.append(ElementMove(_filling(part, target) if f"x{number}" in rows else part, target))
        for box in uncovered(boxes, node.shape):  # type: ignore[arg-type]
            target, x0 = result[as_slices(box)], inputs["x0"]
            moves.append(ElementMove(_filling(x0, target) if "x0" in rows else x0[as_slices(box)], target))
        return moves if len(moves) <= MOST_PARTS else None

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        return lower_moves(self, node, forms)

    def pytorch_constants(self, node: Node) -> Mapping[str, str]:
        return dict.fromkeys(node.attributes["rows"], OWN)


def as_slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(one.start, one[-1] + 1, one.step) for one in box)


def uncovered(boxes: Sequence[Box], sizes: Sequence[int]) -> list[Box]:
    """Return disjoint boxes that cover what the given ones leave of a tensor."""
    if not boxes:
        return [tuple(map(range, sizes))]
    if not sizes:
        return []
    step = math.lcm(*(box[0].step for box in boxes))
    found = []
    for phase in range(min(step, sizes[0])):
        indices = range(phase, sizes[0], step)
        inside = [frozenset(n for n, box in enumerate(boxes) if index in box[0]) for index in indices]
        first = 0
        for end in range(1, len(indices) + 1):
            if end < len(indices) and inside[end] == inside[first]:
                continue
            rest = uncovered([boxes[n][1:] for n in sorted(inside[first])], sizes[1:])
            found += [(indices[first:end], *box) for box in rest]
            first = end
    return found


def _filling(row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a view of a row of one number in the shape of a target; where that is contiguous, the view is too."""
    sides = zip(target.shape, target.stride(), strict=True)
    steps = [int(size > 1 and stride == 1) for size, stride in sides]
    return row.as_strided(target.shape, steps)


# PyTorch operators that move elements without returning a view.

Arguments = Mapping[str, Any]
"""Arguments of a call by name; tensors are meta tensors."""


def _as_tuple(value: Any) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _as_pair(value: Any) -> tuple[int, int]:
    values = _as_tuple(value)
    return values[0], values[-1]


def _roll(arguments: Arguments, result: torch.Tensor) -> Sequence[ElementMove] | None:
    """Return two moves per rolled dimension."""
    x, shifts = arguments["self"], _as_tuple(arguments["shifts"])
    axes = [dim % x.dim() for dim in _as_tuple(arguments.get("dims"))]
    if len(axes) != len(shifts) or len({*axes}) != len(axes):  # flattened, or one dimension twice
        return None
    pairs = [(x, result)]
    for axis, shift in zip(axes, shifts, strict=True):
        size = x.shape[axis]
        ahead = shift % size
        pairs = [
            (source.narrow(axis, first, length), target.narrow(axis, to, length))
            for source, target in pairs
            for first, to, length in ((0, ahead, size - ahead), (size - ahead, 0, ahead))
            if length
        ]
    return [ElementMove(*pair) for pair in pairs]


def _flip(arguments: Arguments, result: torch.Tensor) -> Sequence[ElementMove]:
    x = arguments["self"]
    return (ElementMove(x, result, tuple(dim % x.dim() for dim in _as_tuple(arguments["dims"]))),)


def _stack(arguments: Arguments, result: torch.Tensor) -> Sequence[ElementMove]:
    dim = arguments.get("dim", 0)
    return [ElementMove(one, result.select(dim, index)) for index, one in enumerate(arguments["tensors"])]


def _repeat(arguments: Arguments, result: torch.Tensor) -> Sequence[ElementMove]:
    x, times = arguments["self"], _as_tuple(arguments["repeats"])
    x = x.reshape((1,) * (len(times) - x.dim()) + tuple(x.shape))
    for axis in reversed(range(len(times))):
        result = result.unflatten(axis, (times[axis], x.shape[axis]))
        x = x.unsqueeze(axis)
    return (ElementMove(x.expand(result.shape), result),)


def _tile(arguments: Arguments, result: torch.Tensor) -> Sequence[ElementMove]:
    times = _as_tuple(arguments["dims"])
    ones = (1,) * (arguments["self"].dim() - len(times))
    return _repeat({**arguments, "repeats": ones + times}, result)


def _window_view(x: torch.Tensor, axis: int, kernel: int, dilation: int, stride: int) -> torch.Tensor:
    """Return windows along one dimension, with their elements as a new last dimension."""
    return x.unfold(axis, (kernel - 1) * dilation + 1, stride)[..., ::dilation]


def _im2col(arguments: Arguments, result: torch.Tensor) -> Sequence[ElementMove] | None:
    x = arguments["self"]
    kernel, dilation, padding, stride = (
        _as_pair(arguments[name]) for name in ("kernel_size", "dilation", "padding", "stride")
    )
    if x.dim() != 4 or any(padding):
        return None
    windows = _window_view(x, 2, kernel[0], dilation[0], stride[0])
    windows = _window_view(windows, 3, kernel[1], dilation[1], stride[1])  # N, C, rows, columns, window
    target = result.unflatten(2, windows.shape[2:4]).unflatten(1, (x.shape[1], *kernel))
    return (ElementMove(windows.permute(0, 1, 4, 5, 2, 3), target),)


def _col2im(arguments: Arguments, result: torch.Tensor) -> Sequence[ElementMove] | None:
    """Return the move of windows that cover an image without overlapping."""
    x, size = arguments["self"], _as_pair(arguments["output_size"])
    kernel, dilation, padding, stride = (
        _as_pair(arguments[name]) for name in ("kernel_size", "dilation", "padding", "stride")
    )
    counts = [whole // each for whole, each in zip(size, kernel, strict=True)]
    covers = all(whole % each == 0 for whole, each in zip(size, kernel, strict=True))
    if x.dim() != 3 or any(padding) or dilation != (1, 1) or kernel != stride or not covers:
        return None
    source = x.unflatten(2, counts).unflatten(1, (result.shape[1], *kernel))
    target = result.unflatten(3, (counts[1], kernel[1])).unflatten(2, (counts[0], kernel[0]))
    return (ElementMove(source, target.permute(0, 1, 3, 5, 2, 4)),)


def _repeat_interleave(arguments: Arguments, result: torch.Tensor) -> Sequence[ElementMove] | None:
    x, times, axis = arguments["self"], arguments.get("repeats"), arguments.get("dim")
    if not isinstance(times, int) or not isinstance(axis, int):
        return None
    axis %= x.dim()
    result = result.unflatten(axis, (x.shape[axis], times))
    return (ElementMove(x.unsqueeze(axis + 1).expand(result.shape), result),)


ATEN_MOVES: Mapping[str, Callable[[Arguments, torch.Tensor], Sequence[ElementMove] | None]] = {
    "roll": _roll,
    "flip": _flip,
    "stack": _stack,
    "repeat": _repeat,
    "tile": _tile,
    "im2col": _im2col,
    "col2im": _col2im,
    "repeat_interleave": _repeat_interleave,
}
"""Moves from the arguments of a call to its result, by the name of PyTorch's operator."""
