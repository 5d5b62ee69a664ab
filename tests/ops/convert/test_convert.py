"""The conversion: names, limits, exact cases, and the forms that the engine needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from escalade.device.run import bind
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, operation
from escalade.ops.base.draw import Draw
from escalade.ops.choose.choice import choose
from escalade.ops.convert import ConvertProblem, empty_output, exact, peer, random_inputs

CPU = torch.device("cpu")
IMAGE = ConvertProblem(2, 3, 6, 10, padded_channels=4)


def run(problem: ConvertProblem, inputs: Mapping[str, torch.Tensor], rung: str | None = None) -> torch.Tensor:
    chosen = choose(OPERATIONS["convert"], problem, CPU, rung)
    y = empty_output(problem, CPU).fill_(float("nan"))
    bind(chosen.rung.recipe(problem, chosen.config), {**inputs, "y": y})()
    return y


@st.composite
def problems(draw: st.DrawFn) -> ConvertProblem:
    channels = draw(st.integers(1, 9))
    return ConvertProblem(
        draw(st.integers(0, 3)), channels, draw(st.integers(1, 12)), draw(st.integers(1, 12)),
        draw(st.sampled_from(["uint8", "fp32", "fp16", "bf16"])), draw(st.sampled_from(["nchw", "nhwc"])),
        draw(st.sampled_from(["fp32", "fp16", "bf16"])), draw(st.sampled_from(["nchw", "nhwc"])),
        channels + draw(st.integers(0, 3)), draw(st.booleans()), channels + draw(st.integers(0, 3)),
    )  # fmt: skip


@given(problems())
def test_parse_is_the_inverse_of_name(problem: ConvertProblem) -> None:
    assert ConvertProblem.parse(problem.name, problem.dtype, problem.layout) == problem


@given(problems())
def test_sizes_are_those_of_the_tensors(problem: ConvertProblem) -> None:
    inputs = random_inputs(problem, Draw(CPU, 0))
    y = empty_output(problem, CPU)
    unused = problem.stored_channels - problem.channels
    skipped = problem.batch * problem.pixels * unused * inputs["x"].element_size()
    assert problem.bytes == sum(t.nbytes for t in inputs.values()) - skipped + y.nbytes
    assert exact(problem, inputs).shape == peer(problem, inputs).shape == y.shape


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("3to4_224_fp32_nchw_b256", ConvertProblem(256, 3, 224, 224, padded_channels=4)),
        ("1_9x16_uint8_nchw_b1_norm", ConvertProblem(1, 1, 9, 16, "uint8", normalise=True)),
        (
            "58of116_5_fp16_nhwc_b2_dealt2x58",
            ConvertProblem(2, 58, 5, 5, "fp16", "nhwc", stored_channels=116, ways=2, step=58),
        ),
        ("70of72_5_fp16_nhwc_b2", ConvertProblem(2, 70, 5, 5, "fp16", "nhwc", stored_channels=72)),
    ],
)
def test_names_are_stable(name: str, problem: ConvertProblem) -> None:
    assert problem.name == name
    assert ConvertProblem.parse(name) == problem


@pytest.mark.parametrize(
    "name", ["", "3_224", "3to4_224_fp64_nchw_b1", "3to4_224_fp32_b1", "3to4_224_fp32_nchw_b1_"]
)
def test_what_is_no_name_is_refused_with_the_form_of_one(name: str) -> None:
    with pytest.raises(UnsupportedError, match="the form is"):
        ConvertProblem.parse(name)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": -1}, "batch is -1"),
        ({"channels": 0}, "channels is 0"),
        ({"width": 0}, "width is 0"),
        ({"padded_channels": 2}, "padded channels is 2: it must be at least 3"),
        ({"stored_channels": 1}, "stored channels is 1"),
        ({"ways": 0}, "ways is 0"),
        ({"step": 3}, "a step needs at least 2 ways"),
        ({"ways": 2, "step": 3}, "stored channels is 3: it must be at least 4"),
        ({"source": "int8"}, "source 'int8'.*uint8, fp32, fp16, bf16"),
        ({"source_layout": "chwn"}, "source layout 'chwn'"),
        ({"dtype": "tf32"}, "dtype 'tf32'.*fp32, fp16, bf16"),
        ({"layout": "hwcn"}, "layout 'hwcn'"),
        ({"height": 2**15, "width": 2**15}, r"fewer than 2\^31"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(IMAGE, **change)


def test_an_nchw_target_is_not_padded() -> None:
    with pytest.raises(UnsupportedError, match="an nchw target cannot be padded.*stored_channels"):
        choose(OPERATIONS["convert"], replace(IMAGE, layout="nchw"), CPU)


def test_the_preferred_rung_follows_the_channels() -> None:
    chosen = [
        choose(OPERATIONS["convert"], problem, CPU).rung.name
        for problem in (
            IMAGE,
            ConvertProblem(2, 64, 8, 8, "fp16", "nhwc", "fp16", "nchw"),
            ConvertProblem(2, 64, 8, 8, "fp16", "nhwc", "fp32", "nhwc"),
        )
    ]
    assert chosen == ["few_channels", "tiled", "naive"]


@pytest.mark.parametrize("rung", ["naive", "tiled", "few_channels"])
def test_added_channels_are_zeros_and_not_shifts(rung: str, seed: int) -> None:
    problem = replace(IMAGE, normalise=True, dtype="fp16", padded_channels=8)
    inputs = random_inputs(problem, Draw(CPU, seed))
    y = run(problem, inputs, rung)
    assert not y[:, 3:].any() and y[:, :3].all()
    torch.testing.assert_close(y.double(), exact(problem, inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rung", ["naive", "tiled", "few_channels"])
def test_what_is_no_number_stays_and_what_is_too_large_is_infinite(rung: str) -> None:
    problem = replace(IMAGE, dtype="fp16")
    x = random_inputs(problem, Draw(CPU, 0))["x"]
    x.view(-1)[:5] = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e5, -7e4])
    y = run(problem, {"x": x}, rung)
    wanted = torch.tensor([float("nan"), float("inf"), float("-inf"), float("inf"), float("-inf")]).half()
    torch.testing.assert_close(y[0, 0, 0, :5], wanted, rtol=0, atol=0, equal_nan=True)
    assert y.isfinite().sum() == y.numel() - 5


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("source", ["fp32", "fp16", "bf16", "uint8"])
def test_conversions_round_as_pytorch_does(source: str, layout: str, seed: int) -> None:
    problem = ConvertProblem(2, 5, 7, 9, source, "nhwc", "fp16", layout, stored_channels=8)
    inputs = random_inputs(problem, Draw(CPU, seed))
    assert torch.equal(run(problem, inputs), peer(problem, inputs))


def test_the_reference_takes_images_in_any_strides(seed: int) -> None:
    """As PyTorch tensors, with their memory layout as kernels see it."""
    problem = replace(IMAGE, source_layout="nhwc")
    x = torch.randn(2, 3, 6, 10).contiguous(memory_format=torch.channels_last)
    in_memory = x.permute(0, 2, 3, 1).reshape(2, 60, 3)
    assert torch.equal(exact(problem, {"x": x}), exact(problem, {"x": in_memory}))


def test_an_empty_batch_has_a_launch_that_does_nothing() -> None:
    problem = replace(IMAGE, batch=0)
    for rung in operation("convert").ladder.supporting(problem):
        assert run(problem, {"x": torch.empty(0, 3, 60)}, rung.name).shape == (0, 4, 6, 10)
