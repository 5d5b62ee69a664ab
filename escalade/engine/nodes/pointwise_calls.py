"""Expressions of PyTorch's pointwise operators, in the names of their arguments.

An operator with a function of the same name is that function. The others are traced through PyTorch's decompositions,
with the numbers of the call, down to such operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

from escalade.engine.graph.aten import bound_arguments
from escalade.engine.graph.graph import name_of
from escalade.ops.expressions import FUNCTIONS, Expression

Overload = torch._ops.OpOverload
Numbers = Mapping[str, Any]
"""Arguments by name; tensors are `TENSOR`."""
TENSOR = "tensor"
"""Placeholder for a tensor among the arguments of a call."""
_SHAPE, _OTHER_SHAPE = (2, 4), (3, 5)
"""Shapes for tracing. Two, since a result may depend on the number of elements, as in the gradient of a mean."""
_NAMESPACES = ("aten", "prims")
"""Namespaces with known names; operators of other libraries may compute anything."""
_LOGICAL_NAMES = {"bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
                "bitwise_not": "logical_not", "__and__": "logical_and", "__or__": "logical_or"}  # fmt: skip
"""Bitwise operators as functions of bools, the only integers that expressions compute with."""


def _sum(first: str, sign: str, second: str) -> Callable[[Numbers], str]:
    return lambda given: f"{first} {sign} {'' if given.get('alpha', 1) == 1 else 'alpha * '}{second}"


def _div(given: Numbers) -> str | None:
    rounded = {None: "self / other", "trunc": "trunc(self / other)", "floor": _FLOORED}
    return rounded.get(given.get("rounding_mode"))


_FLOORED = (
    "t = fmod(self, other); down = (t != 0) * ((other < 0) != (t < 0)); "
    "where(other == 0, self / other, floor((self - t) / other - down + 0.5))"
)
"""Floor division by way of the remainder, so that rounding cannot exceed an exact quotient."""


def _clamp(given: Numbers) -> str:
    if given["max"] is None:
        return "maximum(self, min)"
    return "minimum(self, max)" if given["min"] is None else "clamp(self, min, max)"


def _gelu(given: Numbers) -> str | None:
    return {"none": "gelu(self)", "tanh": "gelu_tanh(self)"}.get(given["approximate"])


def _softplus(given: Numbers) -> str:
    if (given["beta"], given["threshold"]) == (1, 20):
        return "softplus(self)"
    return "t = self * beta; where(t > threshold, self, log1p(exp(t)) / beta)"


def _elu(given: Numbers) -> str:
    if (given["scale"], given["input_scale"]) == (1, 1):
        return "elu(self, alpha)"
    return "where(self > 0, scale * self, scale * elu(self * input_scale, alpha))"


def _addc(sign: str) -> Callable[[Numbers], str]:
    return lambda given: f"self + {'' if given['value'] == 1 else 'value * '}tensor1 {sign} tensor2"


def _round(given: Numbers) -> str:
    power = 10.0 ** abs(given.get("decimals", 0))
    if power == 1:
        return "round(self)"
    up, down = ("*", "/") if given["decimals"] > 0 else ("/", "*")
    return f"round(self {up} {power}) {down} {power}"


def _nan_to_num(given: Numbers) -> str | None:
    """Return None without explicit replacements of infinities: the default is the largest number of the dtype."""
    if given["posinf"] is None or given["neginf"] is None:
        return None
    return f"where(isnan(self), {given['nan'] or 0}, where(self == inf, posinf, where(self == -inf, neginf, self)))"


def _cast(name: str) -> Callable[[Numbers], str | None]:
    """Return the operand itself for a cast to a floating dtype, which is the plan's own."""
    return lambda given: name if given["dtype"] is None or given["dtype"].is_floating_point else None


def _rrelu(given: Numbers) -> str | None:
    return None if given["training"] else "leaky_relu(self, (lower + upper) / 2)"


_SPELLED: Mapping[str, Callable[[Numbers], str | None]] = {
    "add": _sum("self", "+", "other"),
    "sub": _sum("self", "-", "other"),
    "rsub": _sum("other", "-", "self"),
    "div": _div,
    "floor_divide": lambda given: _FLOORED,
    "clamp": _clamp,
    "clamp_min": lambda given: "maximum(self, min)",
    "clamp_max": lambda given: "minimum(self, max)",
    "addcmul": _addc("*"),
    "addcdiv": _addc("/"),
    "round": _round,
    "nan_to_num": _nan_to_num,
    "angle": lambda given: "where(isnan(self), self, where(self < 0, 3.141592653589793, 0))",
    "conj_physical": lambda given: "self",
    "_conj_physical": lambda given: "self",
    "signbit": lambda given: "copysign(1, self) < 0",
    "gelu": _gelu,
    "elu": _elu,
    "softplus": _softplus,
    "rrelu": _rrelu,
    "prelu": lambda given: "leaky_relu(self, weight)",
    "_prelu_kernel": lambda given: "leaky_relu(self, weight)",
    "scalar_tensor": lambda given: "s",
    "full_like": lambda given: "fill_value",
    "convert_element_type": _cast("a"),
    "_to_copy": _cast("self"),
    "to": _cast("self"),
    "clone": lambda given: "self",
    "positive": lambda given: "self",
}
"""Operators whose expression depends on arguments, or is better written by hand than decomposed."""


