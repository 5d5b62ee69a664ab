"""Movements: names, refusals, any order and stride on either side, and which rung supports what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.choose.choice import choose
from escalade.ops.copy import COPY, CopyPart, CopyProblem, joined, peer, permuted, random_inputs, rolled

CPU = torch.device("cpu")
CHECKED = TwinOptions(order=Order(seed=1, late=True), checks=True)


def run(problem: CopyProblem, inputs: Mapping[str, torch.Tensor], rung: str | None = None) -> torch.Tensor:
    """The result on the twin, in memory filled with sevens."""
    chosen = choose(COPY, problem, CPU, rung)
    y = COPY.output(problem, CPU).fill_(7)
    bind(chosen.rung.recipe(problem, chosen.config), {**inputs, "y": y}, options=CHECKED)()
    return y


@st.composite
def problems(draw: st.DrawFn) -> CopyProblem:
    """A box of a dense tensor, partially skipped or reversed, to a box of another in any order."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple))
    steps = draw(st.tuples(*[st.sampled_from([1, 1, 2, -1])] * len(sizes)))
    axes = draw(st.permutations(range(len(sizes))))
    x_strides, x_first, whole = [0] * len(sizes), 0, 1
    for axis in reversed(range(len(sizes))):
        x_strides[axis] = whole * steps[axis]
        x_first += -min(0, steps[axis]) * (sizes[axis] - 1) * whole
        whole *= sizes[axis] * abs(steps[axis])
    y_strides, room = [0] * len(sizes), 1
    for axis in reversed(axes):
        y_strides[axis] = room
        room *= sizes[axis] + draw(st.sampled_from([0, 0, 2]))
    first = draw(st.integers(0, 3))
    part = CopyPart(0, sizes, tuple(x_strides), tuple(y_strides), x_first, first)
    return CopyProblem.of(room + first, [part], draw(st.sampled_from(["fp32", "fp16", "bf16", "uint8"])))


@given(problems())
def test_parse_is_the_inverse_of_name(problem: CopyProblem) -> None:
    assert CopyProblem.parse(problem.name, problem.dtype) == problem


@given(problems())
@settings(max_examples=4, deadline=None)
def test_every_element_goes_where_it_belongs_and_nothing_else_is_written(problem: CopyProblem) -> None:
    inputs = random_inputs(problem, Draw(CPU, 0))
    sevens = {name: torch.full_like(x, 7) for name, x in inputs.items()}
    around = peer(problem, sevens) != 7
    assert torch.equal(run(problem, inputs), torch.where(around, 7, peer(problem, inputs)))


def test_all_bits_are_moved_as_they_are() -> None:
    """Also bits of numbers that arithmetic would change."""
    problem = replace(permuted((2, 66, 40), (0, 2, 1)), dtype="bf16")
    inputs = random_inputs(problem, Draw(CPU, 3))
    inputs["x0"].view(torch.int16)[:4] = torch.tensor([0x7FA5, -1, 0x7F80, -32768])
    found, expected = run(problem, inputs), peer(problem, inputs)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(
    ("problem", "rung"),
    [
        (permuted((8, 196, 512), (0, 2, 1)), "tiled"),
        (permuted((8, 49, 3, 32), (0, 2, 3, 1)), "tiled"),
        (permuted((64, 8, 8), (0, 2, 1)), "vectorised"),
        (permuted((8, 4, 7, 4, 7, 96), (0, 1, 3, 2, 4, 5)), "vectorised"),
        (rolled((28, 28, 96), 3, 3), "vectorised"),
        (joined(64, (1, 1)), "vectorised"),
    ],
)
def test_matrices_that_fill_tiles_are_turned_in_them(problem: CopyProblem, rung: str) -> None:
    assert choose(COPY, replace(problem, dtype="fp16"), CPU).rung.name == rung


def test_each_part_moves_as_much_at_once_as_it_can() -> None:
    problem = replace(joined(64, (32, 8, 2, 6)), dtype="fp16")
    chosen = choose(COPY, problem, CPU)
    (call,) = chosen.rung.recipe(problem, chosen.config).steps
    assert {name: value for name, value in call.program.constants if name in ("VECTOR", "LEAST")} == {
        "VECTOR": 8,
        "LEAST": 2,
    }


def test_parts_beyond_those_of_a_launch_have_another() -> None:
    problem = joined(3, (1, 2) * 6)
    assert len(choose(COPY, problem, CPU).rung.recipe(problem, choose(COPY, problem, CPU).config).steps) == 2
    inputs = random_inputs(problem, Draw(CPU, 0))
    assert torch.equal(run(problem, inputs), peer(problem, inputs))


def test_dimensions_that_lie_together_are_one() -> None:
    assert permuted((2, 3, 4, 5), (0, 1, 2, 3)).parts[0].sizes == (120,)
    assert permuted((2, 3, 4, 5), (2, 3, 0, 1)).parts[0].sizes == (20, 6)
    assert CopyProblem.of(1, [CopyPart(0, (), (), ())]).parts[0].sizes == (1,)
    empty = CopyPart(0, (0, 3), (3, 1), (3, 1))
    assert CopyProblem.of(3, [empty, CopyPart(0, (3,), (1,), (1,))]).parts == (CopyPart(0, (3,), (1,), (1,)),)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (CopyPart(0, (4,), (1,), (1,), 0, 5), "parts must stay inside their buffers"),
        (CopyPart(0, (4,), (-1,), (1,), 2), "parts must stay inside their buffers"),
        (CopyPart(0, (2, 4), (4, 1), (2, 1)), "and elements must not overlap"),
        (CopyPart(0, (2, 4), (4, 1), (1, 2)), "and elements must not overlap"),
        (CopyPart(0, (2,) * 9, (1,) * 9, (1,) * 9), "1 to 8 dimensions"),
        (CopyPart(0, (2, 2), (2**31, 1), (2, 1)), "32 bits"),
    ],
)
def test_what_cannot_be_moved_is_refused_in_a_sentence(part: CopyPart, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        CopyProblem(8, (part,))


def test_a_movement_has_parts_and_no_batch() -> None:
    with pytest.raises(UnsupportedError, match="1 to 64"):
        CopyProblem(8, ())
    with pytest.raises(UnsupportedError, match="and its batch must be 1"):
        replace(joined(2, (1, 1)), batch=2)
    with pytest.raises(UnsupportedError, match="the form is"):
        CopyProblem.parse("8[x0]")
