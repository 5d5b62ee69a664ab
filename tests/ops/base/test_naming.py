"""Patterns of problem names: every pattern prints a problem and parses it back, and nothing else is accepted."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from escalade.errors import UnsupportedError
from escalade.ops.base.naming import Codec, Named, NamePattern, joined


@dataclass(frozen=True)
class Toy(Named):
    NAME: ClassVar = NamePattern(
        "toy",
        r"{channels}_{height,width}[k{kernel}]_{mode:near|nearest}{up?up:down}[_eps{epsilon}]{relu?_relu}"
        r"{counted?:_inside}<_|+|{bias?bias}|[short{channels_of}s{stride}[i{size}]]|{tail?tail}>[({names})]"
        r"[\[{text:text}\]][_by{factor}]",
        {"size": lambda toy: (toy.height, toy.width)},
        names=joined(",", r"\w+", str),
        factor=Codec(r"\d+%", lambda text: int(text[:-1]) / 100, lambda factor: f"{round(100 * factor)}%"),
    )

    channels: int
    height: int
    width: int
    kernel: tuple[int, int] = (1, 1)
    mode: str = "near"
    up: bool = False
    epsilon: float = 1e-5
    relu: bool = False
    counted: bool = True
    bias: bool = False
    channels_of: int = 0
    stride: int = 1
    size: tuple[int, int] = (7, 9)
    tail: bool = False
    names: tuple[str, ...] = ()
    text: str = ""
    factor: float = 1.0
    dtype: str = "fp32"
    layout: str = "nchw"
    x_pitch: int = 0


def test_every_combination_is_read_back() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {"kernel": (3, 5)}, {"mode": "nearest", "up": True}, {"epsilon": 0.5}, {"relu": True, "counted": False},
        {"bias": True}, {"channels_of": 4, "stride": 2}, {"channels_of": 4, "size": (8, 8)}, {"tail": True},
        {"names": ("m", "v")}, {"text": "x * x"}, {"factor": 0.25}, {"x_pitch": 64},
    )  # fmt: skip
    names = set()
    for count in range(4):
        for chosen in itertools.combinations(changes, count):
            fields = {name: value for change in chosen for name, value in change.items()}
            toy = Toy(8, 7, 9, **fields)
            again = Toy.parse(toy.name)
            assert again.name == toy.name and again.size == toy.size and again.names == toy.names
            assert (again == toy) == (toy.text == "")  # spaces of an expression are dropped
            names.add(toy.name)
    assert len(names) == len({name.replace(" ", "") for name in names}) > 250


def test_names_look_like_this() -> None:
    assert Toy(8, 7, 9).name == "8_7x9_neardown"
    assert (
        Toy(8, 7, 7, size=(7, 7), bias=True, tail=True, channels_of=3).name
        == "8_7_neardown_bias+short3s1+tail"
    )
    assert Toy(8, 7, 9, tail=True, names=("m",), text="x * x").name == "8_7x9_neardown_tail(m)[x*x]"
    assert Toy.parse("8_7_neardown", "fp16").dtype == "fp16" and Toy.parse("8_7_neardown").layout == "nchw"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "8_7x9",
        "8_7x9_neardown_",
        "8_7x9_neardown_tail+bias",
        "8_7x9_neardown[]",
        "x8_7_neardown",
        "8_7_neardown ",
    ],
)
def test_other_names_are_refused_with_the_form(name: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape("_{mode}(up|down)[_eps{epsilon}]")):
        Toy.parse(name)
