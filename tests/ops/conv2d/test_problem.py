"""The convolution as a problem: names, shapes, limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from escalade.errors import UnsupportedError
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.draw import Draw
from escalade.ops.base.switches import round_to_tf32
from escalade.ops.conv2d import CONV2D, Conv2dProblem
from escalade.ops.conv2d.reference import exact, peer, random_inputs

CPU = torch.device("cpu")
PLAIN = Conv2dProblem.square(8, 16, 9, 3)


@st.composite
def problems(draw: st.DrawFn) -> Conv2dProblem:
    def size(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    groups = size(1, 3)
    shortcut, shortcut_stride = (size(1, 9), size(1, 3)) if draw(st.booleans()) else (0, 1)
    try:
        problem = Conv2dProblem(
            size(0, 3), groups * size(1, 4), size(1, 12), size(1, 12), groups * size(1, 4), size(1, 5), size(1, 5),
            (size(1, 3), size(1, 3)), (size(0, 3), size(0, 3)), (size(1, 2), size(1, 2)), groups,
            draw(st.sampled_from(["fp32", "tf32", "fp16", "bf16", "fp8"])), draw(st.sampled_from(["nchw", "nhwc"])),
            draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), shortcut, shortcut_stride,
            output=draw(st.sampled_from(["", "fp16"])),
        )  # fmt: skip
        if not shortcut:
            return problem
        height, width = problem.shortcut_size
        smaller = (height - size(0, shortcut_stride - 1), width - size(0, shortcut_stride - 1))
        return replace(problem, shortcut_size=smaller)
    except UnsupportedError:  # the filter is larger than the image
        assume(False)
        raise


@given(problems())
def test_parse_is_the_inverse_of_name(problem: Conv2dProblem) -> None:
    assert Conv2dProblem.parse(problem.name, problem.dtype, problem.layout) == problem


@given(problems(), problems())
def test_names_tell_problems_apart(first: Conv2dProblem, second: Conv2dProblem) -> None:
    alike = replace(second, dtype=first.dtype, layout=first.layout)
    assert (first.name == second.name) == (first == alike)


@given(problems())
def test_shapes_are_those_of_pytorch(problem: Conv2dProblem) -> None:
    p = problem
    inputs = random_inputs(p, Draw(CPU, 0))
    y = exact(p, inputs)
    assert y.shape == (p.batch, p.filters, p.output_height, p.output_width)
    assert p.output_elements == y.numel()
    assert p.input_elements == inputs["x"].numel()
    assert p.weight_elements == inputs["weight"].numel()
    if p.shortcut_channels:
        assert p.shortcut_elements == inputs["shortcut"].numel()
    assert (
        p.bytes <= p.traffic == sum(tensor.nbytes for tensor in inputs.values()) + y.numel() * p.output_bytes
    )


@given(problems())
def test_flops_count_every_product_and_sum(problem: Conv2dProblem) -> None:
    """Operations including padding, as usually counted."""
    p = problem
    products = p.group_channels * p.filter_height * p.filter_width + p.shortcut_channels
    assert p.flops == 2 * p.output_elements * products


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("64to64_56_k3s1_b256", Conv2dProblem.square(64, 64, 56, 3, batch=256)),
        ("3to64_224_k7s2_b1_bias+relu", Conv2dProblem.square(3, 64, 224, 7, stride=2, bias=True, relu=True)),
        ("1to4_86_k7s1p0_b10", Conv2dProblem.square(1, 4, 86, 7, batch=10, padding=0)),
        ("8to8_10_k5s1g8_b1", Conv2dProblem.square(8, 8, 10, 5, groups=8)),
        ("8to12_9x14_k1x7s1_b2", Conv2dProblem(2, 8, 9, 14, 12, 1, 7, padding=(0, 3))),
        (
            "128to128_28_k3s1_b32_bias+short64s2+relu",
            Conv2dProblem.square(
                128, 128, 28, 3, batch=32, bias=True, relu=True, shortcut_channels=64, shortcut_stride=2
            ),
        ),
        (
            "8to24_7_k3s1_b1_res+short40s2i13x14",
            Conv2dProblem.square(
                8, 24, 7, 3, residual=True, shortcut_channels=40, shortcut_stride=2, shortcut_size=(13, 14)
            ),
        ),
        ("4to4_9_k3s2x1p2x0d1x2_b1", Conv2dProblem(1, 4, 9, 9, 4, 3, 3, (2, 1), (2, 0), (1, 2))),
    ],
)
def test_names_are_stable(name: str, problem: Conv2dProblem) -> None:
    assert problem.name == name
    assert Conv2dProblem.parse(name) == problem


@pytest.mark.parametrize(
    "name",
    ["", "conv", "64to64", "64to64_56_k3s1", "64to64_56_k3s1_b1_", "64to64_56_k3s1_b1_gelu", "x64to64_56_k3s1_b1",
     "64to64_56_k3s1_b1 ", "64to64_56_k3s1_b1\n", "-1to64_56_k3s1_b1", "64to64_56_k3s1_b1_relu+relu",
     "64to64_56_k3s1_b1_relu+bias", "64to64_56_k3s1_b1_short64", "64to64_56_k3s1_b1_relu+short64s1",
     "64to64_56_k3s1_b1_biasrelu"],
)  # fmt: skip
def test_what_is_no_name_is_refused_with_the_form_of_one(name: str) -> None:
    with pytest.raises(UnsupportedError, match="the form is"):
        Conv2dProblem.parse(name)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch": -1}, "batch size -1"),
        ({"channels": 0}, "channels is 0"),
        ({"channels": -8}, "channels is -8"),
        ({"height": 0}, "height is 0"),
        ({"width": -3}, "width is -3"),
        ({"filters": 0}, "filters is 0"),
        ({"filter_height": 0}, "filter height is 0"),
        ({"filter_width": -1}, "filter width is -1"),
        ({"stride": (0, 1)}, "stride is 0"),
        ({"stride": (1, -2)}, "stride is -2"),
        ({"dilation": (1, 0)}, "dilation is 0"),
        ({"padding": (-1, 0)}, "padding \\("),
        ({"groups": 0}, "groups is 0"),
        ({"groups": 3}, "8 channels and 16 filters cannot be split into 3 groups"),
        ({"dtype": "fp64"}, "dtype 'fp64'.*fp32, tf32, fp16, bf16"),
        ({"layout": "hwcn"}, "layout 'hwcn'.*nchw, nhwc"),
        ({"filter_height": 20}, "covers 20x3 pixels.*has only 11x11"),
        ({"dilation": (1, 9)}, "covers 3x19 pixels"),
        ({"shortcut_channels": -8}, "shortcut_channels=-8"),
        ({"shortcut_channels": 8, "shortcut_stride": 0}, "shortcut_stride=0"),
        (
            {"shortcut_channels": 8, "shortcut_size": (9, 8)},
            "a 9x8 shortcut with stride 1 .* 9x8 pixels, .* 9$",
        ),
        ({"shortcut_stride": 2}, "set shortcut_channels"),
        ({"shortcut_channels": 8, "stride": (0, 1)}, "stride is 0"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(PLAIN, **change)


@pytest.mark.parametrize(
    "change",
    [
        {"height": 2**16, "width": 2**16},
        {"channels": 2**30, "height": 2, "width": 2, "filter_height": 1, "filter_width": 1},
        {"filters": 2**31},
        {"batch": 2**31},
        {"batch": 2**25 + 1},
        {"padding": (2**31, 1)},
        {"padding": (2**30, 1), "stride": (2**30, 1)},
        {"shortcut_channels": 8, "shortcut_stride": 2**13},
    ],
)
def test_what_32_bits_cannot_count_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="32-bit"):
        replace(PLAIN, **change)


def test_a_large_batch_of_images_may_exceed_32_bits() -> None:
    problem = Conv2dProblem.square(64, 64, 224, 3, batch=1024)
    assert problem.input_elements > 2**31


def test_an_empty_batch_is_a_problem() -> None:
    empty = replace(PLAIN, batch=0)
    assert (empty.flops, empty.output_elements) == (0, 0)
    assert exact(empty, random_inputs(empty, Draw(CPU, 0))).shape == (0, 16, 9, 9)


# --- the reference's own parts


def test_tf32_rounding_keeps_ten_bits() -> None:
    values = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 0.0, 3.0e38, 1e-45])
    expected = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-10, 1.0, -1 - 2**-10, 0.0, 3.0e38, 0.0])
    rounded = round_to_tf32(values)
    assert torch.equal(rounded[:6], expected[:6])
    assert abs(rounded[6] - 3.0e38) <= 3.0e38 * 2**-11
    assert rounded[7] == 0


def test_tf32_rounding_leaves_what_is_no_number() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan")])
    rounded = round_to_tf32(values)
    assert torch.equal(rounded[:2], values[:2]) and rounded[2].isnan()


def test_pytorch_is_within_the_tolerance_it_sets(seed: int) -> None:
    for dtype, most in (("fp32", 1e-6), ("tf32", 1e-3), ("fp16", 1e-3), ("bf16", 1e-2)):
        problem = replace(PLAIN, dtype=dtype)
        inputs = random_inputs(problem, Draw(CPU, seed))
        assert 0 < relative_error(peer(problem, inputs), exact(problem, inputs)) < most


def test_the_error_of_anything_with_a_nan_is_within_no_tolerance() -> None:
    expected = torch.ones(4)
    assert not relative_error(torch.tensor([1.0, 1.0, 1.0, float("nan")]), expected) <= 1e30
    assert relative_error(torch.zeros(4), expected) == 1.0
    assert relative_error(torch.zeros(4), torch.zeros(4)) == 0.0


# --- prologues

POINTWISE = Conv2dProblem.square(6, 4, 5, 1, batch=3, dtype="fp16", bias=True)


@pytest.mark.parametrize("text", ["gate * x", "gate * silu(x)", "relu(gain * x + shift)", "gain * x + gate"])
def test_a_name_has_the_prologue_in_front_of_the_activation(text: str) -> None:
    problem = replace(POINTWISE, prologue=text, activation="silu(x)")
    assert problem.name == f"6to4_5_k1s1_b3_bias[pre:{text.replace(' ', '')}][silu(x)]"
    assert Conv2dProblem.parse(problem.name, "fp16") == problem


def test_there_is_one_way_to_say_a_prologue() -> None:
    assert replace(POINTWISE, prologue="x") == POINTWISE
    assert replace(POINTWISE, prologue="gate*( x )") == replace(POINTWISE, prologue="gate * x")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prologue": "gain * shift"}, "one expression in x"),
        ({"prologue": "x * bias"}, "gain and shift"),
        ({"prologue": "x, gate"}, "one expression"),
        ({"filter_width": 3}, "1x3 filter.* 1x1 filters without padding"),
        ({"padding": (0, 1)}, r"padding \(0, 1\)"),
        ({"groups": 2}, "groups=2"),
        ({"shortcut_channels": 8}, "a shortcut of 8 channels"),
    ],
)
def test_what_is_no_prologue_is_said(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(POINTWISE, **{"prologue": "gate * x", **change})


@pytest.mark.parametrize(
    ("text", "read"), [("gate * silu(x)", ["gate"]), ("shift - gain * x", ["gain", "shift"])]
)
def test_a_prologue_is_the_step_in_front_of_the_convolution(text: str, read: list[str]) -> None:
    problem = replace(POINTWISE, prologue=text, stride=(2, 2))
    inputs = random_inputs(problem, Draw(CPU, 0))
    assert [name for name in inputs if name not in ("x", "weight", "bias")] == read
    wide = {name: tensor.double() for name, tensor in inputs.items()}
    by_channel = {name: wide[name].view(-1, 6, 1, 1) for name in read}
    prepared = (
        by_channel["gate"] * torch.nn.functional.silu(wide["x"])
        if read == ["gate"]
        else by_channel["shift"] - by_channel["gain"] * wide["x"]
    )
    plain = replace(problem, prologue="")
    assert torch.equal(exact(problem, inputs), exact(plain, {**wide, "x": prepared}))
    stored = {**inputs, "x": prepared.float().half()}
    assert torch.equal(peer(problem, inputs), peer(plain, stored))
    assert problem.bytes - plain.bytes == sum(inputs[name].nbytes for name in read)


def test_a_rung_without_prologues_says_so() -> None:
    problem = replace(POINTWISE, prologue="gate * x")
    taking = {rung.name for rung in CONV2D.ladder if rung.supports(problem) is None}
    assert "direct" in taking and "tuned" not in taking
    assert "not 'gate * x'" in str(CONV2D.ladder.rung("tuned").supports(problem))