def expression_of(operator: Overload, given: Mapping[str, Any]) -> Expression | None:
    """Return the expression of a call in the names of its tensor arguments; None if it is not pointwise."""
    return _expression(operator, tuple(given.items()))


@cache
def _expression(operator: Overload, given: tuple[tuple[str, Any], ...]) -> Expression | None:
    if operator.namespace not in _NAMESPACES:
        return None
    if torch.Tag.nondeterministic_seeded in operator.tags and name_of(operator.name()) != "rrelu":
        return None
    complete = _defaults(operator) | dict(given)
    if _is_spelled(operator):
        return _spelled(operator, complete)
    if not _may_decompose(operator):
        return None
    found = _traced(operator, complete, _SHAPE)
    if found is None or torch.Tag.pointwise in operator.tags:
        return found
    return found if _traced(operator, complete, _OTHER_SHAPE) == found else None


def _defaults(operator: Overload) -> dict[str, Any]:
    arguments = operator._schema.arguments
    return {each.name: each.default_value for each in arguments if each.has_default_value()}


def _name(operator: Overload) -> str:
    name = name_of(operator.name()).split("::")[-1]
    return _LOGICAL_NAMES.get(name, name)


def _is_spelled(operator: Overload) -> bool:
    return (name := _name(operator)) in _SPELLED or name in FUNCTIONS


def _spelled(operator: Overload, given: Numbers) -> Expression | None:
    """Return the expression of an operator with a function or a text of its own."""
    name = _name(operator)
    if name in _SPELLED:
        text = _SPELLED[name](given)
        return None if text is None else _filled(Expression.parse(text), given)
    names = [argument.name for argument in operator._schema.arguments]
    arity = FUNCTIONS[name].arity
    rest = [one for one in operator._schema.arguments[arity:] if one.name != "dtype"]
    if len(names) < arity or any(given[one.name] != one.default_value for one in rest):
        return None
    return _filled(Expression.apply(name, *names[:arity]), given)


def _filled(expression: Expression, given: Numbers) -> Expression | None:
    """Substitute the numbers of a call."""
    numbers = {}
    for name in expression.inputs:
        if given[name] == TENSOR:
            continue
        if not isinstance(given[name], bool | int | float):
            return None
        numbers[name] = Expression((), (float(given[name]),))
    return expression.substitute(numbers)


def _may_decompose(operator: Overload) -> bool:
    return (
        torch.Tag.pointwise in operator.tags or operator in decomposition_table or operator._can_decompose()
    )


@cache
def _table() -> dict[Overload, Callable[..., Any]]:
    """Return PyTorch's decompositions of operators without a function of ours."""
    return {
        operator: decomposed
        for operator, decomposed in decomposition_table.items()
        if isinstance(operator, Overload) and not _is_spelled(operator)
    }


def _traced(operator: Overload, given: Numbers, shape: tuple[int, ...]) -> Expression | None:
    """Trace a call on tensors of this shape; None if it decomposes into anything but functions of ours."""
    tensors = [name for name, value in given.items() if value == TENSOR]
    kinds = {argument.name: argument for argument in operator._schema.arguments}

    def call(*values: torch.Tensor) -> Any:
        filled = {**given, **dict(zip(tensors, values, strict=True))}
        positional = [
            filled.pop(name) for name, kind in kinds.items() if not kind.kwarg_only and name in filled
        ]
        return operator(*positional, **filled)

    examples = [
        torch.ones(shape, dtype=torch.bool if name in ("mask", "condition") else torch.float32, device="cpu")
        for name in tensors
    ]
    try:
        with torch.no_grad():
            graph = make_fx(call, decomposition_table=_table())(*examples).graph
    except Exception:  # PyTorch then runs the step itself
        return None
    return _read(graph, tensors, shape)


def _read(graph: torch.fx.Graph, names: list[str], shape: tuple[int, ...]) -> Expression | None:
    """Return the expression of a traced graph whose placeholders have these names."""
    placeholders = iter(names)
    made: dict[torch.fx.Node, Expression | None] = {}
    calls = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            made[node] = Expression((), (next(placeholders),))
        elif node.op == "output":
            result = node.args[0]
            return made.get(result) if calls and isinstance(result, torch.fx.Node) else None
        else:
            made[node] = _of_call(node, made, shape)
            calls += 1
    return None


def _of_call(
    node: torch.fx.Node, made: Mapping[torch.fx.Node, Expression | None], shape: tuple[int, ...]
) -> Expression | None:
    """Return the expression of a call in a traced graph; None if it is not a function of ours."""
    operator, value = node.target, node.meta.get("val")
    if not isinstance(operator, Overload) or not _is_spelled(operator):
        return None
    if not isinstance(value, torch.Tensor) or value.shape not in ((), shape):
        return None
    bound = _defaults(operator) | bound_arguments(operator, node.args, node.kwargs)
    values = {name: made[one] for name, one in bound.items() if isinstance(one, torch.fx.Node)}
    expression = _spelled(operator, {**bound, **dict.fromkeys(values, TENSOR)})
    if expression is None:
        return None
    used = {name: values[name] for name in expression.inputs}
    known = {name: value for name, value in used.items() if value is not None}
    return expression.substitute(known) if len(known) == len(used) else None
