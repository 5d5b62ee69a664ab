"""PyTorch's pointwise operators as expressions: all that it tags as pointwise, and exactly those left to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.check import GraphError, check_graph
from escalade.engine.graph.graph import name_of
from escalade.engine.nodes.pointwise import MAX_CALLS, MAX_TEXT, Pointwise
from escalade.engine.nodes.pointwise_calls import TENSOR, expression_of
from escalade.ops.expressions import Expression

WHOLE = (
    "bitwise_left_shift bitwise_right_shift gcd lcm"  # for integers
).split()
SPECIAL = """
    digamma erfinv i0 igamma igammac lgamma mvlgamma nextafter polygamma special_airy_ai special_bessel_j0
    special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_erfcx special_hermite_polynomial_h
    special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0
    special_zeta
""".split()
"""Functions of mathematical physics and statistics, which expressions lack."""
OTHER = ["equal", "frexp", "nan_to_num"]
"""One answer for all elements; two results; infinities replaced by the dtype's largest number unless the call
sets another."""
GIVEN: dict[str, dict[str, Any]] = {
    "clamp": {"min": -0.3, "max": 0.4}, "clip": {"min": -0.3, "max": 0.4}, "div": {"rounding_mode": "floor"},
    "round": {"decimals": 1}, "gelu": {"approximate": "tanh"}, "elu": {"scale": 2.0}, "softplus": {"beta": 3.0},
}  # fmt: skip
"""Arguments that differ from their defaults."""


def overloads() -> Iterator[torch._ops.OpOverload]:
    every = (name_of(name) for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    for name in sorted(set(every)):
        if name.endswith("_"):
            continue
        packet = getattr(torch.ops.aten, name)
        for overload in (getattr(packet, each) for each in packet.overloads()):
            is_out = any(argument.is_out for argument in overload._schema.arguments)
            if torch.Tag.pointwise in overload.tags and not is_out:
                yield overload


def arguments(operator: torch._ops.OpOverload) -> dict[str, Any]:
    """A call with tensors wherever it accepts them."""
    said = GIVEN.get(name_of(operator.name()), {})
    given: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        kind = str(argument.type)
        if kind == "Tensor" or (kind == "Optional[Tensor]" and argument.name in said):
            given[argument.name] = TENSOR
        elif argument.name in said:
            given[argument.name] = said[argument.name]
        elif not argument.has_default_value():
            given[argument.name] = 2 if kind == "int" else 0.7
    return given


def test_every_pointwise_operator_is_an_expression_or_known_not_to_be() -> None:
    torch.manual_seed(0)
    missing = set()
    for operator in overloads():
        given = arguments(operator)
        expression = expression_of(operator, given)
        if expression is None:
            missing.add(name_of(operator.name()))
            continue
        of_truth = name_of(operator.name()).startswith("bitwise")
        tensors = {
            name: torch.randn(64, dtype=torch.float64) for name, value in given.items() if value == TENSOR
        }
        if "condition" in tensors or "mask" in tensors or of_truth:
            tensors |= {
                name: one > 0 for name, one in tensors.items() if of_truth or name in ("condition", "mask")
            }
        if of_truth:
            given = {name: bool(value) if value != TENSOR else value for name, value in given.items()}
        wanted = operator(**{**given, **tensors})
        values = {name: tensors[name].double() for name in expression.inputs}
        (found,) = expression.evaluate(values)
        shown = f"{operator}: {expression}: " + "{}"
        torch.testing.assert_close(
            found, wanted.double(), rtol=1e-9, atol=1e-9, equal_nan=True, msg=shown.format
        )
    assert missing == {*WHOLE, *SPECIAL, *OTHER}


class Calls(nn.Module):
    """Operators as models call them: in place, by other names, with numbers, booleans and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes, self.scale = nn.PReLU(4), nn.Buffer(torch.tensor(0.5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        y = x.clone().mul_(2).add_(x, alpha=3)
        inside = (y > -1) & ~(y > 1)
        return [
            y,
            torch.where(inside, x, torch.tensor(0.25)),
            x.masked_fill(mask, -1.5),
            self.slopes(x) * self.scale,
            F.rrelu(x) + F.softsign(x) + F.tanhshrink(x) + F.logsigmoid(x),
            x.clamp(x.flip(1), x.abs()) ** 2 / x.negative().exp(),
            x.nan_to_num(0.0, 3.0, -3.0) - mask.float(),
            x.double() * mask,
        ]


def test_calls_are_recognised_and_computed() -> None:
    torch.manual_seed(2)
    model, given = Calls().eval(), (torch.randn(2, 4, 3, 3), torch.rand(2, 1, 3, 3) > 0.5)
    graph = capture(model, given)
    check_graph(graph)
    left = {node.attributes["target"] for node in graph if node.op == "aten"}
    assert left == {"aten::flip", "aten::to.dtype", "aten::mul.Tensor"}  # the last two are in float64
    from escalade.engine.engine import Engine

    for got, wanted in zip(Engine(graph, "fp32", "cpu")(*given), model(*given), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "text",
    [
        "x, x", "y", "a", "x * z", "2", "x +", "import os", f"x + {'1' * MAX_TEXT}", "exp(" * 150 + "x" + ")" * 150,
        "+".join(["x"] * 1500), "-" * 3000 + "x", "; ".join(f"t{n} = exp(x + {n})" for n in range(MAX_CALLS)) + "; t0",
        None, 3,
    ],
)  # fmt: skip
def test_a_file_holds_expressions_only(text: Any) -> None:
    assert Pointwise.signature is not None
    holds = Pointwise.signature.attributes["expression"].holds(text)
    assert holds == (isinstance(text, str) and text.endswith("; t0"))  # dead code is not computed


def test_a_file_names_each_input() -> None:
    graph = capture(nn.Sigmoid(), (torch.randn(2, 3),))
    (name,) = graph.nodes
    graph.nodes[name] = graph.nodes[name].with_attributes(expression="x * a")
    with pytest.raises(GraphError, match="x \\* a takes x, a"):
        check_graph(graph)


def test_expressions_of_operators_match_their_results() -> None:
    model = nn.Sequential(nn.ReLU6(), nn.GELU("tanh"), nn.Hardswish())
    graph = capture(model, (torch.randn(2, 3),))
    from escalade.engine.nodes import operator_of

    found = [operator_of(node).expression(node) for node in graph]
    assert found == [Expression.parse(text) for text in ("clamp(x, 0, 6.0)", "gelu_tanh(x)", "hardswish(x)")]


@pytest.mark.parametrize("name", ["add", "sub"])
def test_operators_that_losses_are_decomposed_into_have_no_factor(name: str) -> None:
    given = {"self": TENSOR, "other": TENSOR}
    operator = getattr(torch.ops.prims, name).default
    assert expression_of(operator, given) == Expression.parse(
        {"add": "self + other", "sub": "self - other"}[name]
    )
