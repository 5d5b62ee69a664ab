"""The notation of expressions: Python's, with its operators for the functions that have one."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from escalade.errors import UnsupportedError

Operand = str | float | int
"""An input by its name, a number (a float), or the result of an earlier call by its place (an int)."""
_INFIX = {
    "lt": ("<", 1), "le": ("<=", 1), "gt": (">", 1), "ge": (">=", 1), "eq": ("==", 1), "ne": ("!=", 1),
    "add": ("+", 2), "sub": ("-", 2), "mul": ("*", 3), "div": ("/", 3), "pow": ("**", 5),
}  # fmt: skip
"""Functions with an operator, and how strongly it binds."""
_NEGATIVE = 4
_WHOLE = 6
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne", ast.Add: "add",
    ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow",
}  # fmt: skip
_NUMBERS = {"inf": math.inf, "nan": math.nan}


@dataclass(frozen=True)
class Spelling:
    """A text, and how strongly what is outermost in it binds."""

    text: str
    binds: int = _WHOLE

    @staticmethod
    def of(operand: str | float) -> Spelling:
        """A name or a number."""
        if isinstance(operand, str):
            return Spelling(operand)
        return Spelling(
            f"{operand:g}" if float(f"{operand:g}") == operand else repr(operand),
            _WHOLE if math.copysign(1, operand) > 0 or math.isnan(operand) else _NEGATIVE,
        )

    def within(self, binds: int) -> str:
        """The text as a part of something that binds so strongly."""
        return self.text if self.binds >= binds else f"({self.text})"


def spell(function: str, operands: Sequence[Spelling]) -> Spelling:
    """A function of operands that are spelled already."""
    if function == "neg":
        return Spelling(f"-{operands[0].within(_NEGATIVE + 1)}", _NEGATIVE)
    if function not in _INFIX:
        return Spelling(f"{function}({', '.join(one.text for one in operands)})")
    sign, binds = _INFIX[function]
    left, right = operands
    # Comparisons would be chained, and ** groups from the right.
    first = left.within(binds + 1 if sign in ("**", "<", "<=", ">", ">=", "==", "!=") else binds)
    return Spelling(f"{first} {sign} {right.within(binds + 1)}", binds)


def syntax(
    text: str,
    enter: Callable[[str, tuple[Operand, ...]], int],
    look_up: Callable[[str], Operand],
    assign: Callable[[str, Operand], None],
) -> tuple[Operand, ...]:
    """The results of a text, whose calls are entered, and whose names are assigned and looked up, on the way."""

    def read(node: ast.expr) -> Operand:
        match node:
            case ast.Name(id=name):
                return _NUMBERS[name] if name in _NUMBERS else look_up(name)
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                return float(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = read(operand)
                return -inner if isinstance(inner, float) else enter("neg", (inner,))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return enter(_OPERATORS[type(op)], (read(left), read(right)))
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return enter(_OPERATORS[type(op)], (read(left), read(right)))
            case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
                return enter(function, tuple(map(read, arguments)))
        raise UnsupportedError(
            f"{text!r}: an expression has names, numbers, operators and calls of functions"
        )

    try:
        *statements, last = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnsupportedError(f"{text!r} is no expression such as x * sigmoid(x)") from error
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                assign(name, read(value))
            case _:
                raise UnsupportedError(f"{text!r}: what stands in front of the results is name = expression")
    if not isinstance(last, ast.Expr):
        raise UnsupportedError(f"{text!r} has no result; the last part of an expression is one")
    parts = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
    return tuple(map(read, parts))
