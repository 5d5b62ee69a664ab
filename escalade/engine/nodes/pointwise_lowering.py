"""Pointwise nodes as problems: what any operator with an expression is lowered to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from escalade.engine.graph.forms import NAMES, Form
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.lowering import FP32, NHWC, STORED, Forms, Lowered
from escalade.ops.expressions import Expression
from escalade.ops.pointwise import POINTWISE, PointwiseProblem, View

_NHWC = (0, 2, 3, 1)
"""An image's dimensions as they lie in memory."""


def lower_expression(node: Node, expression: Expression, forms: Forms) -> Lowered | None:
    """The problem of a node that computes an expression of its inputs; None if one is of a type that kernels do not
    read, or there is nothing to compute."""
    form = forms.value(node.name)
    if NAMES.get(form.dtype) != forms.stored or not form.elements:
        return None
    constants = {
        role: _constant_form(forms, node.inputs[role], form)
        for role in expression.inputs
        if forms.is_constant(node.inputs[role])
    }
    at_pitches = partial(_problem, node, expression, forms, constants)
    problem = at_pitches({})
    if problem is None:
        return None
    return Lowered(POINTWISE, problem, constants, _in_place(node, problem, forms), at_pitches=at_pitches)


def _problem(
    node: Node,
    expression: Expression,
    forms: Forms,
    constants: Mapping[str, str],
    pitches: Mapping[str, int],
) -> PointwiseProblem | None:
    """The problem over inputs whose rows are so many elements apart, by role; a result's are not."""
    form = forms.value(node.name)
    order = _order(form)
    if not set(expression.inputs) - constants.keys() >= pitches.keys():
        return None
    views: dict[str, View] = {}
    for role in expression.inputs:
        form_of_constant = constants.get(role, STORED)
        view = _view(forms, node.inputs[role], form_of_constant, len(form.shape), pitches.get(role, 0))
        if view is None:
            return None
        sizes, strides = ([given[axis] for axis in order] for given in (view.shape, view.strides))
        views[role] = View(tuple(sizes), tuple(strides), view.dtype)
    shape = [form.shape[axis] for axis in order]
    return PointwiseProblem.of(expression.text, shape, views, forms.stored)


def _order(form: Form) -> Sequence[int]:
    return _NHWC if form.layout == "nhwc" else range(len(form.shape))


def _constant_form(forms: Forms, name: str, result: Form) -> str:
    """fp32 where it is small beside the result; in the order of the result where it has channels and pixels."""
    sizes = forms.constant(name)
    if result.layout == "nhwc" and len(sizes) == 4 and sizes[1] > 1 and math.prod(sizes[2:]) > 1:
        return NHWC
    return FP32 if math.prod(sizes) < math.prod(result.shape) else STORED


def _view(forms: Forms, name: str, form: str, rank: int, pitch: int) -> View | None:
    """How an input lies in memory, with the dimensions of the result in PyTorch's order; None if its type is none that
    kernels read."""
    if forms.is_constant(name):
        tensor = torch.empty(forms.constant(name), device="meta")
        if form == NHWC:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        dtype = forms.constant_type(name)
        own = not dtype.is_floating_point or (forms.typed and form != FP32)
        kind = dtype if own else torch.float32 if form == FP32 else None
    else:
        value = replace(forms.value(name), pitch=pitch)
        tensor, kind = value.meta_tensor(), value.dtype
    known = forms.stored if kind is None else NAMES.get(torch.uint8 if kind == torch.bool else kind)
    missing = rank - tensor.dim()
    if known is None or missing < 0:
        return None
    return View((1,) * missing + tuple(tensor.shape), (0,) * missing + tensor.stride(), known)


def _in_place(node: Node, problem: PointwiseProblem, forms: Forms) -> str | None:
    """The first operand that lies as the result does."""
    form = forms.value(node.name)
    for operand in problem.operands:
        name = node.inputs[operand.name]
        if forms.is_constant(name):
            continue
        value = forms.value(name)
        if (value.shape, value.dtype, value.layout) == (form.shape, form.dtype, form.layout):
            return operand.name
    return None
