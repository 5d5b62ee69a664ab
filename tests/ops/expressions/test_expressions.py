"""Pointwise programs: their text, their canonical form, and results on the twin that match PyTorch."""

from __future__ import annotations

import pathlib
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.device.run import bind
from escalade.device.sources import KERNELS
from escalade.errors import UnsupportedError
from escalade.ops.expressions import FUNCTIONS, IDENTITY, Expression, FunctionCall
from escalade.ops.expressions.expression import PAIRED

TEXTS = [
    "x", "x * sigmoid(x)", "x - (a - b)", "(x - a) - b", "-x ** 2", "(-x) ** 2", "x ** (a ** b)", "(x ** a) ** b",
    "(x < a) == (b < 1)", "where(x > 0, x, 0.1 * x)", "t0 = x + residual; where(t0 > 0, t0, 0.1 * t0)",
    "clamp(x, -inf, 6)", "x * -2", "-(x + 1)", "x + 1e-05", "t0 = exp(x); t0, t0 * t0", "nan + x", "x / (a / b)",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_parsed_into_what_it_says(text: str) -> None:
    expression = Expression.parse(text)
    assert (
        Expression.parse(expression.text) is not None
        and Expression.parse(expression.text).text == expression.text
    )
    values = {name: torch.rand(7, dtype=torch.float64) - 0.3 for name in ("x", "a", "b", "residual")}
    scope = {name: function.compute for name, function in FUNCTIONS.items()}
    local = {**values, "inf": torch.tensor(torch.inf), "nan": torch.nan, "where": torch.where}
    *before, last = text.split("; ")
    for statement in before:
        exec(statement, scope, local)  # Python's own reading of it
    wanted = eval(last.replace("-inf", "float('-inf')"), scope, local)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for got, exact in zip(expression.evaluate(values), wanted, strict=True):
        torch.testing.assert_close(got, exact.to(got.dtype), equal_nan=True)


@st.composite
def programs(draw: st.DrawFn) -> Expression:
    """Draw calls that may be equal, or unused."""
    calls: list[FunctionCall] = []
    for _ in range(draw(st.integers(0, 6))):
        name = draw(st.sampled_from(sorted(FUNCTIONS)))
        operand = st.sampled_from(["x", "a", 0.5, -2.0, *range(len(calls))])
        calls.append(FunctionCall(name, tuple(draw(operand) for _ in range(FUNCTIONS[name].arity))))
    results = st.lists(st.sampled_from(["x", *range(len(calls))]), min_size=1, max_size=2)
    return Expression(tuple(calls), tuple(draw(results)))


@given(st.lists(st.sampled_from(("x", 0.0, -0.0, 1.0, 0, 1)), min_size=8, max_size=8))
def test_one_form_computes_what_all_calls_do(drawn: list[str | float | int]) -> None:
    """The index of a call equals a number, 0 equals -0, and their quotients tell them apart."""
    pairs = zip(drawn[::2], drawn[1::2], strict=True)
    calls = (
        FunctionCall("exp", ("x",)),
        FunctionCall("neg", ("x",)),
        *(FunctionCall("div", pair) for pair in pairs),
    )
    values = {"x": torch.tensor([0.25, -3.0], dtype=torch.float64)}
    results = tuple(range(len(calls)))
    found = Expression.of(calls, results).evaluate(values)
    torch.testing.assert_close(
        [one.expand(2) for one in found],
        [one.expand(2) for one in Expression(calls, results).evaluate(values)],
        rtol=0, atol=0, equal_nan=True,
    )  # fmt: skip


@given(programs())
def test_the_text_of_any_program_is_its_own(drawn: Expression) -> None:
    program = Expression.of(drawn.calls, drawn.results)
    again = Expression.parse(program.text)
    assert again.text == program.text
    assert str(again.constants("fp16")) == str(program.constants("fp16"))


def test_calls_that_are_the_same_are_one() -> None:
    program = Expression.parse("a = exp(x); b = exp(x); a * b + log(1)")
    assert program.text == "t0 = exp(x); t0 * t0 + 0"
    assert Expression.parse("exp(x) * exp(x) + 0.0") == program
    assert Expression.parse("nan * x") == Expression.parse("nan * x")


def test_a_call_is_not_the_number_of_its_place() -> None:
    """In Python 0 equals 0.0: the two gradients of `torch.where` were merged."""
    text = "t0 = x + a; where(b, t0, 0) + -where(b, 0, t0)"
    assert Expression.parse(text).text == text
    assert Expression.parse("t0 = exp(x); t0 - 0, t0 - t0") != Expression.parse(
        "t0 = exp(x); t0 - t0, t0 - t0"
    )
    assert Expression.parse("x / 0") != Expression.parse("x / -0.0")


def test_programs_are_put_into_each_other() -> None:
    gate = Expression.parse("x * g")
    assert gate.substitute({"g": Expression.parse("sigmoid(y)")}).text == "x * sigmoid(y)"
    assert gate.rename({"g": "x", "x": "g"}).text == "g * x"
    assert IDENTITY.concat(gate).text == "x, x * g"
    assert IDENTITY.is_identity and not gate.is_identity


def test_what_depends_on_some_inputs_alone_is_parted() -> None:
    program = Expression.parse("p - rate / (1 - beta) * g, beta * t0 + rate, rate")
    once, names, rest = program.split_invariant(("rate", "beta"))
    assert once.text == "rate / (1 - beta), beta, rate" and names == ("t1", "t2", "t3")
    assert rest.text == "p - t1 * g, t2 * t0 + t3, t3"
    x = {name: torch.randn(3, dtype=torch.float64) for name in program.inputs}
    again = rest.evaluate({**x, **dict(zip(names, once.evaluate(x), strict=True))})
    assert all(map(torch.equal, again, program.evaluate(x)))
    assert Expression.parse("p - g").split_invariant(())[2].text == "p - g"


@pytest.mark.parametrize(
    ("text", "divided"),
    [
        ("(x - a) * 2 * s * 0.5", "(x - a) * 4"),
        ("where(x < 0, -s * 2, s * x)", "where(x < 0, -2, x) * 4"),
        ("x / 3 * s + s", "(x / 3 + 1) * 4"),
        ("s * 2 * x", "x * 8"),
        ("s * s", None),
        ("s + x", None),
        ("exp(s) * x", None),
        ("x", None),
    ],
)
def test_a_factor_is_found_wherever_it_stands(text: str, divided: str | None) -> None:
    found = Expression.parse(text).divided_by("s")
    assert (None if found is None else found.times(4)) == (
        None if divided is None else Expression.parse(divided)
    )


def test_ten_thousand_calls_are_none_too_many() -> None:
    calls = [FunctionCall("exp", ("x",)), *(FunctionCall("add", (place, 1.0)) for place in range(10_000))]
    assert len(Expression.of(calls, (10_000,)).calls) == 10_001


@pytest.mark.parametrize(
    "text",
    ["", "x +", "import os", "x = 1", "f(x)", "exp(x, x)", "x.y", "a < b < c", "'x'", "exp(x=1)", "True"],
)
def test_what_is_no_expression_is_said(text: str) -> None:
    with pytest.raises(UnsupportedError):
        Expression.parse(text)


def test_every_function_has_a_kernel_of_its_name() -> None:
    source = (KERNELS / "common" / "functions.cuh").read_text()
    assert sorted(re.findall(r"^FUNCTION\((\w+)\)", source, re.MULTILINE)) == sorted(FUNCTIONS)


SOURCE = """
#include "common/expression.cuh"
extern "C" __global__ void run(const float* values, float* y, int elements) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= elements) return;
    float in[EXPRESSION_INPUTS], out[EXPRESSION_RESULTS];
    for (int i = 0; i < EXPRESSION_INPUTS; ++i) in[i] = values[i * elements + at];
    evaluate(out, in);
    for (int i = 0; i < EXPRESSION_RESULTS; ++i) y[i * elements + at] = out[i];
}
"""


def _named(function: str, difference: str) -> str:
    return f"{function}: {difference}"


@pytest.mark.parametrize("fast", [False, True], ids=["exact", "fast"])
def test_every_function_is_computed_as_pytorch_does(fast: bool, tmp_path: pathlib.Path) -> None:
    source = tmp_path / "run.cu"
    source.write_text(SOURCE)
    values = torch.tensor(
        [0.0, -0.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.05, -0.09, -3.0, 3.0, 19.0, -4.1, -30.0, 7.0, float("nan")]
    )
    names = ("a", "b", "c")
    grid = torch.cartesian_prod(values, values)
    inputs = torch.stack([grid[:, 0], grid[:, 1], grid.sum(1) / 3])
    program = Expression.of((), ())
    for name, function in FUNCTIONS.items():
        program = program.concat(Expression.apply(name, *names[: function.arity]))
    order = [names.index(one) for one in program.inputs]
    given = inputs[order].contiguous()
    y = torch.empty(len(program.results), len(grid))
    call = KernelCall(
        Program.of(str(source), "run", program.constants("fp16" if fast else "fp32")), (2, 1, 1), (128, 1, 1),
        (Buffer("values"), Buffer("y"), len(grid)),
    )  # fmt: skip
    bind(Recipe((call,)), {"values": given, "y": y})()
    exact = program.evaluate(dict(zip(names, inputs.double(), strict=True)))
    for name, got, wanted in zip(FUNCTIONS, y, exact, strict=True):
        fitting = wanted.float().double().expand(len(grid))  # beyond fp32 is infinity
        torch.testing.assert_close(
            got.double(), fitting, rtol=2e-5, atol=1e-5 if fast else 2e-6, equal_nan=True,
            msg=partial(_named, name),
        )  # fmt: skip


PAIRS = """
#include "common/functions.cuh"
extern "C" __global__ void run(const float* values, float* y) {
    const float a = values[2 * threadIdx.x], b = values[2 * threadIdx.x + 1];
    float both[2];
%s}
"""
PAIR = """    of::%s_pair(both, a, b);
    for (int i = 0; i < 2; ++i) y[2 * (blockDim.x * %d + threadIdx.x) + i] = both[i];
"""


def test_two_at_once_leave_each_other_alone(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "run.cu"
    source.write_text(PAIRS % "".join(PAIR % (name, number) for number, name in enumerate(PAIRED)))
    each = torch.tensor([0.0, 1.5, -3.0, -40.0, -100.0, -1e30, 60.0, 1e30, float("nan")])
    values = torch.cartesian_prod(each, each).contiguous()
    y = torch.empty(len(PAIRED), *values.shape)
    call = KernelCall(
        Program.of(str(source), "run", {"FAST_FUNCTIONS": True}), (1, 1, 1), (len(values), 1, 1),
        (Buffer("values"), Buffer("y")),
    )  # fmt: skip
    bind(Recipe((call,)), {"values": values, "y": y})()
    for name, found in zip(PAIRED, y, strict=True):
        expected = FUNCTIONS[name].compute(values.double()).float()
        torch.testing.assert_close(
            found, expected, rtol=2e-5, atol=1e-5, equal_nan=True, msg=partial(_named, name)
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x * tanh(softplus(x))", "mish(x)"),
        ("t0 = x * 2 + 1; tanh(softplus(t0)) * t0 - 3", "mish(x * 2 + 1) - 3"),
        ("x * tanh(softplus(y))", "x * tanh(softplus(y))"),
        ("t0 = tanh(softplus(x)); t0 * x, t0", "t0 = tanh(softplus(x)); t0 * x, t0"),
    ],
)
def test_mish_is_recognized(text: str, expected: str) -> None:
    found = Expression.parse(text)
    assert found.text == expected
    x, y = torch.linspace(-30, 30, 99, dtype=torch.float64), torch.ones(99, dtype=torch.float64)
    calls = {"softplus": torch.nn.functional.softplus, "tanh": torch.tanh}
    *statements, results = text.split(";")
    known = {"x": x, "y": y, **calls}
    exec("\n".join(part.strip() for part in statements), known)
    wanted = eval(results, known)
    for one, right in zip(
        found.evaluate({"x": x, "y": y}), wanted if "," in results else (wanted,), strict=True
    ):
        torch.testing.assert_close(one, right)
