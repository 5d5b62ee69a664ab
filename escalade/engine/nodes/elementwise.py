"""Pointwise operators with nodes of their own, and the lowering of any node that computes an expression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES, Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import AtenCall, Match, Operator, Tensors, activate, match_aten
from escalade.engine.nodes.lowering import FP32, NHWC, STORED, Forms, Lowered, problem_from
from escalade.engine.nodes.signature import (
    ANY,
    FLAG,
    Attribute,
    Attributes,
    Signature,
    Sizes,
    is_real,
    one_of,
)
from escalade.ops.add import ADD, AddProblem
from escalade.ops.expressions import Expression
from escalade.ops.pointwise import POINTWISE, PointwiseProblem, View
from escalade.ops.relu import RELU, ReluProblem

_NHWC_ORDER = (0, 2, 3, 1)
_GELU_FUNCTIONS = {"none": "gelu", "tanh": "gelu_tanh"}
"""Functions in expressions, by PyTorch's name for the approximation."""


class Add(Operator):
    """y = x + residual, then ReLU."""

    name = "add"
    preferred_layout = None
    mixes_types = True
    signature = Signature({"x": ANY, "residual": ANY}, {"relu": FLAG}, floating=False)

    @match_aten("add")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x, other = call.value("self"), call.value("other")
        if x is None or other is None or call("alpha", 1) != 1:
            return None
        for value in (x, other):
            is_floating = graph.dtype_of(value).is_floating_point
            if graph.shape_of(value) != node.shape or is_floating != node.is_floating:
                return None
        return self.instead_of(node, {"x": x, "residual": other}, relu=False)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        return {"residual": sizes["x"]}

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return activate(node, inputs["x"], inputs["residual"])

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        operands = [node.inputs[role] for role in ("x", "residual")]
        form = forms.value(node.name)
        if any(forms.is_constant(name) or forms.value(name) != form for name in operands):
            return lower_expression(node, self.expression(node), forms)
        problem = problem_from(AddProblem, node, elements=math.prod(form.shape), dtype=forms.stored)
        return Lowered(ADD, problem, in_place="x")

    def expression(self, node: Node) -> Expression:
        return Expression.parse("relu(x + residual)" if node.attributes["relu"] else "x + residual")


