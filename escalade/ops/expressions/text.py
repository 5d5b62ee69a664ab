"""Text of expressions: Python syntax, with operators for the functions that have one."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

from escalade.errors import UnsupportedError

Operand = str | float | int
"""An input (its name), a number (float), or the result of an earlier call (its index, int)."""
_INFIX = {
    "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1), "eq": ("==", 1), "ne": ("!=", 1),
    "add": ("+", 2), "sub": ("-", 2), "mul": ("*", 3), "div": ("/", 3), "pow": ("**", 5),
}  # fmt: skip
"""Functions with an operator, and its precedence."""
_NEGATIVE = 4
_ATOM = 6
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne", ast.Add: "add",
    ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow",
}  # fmt: skip
_NUMBERS = {"inf": math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Spelling:
    """A text, and the precedence of its outermost operator."""

    text: str
    precedence: int = _ATOM

    @staticmethod
    def of(operand: str | float) -> Spelling:
        """Spell a name or a number."""
        if isinstance(operand, str):
            return Spelling(operand)
        return Spelling(
            f"{operand:g}" if float(f"{operand:g}") == operand else repr(operand),
            _ATOM if math.copysign(1, operand) > 0 or math.isnan(operand) else _NEGATIVE,
        )

    def within(self, precedence: int) -> str:
        """Return the text, in parentheses if it binds less tightly than its context."""
        return self.text if self.precedence >= precedence else f"({self.text})"


def spell(function: str, operands: Sequence[Spelling]) -> Spelling:
    """Spell a function of spelled operands."""
    if function == "neg":
        return Spelling(f"-{operands[0].within(_NEGATIVE + 1)}", _NEGATIVE)
    if function not in _INFIX:
        return Spelling(f"{function}({', '.join(one.text for one in operands)})")
    sign, precedence = _INFIX[function]
    left, right = operands
    # Python chains comparisons, and ** is right-associative.
    strict = sign in ("**", "<", "<=", ">", ">=", "==", "!=")
    first = left.within(precedence + 1 if strict else precedence)
    return Spelling(f"{first} {sign} {right.within(precedence + 1)}", precedence)


def parse_text(
    text: str, add_call: Callable[[str, tuple[Operand, ...]], int], named: MutableMapping[str, Operand]
) -> tuple[Operand, ...]:
    """Return the results of a text; adds its calls with `add_call` and its assignments to `named`."""

    def read(node: ast.expr) -> Operand:
        match node:
            case ast.Name(id=name):
                return _NUMBERS[name] if name in _NUMBERS else named.get(name, name)
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return float(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = read(operand)
                return -inner if isinstance(inner, float) else add_call("neg", (inner,))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return add_call(_OPERATORS[type(op)], (read(left), read(right)))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return add_call(_OPERATORS[type(op)], (read(left), read(right)))
            case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
                return add_call(function, tuple(map(read, arguments)))
        raise UnsupportedError(
            f"{text!r}: an expression consists of names, numbers, operators and function calls"
        )

    try:
        *statements, last = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnsupportedError(f"{text!r} is not an expression; write one such as x * sigmoid(x)") from error
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                named[name] = read(value)
            case _:
                raise UnsupportedError(
                    f"{text!r}: only assignments `name = expression` may precede the results"
                )
    if not isinstance(last, ast.Expr):
        raise UnsupportedError(f"{text!r} has no result; its last part must be an expression")
    parts = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
    return tuple(map(read, parts))
