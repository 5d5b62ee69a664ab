"""A pointwise program: element-wise functions in evaluation order.

Its text is Python: `x * sigmoid(x)`, or `t0 = x + residual; where(t0 > 0, t0, 0.1 * t0)` where a value is used twice;
several results are separated by commas. Programs that compute the same in the same way are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from escalade.device.program import Constant, Macro
from escalade.errors import UnsupportedError
from escalade.ops.expressions.functions import FUNCTIONS
from escalade.ops.expressions.text import Operand, Spelling, parse_text, spell


def fast_functions(dtype: str) -> bool:
    """Return True where the special-function unit is accurate enough: for every dtype but fp32."""
    return dtype != "fp32"


PAIRED = ("silu", "gelu", "gelu_tanh")
"""Functions with a variant for two elements, `silu_pair` and so on, that needs fewer special-function calls."""


def _keys(operands: tuple[Operand, ...]) -> tuple[object, ...]:
    """Return keys that distinguish operands: in Python the index 0 equals the number 0.0, and 0.0 equals -0.0."""
    return tuple((float, one.hex()) if isinstance(one, float) else one for one in operands)


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """A function applied to operands."""

    function: str
    operands: tuple[Operand, ...]

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.function, *_keys(self.operands)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@dataclass(frozen=True, eq=False)
class Expression:
    """Results computed from named inputs, element-wise. Build one with `of`, `parse` or methods of another."""

    calls: tuple[FunctionCall, ...]
    results: tuple[Operand, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.calls, _keys(self.results)

    @staticmethod
    def of(calls: Iterable[FunctionCall], results: Iterable[Operand]) -> Expression:
        """Return the canonical program: duplicate and dead calls removed, constants folded, and calls in the order in
        which a depth-first walk from the results needs them."""
        calls, results = tuple(calls), tuple(results)
        return _canonical(_with_mish(calls, results), results)

    @staticmethod
    def apply(function: str, *operands: str | float) -> Expression:
        """Return one function of inputs and numbers."""
        return Expression.of((FunctionCall(function, operands),), (0,))

    @staticmethod
    def parse(text: str) -> Expression:
        """Parse a text; the inverse of `text`."""
        if not isinstance(text, str):
            raise UnsupportedError(
                f"an expression of type {type(text).__name__}: pass a str such as x * sigmoid(x)"
            )
        return _parsed(text)

    @cached_property
    def text(self) -> str:
        return _format(self)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs, in order of first use."""
        operands = (*(one for call in self.calls for one in call.operands), *self.results)
        return tuple(dict.fromkeys(one for one in operands if isinstance(one, str)))

    @property
    def is_identity(self) -> bool:
        """True if the only result is an input."""
        return not self.calls and len(self.results) == 1 and isinstance(self.results[0], str)

    def rename(self, names: Mapping[str, str]) -> Expression:
        """Rename inputs."""
        return self.substitute({old: Expression((), (new,)) for old, new in names.items()})

    def substitute(self, values: Mapping[str, Expression]) -> Expression:
        """Replace inputs by expressions of one result each."""
        calls: list[FunctionCall] = []
        replaced: dict[str, Operand] = {}
        for name, value in values.items():
            (result,) = value.results
            start = len(calls)
            calls += (_shifted(call, start) for call in value.calls)
            replaced[name] = result + start if isinstance(result, int) else result
        start = len(calls)

        def shifted(operand: Operand) -> Operand:
            if isinstance(operand, str):
                return replaced.get(operand, operand)
            return operand + start if isinstance(operand, int) else operand

        calls += (FunctionCall(call.function, tuple(map(shifted, call.operands))) for call in self.calls)
        return Expression.of(calls, tuple(map(shifted, self.results)))

    def concat(self, other: Expression) -> Expression:
        """Return a program with the results of both, ours first."""
        start = len(self.calls)
        shifted = (_shifted(call, start) for call in other.calls)
        more = (one + start if isinstance(one, int) else one for one in other.results)
        return Expression.of((*self.calls, *shifted), (*self.results, *more))

    def times(self, number: float) -> Expression:
        """Multiply the one result by a number, merging it with constant factors already there."""
        (result,) = self.results
        number = float(number)
        while isinstance(result, int) and (call := self.calls[result]).function in ("mul", "div"):
            rest, factor = call.operands
            if call.function == "mul" and isinstance(rest, float):
                rest, factor = factor, rest
            if not isinstance(factor, float):
                break
            result, number = rest, number * factor if call.function == "mul" else number / factor
        if number == 1.0:
            return Expression.of(self.calls, (result,))
        return Expression.of((*self.calls, FunctionCall("mul", (result, number))), (len(self.calls),))

    def divided_by(self, name: str) -> Expression | None:
        """Return q such that this program is q times the input `name`; None if no rule shows it."""
        calls = list(self.calls)
        found: dict[Operand, Operand | None] = {name: 1.0}  # operands that depend on the input, divided by it

        def divided(operand: Operand) -> Operand | None:
            if isinstance(operand, float):
                return None if operand else operand
            return found.get(operand)

        for index, call in enumerate(self.calls):
            depends = [not isinstance(one, float) and one in found for one in call.operands]
            if not any(depends):
                continue
            operands = _divided(call, depends, [divided(one) for one in call.operands])
            if operands is None:
                found[index] = None
            elif call.function == "mul" and isinstance(operands[0], float) and operands[0] == 1.0:
                found[index] = operands[1]
            else:
                found[index] = len(calls)
                calls.append(FunctionCall(call.function, operands))
        (result,) = self.results
        quotient = None if isinstance(result, float) else found.get(result)
        return None if quotient is None else Expression.of(calls, (quotient,))

    def split_invariant(self, names: Iterable[str]) -> tuple[Expression, tuple[str, ...], Expression]:
        """Split off what depends on these inputs alone and needs computing only once.

        Returns that program, the names of its results, and the rest as a program of them and the other inputs.
        """
        invariant: set[str | int] = set(names)
        for index, call in enumerate(self.calls):
            if all(isinstance(one, float) or one in invariant for one in call.operands):
                invariant.add(index)
        used = [
            *(one for i, call in enumerate(self.calls) if i not in invariant for one in call.operands),
            *self.results,
        ]
        once = tuple(dict.fromkeys(one for one in used if not isinstance(one, float) and one in invariant))
        named: dict[Operand, str] = {}
        for one in once:
            named[one] = _free_name(len(named), {*self.inputs, *named.values()})

        def renamed(one: Operand) -> Operand:
            return one if isinstance(one, float) else named.get(one, one)

        calls = (FunctionCall(call.function, tuple(map(renamed, call.operands))) for call in self.calls)
        rest = Expression.of(calls, map(renamed, self.results))
        return Expression.of(self.calls, once), tuple(named.values()), rest

    def evaluate(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Evaluate with PyTorch in the dtype of the inputs, with broadcasting."""
        like = next(iter(inputs.values()))
        made: list[torch.Tensor] = []

        def value(operand: Operand) -> torch.Tensor:
            if isinstance(operand, str):
                return inputs[operand]
            if isinstance(operand, int):
                return made[operand]
            # Created on the device: CUDA graph capture forbids copies from pageable host memory.
            return torch.full((), operand, dtype=like.dtype, device=like.device)

        for call in self.calls:
            made.append(FUNCTIONS[call.function].compute(*map(value, call.operands)))
        return tuple(map(value, self.results))

    def constants(self, dtype: str) -> dict[str, Constant]:
        """Return the parameters of `kernels/common/expression.cuh`, for results of that precision."""
        lines, results = self.statements({name: f"in[{number}]" for number, name in enumerate(self.inputs)})
        lines += [f"out[{number}] = {result};" for number, result in enumerate(results)]
        return {
            "EXPRESSION": Macro(" ".join(lines)),
            "EXPRESSION_INPUTS": max(len(self.inputs), 1),
            "EXPRESSION_RESULTS": len(self.results),
            "FAST_FUNCTIONS": fast_functions(dtype),
        }

    def statements(self, variables: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Return C++ statements and the expressions of the results, with inputs in these variables."""

        def spelled(operand: Operand) -> str:
            if isinstance(operand, str):
                return variables[operand]
            return f"t{operand}" if isinstance(operand, int) else _literal(operand)

        lines = [
            f"const float t{number} = {_call(call, list(map(spelled, call.operands)))};"
            for number, call in enumerate(self.calls)
        ]
        return lines, [spelled(result) for result in self.results]

    def pair_constants(self) -> dict[str, Constant]:
        """Return the parameter of `evaluate_pair` in `kernels/common/expression.cuh`; empty if nothing is paired."""
        if not any(call.function in PAIRED for call in self.calls):
            return {}
        index = {name: number for number, name in enumerate(self.inputs)}

        def spelled(operand: Operand, which: int) -> str:
            if isinstance(operand, str):
                return f"in[{which}][{index[operand]}]"
            return f"t{operand}[{which}]" if isinstance(operand, int) else _literal(operand)

        lines = []
        for number, call in enumerate(self.calls):
            first, second = ([spelled(one, which) for one in call.operands] for which in (0, 1))
            if call.function in PAIRED:
                operands = ", ".join((*first, *second))
                lines.append(f"float t{number}[2]; of::{call.function}_pair(t{number}, {operands});")
            else:
                lines.append(f"const float t{number}[2] = {{{_call(call, first)}, {_call(call, second)}}};")
        for which in (0, 1):
            lines += [f"out[{which}][{n}] = {spelled(one, which)};" for n, one in enumerate(self.results)]
        return {"EXPRESSION_PAIR": Macro(" ".join(lines))}

    def __str__(self) -> str:
        return self.text


IDENTITY = Expression((), ("x",))


def _call(call: FunctionCall, operands: Sequence[str]) -> str:
    """Return a call in C++. A quotient by a number also passes its reciprocal, for which it may multiply."""
    if call.function == "div":
        divisor = call.operands[1]
        if isinstance(divisor, float) and divisor and math.isfinite(1 / divisor):
            return f"of::div_by({', '.join((*operands, _literal(1 / divisor)))})"
    return f"of::{call.function}({', '.join(operands)})"


def _divided(
    call: FunctionCall, depends: Sequence[bool], own: Sequence[Operand | None]
) -> tuple[Operand, ...] | None:
    """Return operands that make the same function yield its result divided by the input; None if no rule applies.

    `depends` marks operands that depend on the input; `own` are the operands divided by it.
    """
    wanted: tuple[Operand | None, ...] = (None,)
    match call.function:
        case "mul" if not all(depends):
            wanted = own[depends.index(True)], call.operands[depends.index(False)]
        case "div" if not depends[1]:
            wanted = own[0], call.operands[1]
        case "where" if not depends[0]:
            wanted = call.operands[0], *own[1:]
        case "neg" | "add" | "sub":
            wanted = tuple(own)
    operands = tuple(one for one in wanted if one is not None)
    return operands if len(operands) == len(wanted) else None


def _shifted(call: FunctionCall, start: int) -> FunctionCall:
    operands = (one + start if isinstance(one, int) else one for one in call.operands)
    return FunctionCall(call.function, tuple(operands))


def _with_mish(calls: tuple[FunctionCall, ...], results: tuple[Operand, ...]) -> tuple[FunctionCall, ...]:
    """Replace x · tanh(softplus(x)) by mish(x), which takes one exponential instead of three special functions.

    Models often spell it out, because PyTorch has it since 1.9 only.
    """
    if not any(call.function == "softplus" for call in calls):
        return calls
    uses = Counter(
        one for one in (*results, *(one for call in calls for one in call.operands)) if isinstance(one, int)
    )

    def inner(operand: Operand, function: str) -> Operand | None:
        """Return the operand of a call of this function that nothing else reads."""
        if not isinstance(operand, int) or uses[operand] > 1 or calls[operand].function != function:
            return None
        return calls[operand].operands[0]

    def replaced(call: FunctionCall) -> FunctionCall:
        if call.function == "mul":
            for x, other in (call.operands, call.operands[::-1]):
                sum_of_exponentials = inner(other, "tanh")
                if sum_of_exponentials is not None and inner(sum_of_exponentials, "softplus") == x:
                    return FunctionCall("mish", (x,))
        return call

    return tuple(map(replaced, calls))


def _canonical(calls: tuple[FunctionCall, ...], results: tuple[Operand, ...]) -> Expression:
    made: dict[FunctionCall, int] = {}
    done: dict[int, Operand] = {}

    def visit(root: Operand) -> Operand:
        stack = [root]  # explicit: call chains may be thousands deep
        while stack:
            operand = stack[-1]
            if not isinstance(operand, int) or operand in done:
                stack.pop()
                continue
            call = calls[operand]
            missing = [one for one in call.operands if isinstance(one, int) and one not in done]
            if missing:
                stack += reversed(missing)
                continue
            done[operand] = _fold_or_add(call, made, done)
            stack.pop()
        return done[root] if isinstance(root, int) else root

    new_results = tuple(map(visit, results))
    return Expression(tuple(made), new_results)


def _fold_or_add(call: FunctionCall, made: dict[FunctionCall, int], done: Mapping[int, Operand]) -> Operand:
    """Return the index of a call whose operands are done; its value if they are all numbers."""
    operands = tuple(done[one] if isinstance(one, int) else one for one in call.operands)
    numbers = [one for one in operands if isinstance(one, float)]
    if len(numbers) == len(operands):
        values = (torch.tensor(one, dtype=torch.float64) for one in numbers)
        return float(FUNCTIONS[call.function].compute(*values))
    return made.setdefault(FunctionCall(call.function, operands), len(made))


def _literal(number: float) -> str:
    if math.isnan(number):
        return "NAN"
    if abs(number) > 3.4028234663852886e38:  # largest float
        return "INFINITY" if number > 0 else "-INFINITY"
    return f"{number!r}f"


def _format(expression: Expression) -> str:
    uses = Counter(one for call in expression.calls for one in call.operands if isinstance(one, int))
    uses.update(one for one in expression.results if isinstance(one, int))
    taken = set(expression.inputs)
    spelled: dict[int, Spelling] = {}
    statements: list[str] = []

    def operand(one: Operand) -> Spelling:
        return spelled[one] if isinstance(one, int) else Spelling.of(one)

    for index, call in enumerate(expression.calls):
        written = spell(call.function, [operand(one) for one in call.operands])
        if uses[index] > 1:
            name = _free_name(len(statements), taken)
            taken.add(name)
            statements.append(f"{name} = {written.text}")
            written = Spelling.of(name)
        spelled[index] = written
    statements.append(", ".join(operand(one).text for one in expression.results))
    return "; ".join(statements)


def _free_name(number: int, taken: set[str]) -> str:
    while f"t{number}" in taken:
        number += 1
    return f"t{number}"


@cache
def _parsed(text: str) -> Expression:
    calls: list[FunctionCall] = []
    named: dict[str, Operand] = {}

    def add_call(function: str, operands: tuple[Operand, ...]) -> int:
        known = FUNCTIONS.get(function)
        if known is None:
            raise UnsupportedError(f"{text!r}: unknown function {function!r}; known: {', '.join(FUNCTIONS)}")
        if known.arity != len(operands):
            raise UnsupportedError(f"{text!r}: {function} takes {known.arity} operands, not {len(operands)}")
        calls.append(FunctionCall(function, operands))
        return len(calls) - 1

    results = parse_text(text, add_call, named)
    return Expression.of(calls, results)
