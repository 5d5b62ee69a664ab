"""Names of problems: one pattern per kind of problem both spells a name and parses it.

A pattern is literal text with these parts:

    {batch}               an integer field, or two or four of them joined by x (`tuple[int, int]`: 56 if both are equal)
    {height,width}        two integer fields, spelled as one such pair
    {mode:nearest|bicubic}  a string field that is one of these words
    {expression:text}     the text of an expression, without its spaces
    {relu?_relu}          a boolean field: the text if it is true
    {down?down:up}        a boolean field: the first text if it is true, else the second
    [p{padding}]          optional: left out where its fields have their defaults
    <_|+|bias|res|relu>   a list: the parts that apply, with `_` in front of the first and `+` between two

Problems with a field such as `x_pitch` get `_xpitch64` at the end. The dtype and the layout are not part of a name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from escalade.errors import UnsupportedError
from escalade.ops.base.pitch import pitched_roles

NUMBER = r"[+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?"


@dataclass(frozen=True)
class Codec:
    """Spelling of one field: a regular expression without named groups, a reader and a writer."""

    pattern: str
    read: Callable[[str], Any]
    spell: Callable[[Any], str] = str


def joined(separator: str, pattern: str, read: Callable[[str], Any]) -> Codec:
    """Return the codec of a tuple whose items are joined by a separator."""

    def spell(values: Any) -> str:
        return separator.join(map(str, values))

    def read_all(text: str) -> tuple[Any, ...]:
        return tuple(map(read, text.split(separator)))

    return Codec(rf"{pattern}(?:{re.escape(separator)}{pattern})*", read_all, spell)


def _read_pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("x")
    return int(first), int(second or first)


def spell_pair(values: tuple[int, int]) -> str:
    """Return `56` for a square, `56x48` otherwise."""
    return str(values[0]) if values[0] == values[1] else f"{values[0]}x{values[1]}"


PAIR = Codec(r"\d+(?:x\d+)?", _read_pair, spell_pair)
TEXT = Codec(r"[^\]]+", str, lambda text: text.replace(" ", ""))
_BY_TYPE = {
    "int": Codec(r"\d+", int),
    "int | None": Codec(r"-?\d+", int),
    "float": Codec(NUMBER, float, lambda value: repr(float(value))),
    "float | None": Codec(NUMBER, float, lambda value: repr(float(value))),
    "str": Codec(r"[a-z0-9]+", str),
    "tuple[int, int]": PAIR,
    "tuple[int, int, int, int]": joined("x", r"-?\d+", int),
}


class _Part:
    """One part of a pattern: its regular expression, and how to spell and read it."""

    pattern: str
    form: str
    """The part as shown to users: `{field}`, with brackets around optional text."""

    def spell(self, problem: Any) -> str:
        raise NotImplementedError

    def read(self, found: re.Match[str], values: dict[str, Any]) -> None:
        """Add the fields that this part found."""


class _Literal(_Part):
    def __init__(self, text: str) -> None:
        self.text, self.form, self.pattern = text, text, re.escape(text)

    def spell(self, problem: Any) -> str:
        return self.text


class _Field(_Part):
    def __init__(self, names: tuple[str, ...], codec: Codec) -> None:
        self.names, self.codec = names, codec
        self.pattern = f"(?P<{names[0]}>{codec.pattern})"
        self.form = "x".join(f"{{{name}}}" for name in names)

    def spell(self, problem: Any) -> str:
        values = tuple(getattr(problem, name) for name in self.names)
        return self.codec.spell(values if len(values) > 1 else values[0])

    def read(self, found: re.Match[str], values: dict[str, Any]) -> None:
        text = found[self.names[0]]
        if text is not None:
            value = self.codec.read(text)
            values.update(zip(self.names, value if len(self.names) > 1 else (value,), strict=True))


class _Flag(_Part):
    def __init__(self, name: str, true: str, false: str) -> None:
        self.name, self.true, self.false = name, true, false
        texts = "|".join(re.escape(text) for text in (true, false) if text)
        self.pattern = f"(?P<{name}>{texts})" + ("" if true and false else "?")
        self.form = f"({true}|{false})" if true and false else f"[{true or false}]"

    def spell(self, problem: Any) -> str:
        return self.true if getattr(problem, self.name) else self.false

    def read(self, found: re.Match[str], values: dict[str, Any]) -> None:
        values[self.name] = (found[self.name] or "") == self.true


class _Sequence(_Part):
    def __init__(self, parts: tuple[_Part, ...]) -> None:
        self.parts = parts
        self.pattern = "".join(part.pattern for part in parts)
        self.form = "".join(part.form for part in parts)

    def spell(self, problem: Any) -> str:
        return "".join(part.spell(problem) for part in self.parts)

    def read(self, found: re.Match[str], values: dict[str, Any]) -> None:
        for part in self.parts:
            part.read(found, values)


class _Optional(_Part):
    def __init__(self, inner: _Sequence, defaults: Mapping[str, Any]) -> None:
        self.inner, self.defaults = inner, defaults
        self.names = [name for part in inner.parts if isinstance(part, _Field) for name in part.names]
        self.pattern, self.form = f"(?:{inner.pattern})?", f"[{inner.form}]"

    def spell(self, problem: Any) -> str:
        default = all(getattr(problem, name) == self._default(name, problem) for name in self.names)
        return "" if default else self.inner.spell(problem)

    def read(self, found: re.Match[str], values: dict[str, Any]) -> None:
        self.inner.read(found, values)
        for name in self.names:
            if name not in values:
                values[name] = self._default(name, SimpleNamespace(**values))

    def _default(self, name: str, problem: Any) -> Any:
        default = self.defaults[name]
        return default(problem) if callable(default) else default


class _List(_Part):
    def __init__(self, first: str, between: str, parts: tuple[_Part, ...]) -> None:
        self.first, self.between, self.parts = first, between, parts
        lead = rf"(?:{re.escape(between)}|(?<={re.escape(first)}))"
        items = "".join(f"(?:{lead}{_required(part)})?" for part in parts)
        self.pattern = f"(?:{re.escape(first)}(?=.){items})?"
        self.form = (
            f"[{first}{between.join(part.form.removeprefix('[').removesuffix(']') for part in parts)}]"
        )

    def spell(self, problem: Any) -> str:
        spelled = [text for part in self.parts if (text := part.spell(problem))]
        return self.first + self.between.join(spelled) if spelled else ""

    def read(self, found: re.Match[str], values: dict[str, Any]) -> None:
        for part in self.parts:
            part.read(found, values)


def _required(part: _Part) -> str:
    """Return the pattern of a part of a list; the list itself makes it optional."""
    return part.inner.pattern if isinstance(part, _Optional) else part.pattern.removesuffix("?")


class NamePattern:
    """The pattern of one kind of problem, compiled when the first name is spelled or parsed."""

    def __init__(
        self, kind: str, pattern: str, defaults: Mapping[str, Any] | None = None, **codecs: Codec
    ) -> None:
        """`kind` completes "does not name a ...". `defaults` overrides dataclass defaults, by value or as a function of
        the problem; `codecs` spell fields of other types."""
        self.kind, self.text, self._defaults, self._codecs = kind, pattern, dict(defaults or {}), codecs
        self._compiled: tuple[_Sequence, re.Pattern[str]] | None = None

    def spell(self, problem: Any) -> str:
        return self._parts(type(problem))[0].spell(problem)

    def read(self, name: str, kind: Any) -> dict[str, Any]:
        parts, expression = self._parts(kind)
        found = expression.fullmatch(name)
        if not found:
            raise UnsupportedError(f"{name!r} does not name a {self.kind}; the form is {parts.form}")
        values: dict[str, Any] = {}
        parts.read(found, values)
        return values

    def _parts(self, kind: Any) -> tuple[_Sequence, re.Pattern[str]]:
        if self._compiled is None:
            text = self.text + "".join(f"[_{role}pitch{{{role}_pitch}}]" for role in pitched_roles(kind))
            types = {field.name: str(field.type) for field in fields(kind)}
            defaults = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
            parts, rest = _Reader(types, defaults | self._defaults, self._codecs).sequence(text)
            assert not rest, f"unbalanced pattern {self.text!r}"
            self._compiled = parts, re.compile(parts.pattern)
        return self._compiled


@dataclass(frozen=True)
class _Reader:
    """Reads the text of a pattern."""

    types: Mapping[str, str]
    defaults: Mapping[str, Any]
    codecs: Mapping[str, Codec]

    def sequence(self, text: str, end: str = "") -> tuple[_Sequence, str]:
        """Return the parts up to one of the characters of `end`, and the text from there on."""
        parts: list[_Part] = []
        while text and text[0] not in (end or "\0"):
            if text[0] == "{":
                inner, _, text = text[1:].partition("}")
                parts.append(self._field(inner))
            elif text[0] == "[":
                optional, text = self.sequence(text[1:], "]")
                parts.append(_Optional(optional, self.defaults))
                text = text[1:]
            elif text[0] == "<":
                first, between, text = text[1:].split("|", 2)
                items: list[_Part] = []
                while text[0] != ">":
                    item, text = self.sequence(text, "|>")
                    items.append(item.parts[0] if len(item.parts) == 1 else item)
                    text = text.removeprefix("|")
                parts.append(_List(first, between, tuple(items)))
                text = text[1:]
            else:
                literal = re.match(r"\\.|[^\[\]{}<>|\\]", text)
                assert literal is not None, f"{text!r} in a pattern"
                parts.append(_Literal(literal[0][-1]))
                text = text[literal.end() :]
        return _Sequence(tuple(parts)), text

    def _field(self, inner: str) -> _Part:
        if "?" in inner:
            name, _, texts = inner.partition("?")
            true, _, false = texts.partition(":")
            return _Flag(name, true, false)
        name, _, kind = inner.partition(":")
        names = tuple(name.split(","))
        if kind == "text":
            codec = TEXT
        elif kind:
            words = sorted(kind.split("|"), key=len, reverse=True)
            codec = Codec("|".join(map(re.escape, words)), str)
        elif len(names) > 1:
            codec = PAIR
        else:
            codec = self.codecs.get(name) or _BY_TYPE[self.types[name]]
        return _Field(names, codec)


class Named:
    """A problem whose `NAME` pattern gives it a short, stable name, from which `parse` makes it again."""

    NAME: ClassVar[NamePattern]

    @cached_property
    def name(self) -> str:
        return self.NAME.spell(self)

    @classmethod
    def parse(cls, name: str, dtype: str = "", layout: str = "") -> Self:
        """Return the problem of a name, in the default dtype and layout unless they are given."""
        values = cls._fields(cls.NAME.read(name, cls))
        given = {"dtype": dtype, "layout": layout}
        return cls(**values, **{what: value for what, value in given.items() if value})

    @classmethod
    def _fields(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a problem from those of its name, where the two differ."""
        return values
