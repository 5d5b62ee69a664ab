"""A pointwise program: functions of single elements in the order in which they are computed.

Its text is Python's notation: `x * sigmoid(x)`, or `t0 = x + residual; where(t0 > 0, t0, 0.1 * t0)` where something is
used twice, with commas between several results. Two programs that compute the same in the same way are equal.
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
from escalade.ops.expressions.text import Operand, Spelling, spell, syntax


def fast_functions(dtype: str) -> bool:
    """Whether the special-function unit's accuracy is enough: it is, for all but fp32's own."""
    return dtype != "fp32"


PAIRED = ("silu", "gelu", "gelu_tanh")
"""Functions that kernels have for two elements at once too, with fewer special functions: `silu_pair` and so on."""


def _keys(operands: tuple[Operand, ...]) -> tuple[object, ...]:
    """Keys that tell operands apart: in Python the place 0 equals the number 0.0, and 0.0 equals -0.0."""
    return tuple((float, one.hex()) if isinstance(one, float) else one for one in operands)


@dataclass(frozen=True, eq=False)
class Call:
    """A function of operands."""

    function: str
    operands: tuple[Operand, ...]

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.function, *_keys(self.operands)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Call) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@dataclass(frozen=True, eq=False)
class Expression:
    """Results computed from named inputs, element by element. Make one by `of`, `parse` or another's methods."""

    calls: tuple[Call, ...]
    results: tuple[Operand, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        return self.calls, _keys(self.results)

    @staticmethod
    def of(calls: Iterable[Call], results: Iterable[Operand]) -> Expression:
        """The program in its one form: no call twice, none that no result needs, none of numbers alone, and each as
        late as its first user is reached from the results."""
        return _ordered(tuple(calls), tuple(results))

    @staticmethod
    def apply(function: str, *operands: str | float) -> Expression:
        """One function of inputs and numbers."""
        return Expression.of((Call(function, operands),), (0,))

    @staticmethod
    def parse(text: str) -> Expression:
        """The program of a text; the inverse of `text`."""
        if not isinstance(text, str):
            raise UnsupportedError(
                f"an expression that is {type(text).__name__}: it is a text such as x * sigmoid(x)"
            )
        return _parsed(text)

    @cached_property
    def text(self) -> str:
        return _spelled(self)

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs, in the order in which they are first used."""
        operands = (*(one for call in self.calls for one in call.operands), *self.results)
        return tuple(dict.fromkeys(one for one in operands if isinstance(one, str)))

    @property
    def is_identity(self) -> bool:
        """Whether it is its one input."""
        return not self.calls and len(self.results) == 1 and isinstance(self.results[0], str)

    def rename(self, names: Mapping[str, str]) -> Expression:
        """The program with some of its inputs called otherwise."""
        return self.substitute({old: Expression((), (new,)) for old, new in names.items()})

    def substitute(self, values: Mapping[str, Expression]) -> Expression:
        """The program with inputs replaced by what others, of one result each, compute."""
        calls: list[Call] = []
        place: dict[str, Operand] = {}
        for name, value in values.items():
            (result,) = value.results
            start = len(calls)
            calls += (_moved(call, start) for call in value.calls)
            place[name] = result + start if isinstance(result, int) else result
        start = len(calls)

        def moved(operand: Operand) -> Operand:
            if isinstance(operand, str):
                return place.get(operand, operand)
            return operand + start if isinstance(operand, int) else operand

        calls += (Call(call.function, tuple(map(moved, call.operands))) for call in self.calls)
        return Expression.of(calls, tuple(map(moved, self.results)))

    def joined(self, other: Expression) -> Expression:
        """Both, with the results of one behind those of the other."""
        start = len(self.calls)
        moved = (_moved(call, start) for call in other.calls)
        more = (one + start if isinstance(one, int) else one for one in other.results)
        return Expression.of((*self.calls, *moved), (*self.results, *more))

    def times(self, number: float) -> Expression:
        """The program of one result with that times a number; numbers that it is multiplied by already are taken in."""
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
        return Expression.of((*self.calls, Call("mul", (result, number))), (len(self.calls),))

    def divided_by(self, name: str) -> Expression | None:
        """The program of one result which times an input is this one; None where that is not seen to be so."""
        calls = list(self.calls)
        found: dict[Operand, Operand | None] = {name: 1.0}
        """What depends on the input, divided by it."""

        def divided(operand: Operand) -> Operand | None:
            if isinstance(operand, float):
                return None if operand else operand
            return found.get(operand)

        for place, call in enumerate(self.calls):
            depends = [not isinstance(one, float) and one in found for one in call.operands]
            if not any(depends):
                continue
            operands = _divided(call, depends, [divided(one) for one in call.operands])
            if operands is None:
                found[place] = None
            elif call.function == "mul" and isinstance(operands[0], float) and operands[0] == 1.0:
                found[place] = operands[1]
            else:
                found[place] = len(calls)
                calls.append(Call(call.function, operands))
        (result,) = self.results
        quotient = None if isinstance(result, float) else found.get(result)
        return None if quotient is None else Expression.of(calls, (quotient,))

    def parted(self, names: Iterable[str]) -> tuple[Expression, tuple[str, ...], Expression]:
        """What depends on these inputs alone and can be computed once, the names of its results, and the rest, a
        program of those and of the other inputs."""
        alone: set[str | int] = set(names)
        for place, call in enumerate(self.calls):
            if all(isinstance(one, float) or one in alone for one in call.operands):
                alone.add(place)
        taken = [
            *(one for place, call in enumerate(self.calls) if place not in alone for one in call.operands),
            *self.results,
        ]
        once = tuple(dict.fromkeys(one for one in taken if not isinstance(one, float) and one in alone))
        called: dict[Operand, str] = {}
        for one in once:
            called[one] = _free_name(len(called), {*self.inputs, *called.values()})

        def renamed(one: Operand) -> Operand:
            return one if isinstance(one, float) else called.get(one, one)

        calls = (Call(call.function, tuple(map(renamed, call.operands))) for call in self.calls)
        rest = Expression.of(calls, map(renamed, self.results))
        return Expression.of(self.calls, once), tuple(called.values()), rest

    def evaluate(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results by PyTorch, in the type of the inputs, which are broadcast against each other."""
        like = next(iter(inputs.values()))
        made: list[torch.Tensor] = []

        def value(operand: Operand) -> torch.Tensor:
            if isinstance(operand, str):
                return inputs[operand]
            if isinstance(operand, int):
                return made[operand]
            # Made where it is used: a CUDA graph that is being recorded takes nothing from the CPU's memory.
            return torch.full((), operand, dtype=like.dtype, device=like.device)

        for call in self.calls:
            made.append(FUNCTIONS[call.function].compute(*map(value, call.operands)))
        return tuple(map(value, self.results))

    def constants(self, dtype: str) -> dict[str, Constant]:
        """What `kernels/common/expression.cuh` leaves open, for results at the precision of a dtype."""
        lines, results = self.statements({name: f"in[{number}]" for number, name in enumerate(self.inputs)})
        lines += [f"out[{number}] = {result};" for number, result in enumerate(results)]
        return {
            "EXPRESSION": Macro(" ".join(lines)),
            "EXPRESSION_INPUTS": max(len(self.inputs), 1),
            "EXPRESSION_RESULTS": len(self.results),
            "FAST_FUNCTIONS": fast_functions(dtype),
        }

    def statements(self, places: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """The program in C++, and its results there, of inputs that are to be found at these places."""

        def spelled(operand: Operand) -> str:
            if isinstance(operand, str):
                return places[operand]
            return f"t{operand}" if isinstance(operand, int) else _literal(operand)

        lines = [
            f"const float t{number} = of::{call.function}({', '.join(map(spelled, call.operands))});"
            for number, call in enumerate(self.calls)
        ]
        return lines, [spelled(result) for result in self.results]

    def pair_constants(self) -> dict[str, Constant]:
        """What `evaluate_pair` of `kernels/common/expression.cuh` leaves open; nothing where two gain nothing by it."""
        if not any(call.function in PAIRED for call in self.calls):
            return {}
        place = {name: number for number, name in enumerate(self.inputs)}

        def spelled(operand: Operand, which: int) -> str:
            if isinstance(operand, str):
                return f"in[{which}][{place[operand]}]"
            return f"t{operand}[{which}]" if isinstance(operand, int) else _literal(operand)

        lines = []
        for number, call in enumerate(self.calls):
            first, second = (", ".join(spelled(one, which) for one in call.operands) for which in (0, 1))
            if call.function in PAIRED:
                lines.append(f"float t{number}[2]; of::{call.function}_pair(t{number}, {first}, {second});")
            else:
                lines.append(
                    f"const float t{number}[2] = {{of::{call.function}({first}), of::{call.function}({second})}};"
                )
        for which in (0, 1):
            lines += [f"out[{which}][{n}] = {spelled(one, which)};" for n, one in enumerate(self.results)]
        return {"EXPRESSION_PAIR": Macro(" ".join(lines))}

    def __str__(self) -> str:
        return self.text


IDENTITY = Expression((), ("x",))


def _divided(
    call: Call, depends: Sequence[bool], own: Sequence[Operand | None]
) -> tuple[Operand, ...] | None:
    """The operands of which a function is what it is now, divided by what some of them depend on; None if there are
    none. `own` are its operands divided by that."""
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


def _moved(call: Call, start: int) -> Call:
    operands = (one + start if isinstance(one, int) else one for one in call.operands)
    return Call(call.function, tuple(operands))


def _ordered(calls: tuple[Call, ...], results: tuple[Operand, ...]) -> Expression:
    made: dict[Call, int] = {}
    places: dict[int, Operand] = {}

    def reach(wanted: Operand) -> Operand:
        """Calls may stand thousands deep: a stack of our own instead of Python's."""
        waiting = [wanted]
        while waiting:
            operand = waiting[-1]
            if not isinstance(operand, int) or operand in places:
                waiting.pop()
                continue
            call = calls[operand]
            missing = [one for one in call.operands if isinstance(one, int) and one not in places]
            if missing:
                waiting += reversed(missing)
                continue
            places[operand] = _entered(call, made, places)
            waiting.pop()
        return places[wanted] if isinstance(wanted, int) else wanted

    reached = tuple(map(reach, results))
    return Expression(tuple(made), reached)


def _entered(call: Call, made: dict[Call, int], places: Mapping[int, Operand]) -> Operand:
    """The place of a call whose operands have theirs; a number if they all are."""
    operands = tuple(places[one] if isinstance(one, int) else one for one in call.operands)
    numbers = [one for one in operands if isinstance(one, float)]
    if len(numbers) == len(operands):
        values = (torch.tensor(one, dtype=torch.float64) for one in numbers)
        return float(FUNCTIONS[call.function].compute(*values))
    return made.setdefault(Call(call.function, operands), len(made))


def _literal(number: float) -> str:
    if math.isnan(number):
        return "NAN"
    if abs(number) > 3.4028234663852886e38:
        return "INFINITY" if number > 0 else "-INFINITY"
    return f"{number!r}f"


def _spelled(expression: Expression) -> str:
    uses = Counter(one for call in expression.calls for one in call.operands if isinstance(one, int))
    uses.update(one for one in expression.results if isinstance(one, int))
    taken = set(expression.inputs)
    spelled: dict[int, Spelling] = {}
    statements: list[str] = []

    def operand(one: Operand) -> Spelling:
        return spelled[one] if isinstance(one, int) else Spelling.of(one)

    for place, call in enumerate(expression.calls):
        written = spell(call.function, [operand(one) for one in call.operands])
        if uses[place] > 1:
            name = _free_name(len(statements), taken)
            taken.add(name)
            statements.append(f"{name} = {written.text}")
            written = Spelling.of(name)
        spelled[place] = written
    statements.append(", ".join(operand(one).text for one in expression.results))
    return "; ".join(statements)


def _free_name(number: int, taken: set[str]) -> str:
    while f"t{number}" in taken:
        number += 1
    return f"t{number}"


@cache
def _parsed(text: str) -> Expression:
    calls: list[Call] = []
    named: dict[str, Operand] = {}

    def enter(function: str, operands: tuple[Operand, ...]) -> int:
        known = FUNCTIONS.get(function)
        if known is None:
            raise UnsupportedError(f"{text!r}: {function!r} is no function; there are {', '.join(FUNCTIONS)}")
        if known.arity != len(operands):
            raise UnsupportedError(f"{text!r}: {function} takes {known.arity} operands, not {len(operands)}")
        calls.append(Call(function, operands))
        return len(calls) - 1

    def look_up(name: str) -> Operand:
        return named.get(name, name)

    def assign(name: str, operand: Operand) -> None:
        named[name] = operand

    results = syntax(text, enter, look_up, assign)
    return Expression.of(calls, results)