class Relu(Operator):
    """y = max(x, 0), or with a limit (ReLU6) min(max(x, 0), limit)."""

    name = "relu"
    preferred_layout = None
    signature = Signature(
        {"x": ANY},
        {
            "limit": Attribute(
                "a positive number or nothing", lambda value: value is None or (is_real(value) and value > 0)
            )
        },
        floating=False,
    )

    @match_aten("relu")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self.instead_of(node, {"x": call.value("self")}, limit=None)

    @match_aten("relu6")
    def _match_relu6(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self.instead_of(node, {"x": call.value("self")}, limit=6.0)

    @match_aten("hardtanh")
    def _match_hardtanh(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        low, high = call("min_val", -1), call("max_val", 1)
        if low != 0 or not high > 0:
            return None
        return self.instead_of(node, {"x": call.value("self")}, limit=float(high))

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        limit = node.attributes["limit"]
        return torch.relu(inputs["x"]) if limit is None else inputs["x"].clamp(0, limit)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        elements = math.prod(forms.value(node.name).shape)
        problem = problem_from(ReluProblem, node, elements=elements, dtype=forms.stored)
        return Lowered(RELU, problem, in_place="x")

    def expression(self, node: Node) -> Expression:
        limit = node.attributes["limit"]
        return Expression.parse("relu(x)" if limit is None else f"clamp(x, 0, {limit!r})")


class Gelu(Operator):
    """y = x Φ(x), exact or approximated by tanh; fused into chains of linear layers."""

    name = "gelu"
    preferred_layout = None
    signature = Signature({"x": ANY}, {"approximate": one_of("none", "tanh")})

    @match_aten("gelu")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self.instead_of(node, {"x": call.value("self")}, approximate=call("approximate", "none"))

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return F.gelu(inputs["x"], approximate=node.attributes["approximate"])

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        return lower_expression(node, self.expression(node), forms)

    def expression(self, node: Node) -> Expression:
        return Expression.apply(_GELU_FUNCTIONS[node.attributes["approximate"]], "x")


def lower_expression(node: Node, expression: Expression, forms: Forms) -> Lowered | None:
    """Return the problem of a node that computes an expression of its inputs; None for dtypes without kernels."""
    form = forms.value(node.name)
    if NAMES.get(form.dtype) != forms.stored or not form.elements:
        return None
    constants = {
        role: _constant_form(forms, node.inputs[role], form)
        for role in expression.inputs
        if forms.is_constant(node.inputs[role])
    }
    at_pitches = partial(_strided_problem, node, expression, forms, constants)
    problem = at_pitches({})
    if problem is None:
        return None
    return Lowered(POINTWISE, problem, constants, _in_place(node, problem, forms), at_pitches=at_pitches)


def _strided_problem(
    node: Node,
    expression: Expression,
    forms: Forms,
    constants: Mapping[str, str],
    pitches: Mapping[str, int],
) -> PointwiseProblem | None:
    """Return the problem for inputs with these row pitches in elements, by role; the result has to be dense."""
    form = forms.value(node.name)
    order: Sequence[int] = _NHWC_ORDER if form.layout == "nhwc" else range(len(form.shape))
    if not set(expression.inputs) - constants.keys() >= pitches.keys():
        return None
    views: dict[str, View] = {}
    for role in expression.inputs:
        constant_form = constants.get(role, STORED)
        view = _view(forms, node.inputs[role], constant_form, len(form.shape), pitches.get(role, 0))
        if view is None:
            return None
        sizes, strides = ([given[axis] for axis in order] for given in (view.shape, view.strides))
        views[role] = View(tuple(sizes), tuple(strides), view.dtype)
    shape = [form.shape[axis] for axis in order]
    return PointwiseProblem.of(expression.text, shape, views, forms.stored)


def _constant_form(forms: Forms, name: str, result: Form) -> str:
    """Return NHWC for a constant image of an NHWC result, else fp32 if it is small compared to the result."""
    sizes = forms.constant(name)
    if result.layout == "nhwc" and len(sizes) == 4 and sizes[1] > 1 and math.prod(sizes[2:]) > 1:
        return NHWC
    return FP32 if math.prod(sizes) < math.prod(result.shape) else STORED


def _view(forms: Forms, name: str, form: str, rank: int, pitch: int) -> View | None:
    """Return shape, strides and dtype of an input, with the rank of the result; None if kernels do not read it."""
    if forms.is_constant(name):
        tensor = torch.empty(forms.constant(name), device="meta")
        if form == NHWC:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        dtype = forms.constant_type(name)
        keeps_dtype = not dtype.is_floating_point or (forms.typed and form != FP32)
        kind = dtype if keeps_dtype else torch.float32 if form == FP32 else None
    else:
        value = replace(forms.value(name), pitch=pitch)
        tensor, kind = value.meta_tensor(), value.dtype
    known = forms.stored if kind is None else NAMES.get(torch.uint8 if kind == torch.bool else kind)
    missing = rank - tensor.dim()
    if known is None or missing < 0:
        return None
    return View((1,) * missing + tuple(tensor.shape), (0,) * missing + tensor.stride(), known)


def _in_place(node: Node, problem: PointwiseProblem, forms: Forms) -> str | None:
    """Return the first operand that is stored like the result."""
    form = forms.value(node.name)
    for operand in problem.operands:
        name = node.inputs[operand.name]
        if forms.is_constant(name):
            continue
        value = forms.value(name)
        if (value.shape, value.dtype, value.layout) == (form.shape, form.dtype, form.layout):
            return operand.name
    return None
