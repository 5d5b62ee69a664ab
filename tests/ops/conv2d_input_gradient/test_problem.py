"""conv2d_input_gradient: its problem, and its sub-pixel phases."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from escalade.device.recipe import Buffer, Im2colMap, KernelCall, Recipe, Workspace
from escalade.errors import UnsupportedError
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.phases import axes, pixel_phases

parse = Conv2dInputGradientProblem.parse


def test_names_and_sizes() -> None:
    problem = parse("8to16_9x7_k3s2_b2_mask", "fp16", "nhwc")
    forward = Conv2dProblem(2, 8, 9, 7, 16, 3, 3, (2, 2), (1, 1), dtype="fp16", layout="nhwc")
    assert problem == Conv2dInputGradientProblem(forward, mask=True)
    assert problem.name == "8to16_9x7_k3s2_b2_mask"
    assert replace(problem, dtype="fp32", layout="nchw") == parse("8to16_9x7_k3s2_b2_mask")
    assert replace(problem, dtype="fp32").forward.dtype == "fp32"
    assert problem.flops == forward.flops
    assert problem.bytes == 2 * (forward.output_elements + 16 * 8 * 9 + 2 * forward.input_elements)
    assert problem.depth == 16 * 9 / 4


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("64to64", "the form is"),
        ("8to8_9_k3s1_b1_xpitch16", "xpitch16.*pitches"),
        ("8to8_9_k3s1_b1_res_mask", "supports one of"),
        ("8to8_9_k3s1_b1_relu_mask", "supports one of"),
    ],
)
def test_names_of_nothing(name: str, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        parse(name)


def test_fp8_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dtype 'fp8'"):
        parse("64to64_9_k3s1_b1", "fp8", "nhwc")


@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_classes_meet_every_tap_that_meets_them(stride: int, dilation: int) -> None:
    for size, taps, padding in product((1, 5, 8, 12), (1, 2, 3, 4, 7), range(4)):
        if size + 2 * padding > dilation * (taps - 1):  # otherwise the filter does not fit
            _check_classes(size, taps, stride, padding, dilation)


def _check_classes(size: int, taps: int, stride: int, padding: int, dilation: int) -> None:
    """One dimension by hand: pixel, tap and the row of y that combines them, each triple once."""
    rows = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
    meetings = (
        (row * stride + tap * dilation - padding, tap, row) for row in range(rows) for tap in range(taps)
    )
    found, pixels = [], []
    for axis in axes(size, rows, taps, stride, padding, dilation):
        assert axis.shift >= 0 and axis.padding >= 0
        assert not axis.taps or axis.shift + axis.count <= axis.padded_count
        for i in range(axis.count):
            pixel = axis.offset + i * stride
            pixels.append(pixel)
            for backwards in range(axis.taps):
                tap = axis.first + (axis.taps - 1 - backwards) * axis.step
                row = i + axis.corner + backwards * axis.dilation
                if 0 <= row < rows:
                    found.append((pixel, tap, row))
    assert sorted(found) == sorted(meeting for meeting in meetings if 0 <= meeting[0] < size)
    assert sorted(pixels) == list(range(size))


def test_the_classes_of_a_resnet() -> None:
    taps = [one.taps for one in pixel_phases(parse("64to128_56_k3s2_b1").forward)]
    assert taps == [1, 2, 2, 4]
    assert [one.taps for one in pixel_phases(parse("64to128_56_k1s2_b1").forward)] == [1, 0, 0, 0]
    (only,) = pixel_phases(parse("64to64_56_k3s1_b1").forward)
    assert only.whole and only.convolution.name == "64to64_56_k3s1_b1"
    assert [one.whole for one in pixel_phases(parse("8to8_6_k1s1p2_b1").forward)] == [False]


def test_a_recipe_over_other_buffers() -> None:
    problem = Conv2dProblem.square(64, 64, 9, 3, dtype="fp16", layout="nhwc")
    rung = Conv2dOperation.ladder.rung("producer_consumer")
    moved = rung.recipe(problem, rung.configs(problem)[0]).remap(
        {"x": Buffer("gradient", 32), "y": Buffer("z")}, 2
    )
    (call,) = moved.steps
    assert isinstance(call, KernelCall) and call.lane == 2
    pixels = call.arguments[0]
    assert isinstance(pixels, Im2colMap) and pixels.buffer == Buffer("gradient", 32)
    assert Buffer("z") in call.arguments and Buffer("residual", optional=True) in call.arguments
    spaces = Recipe((), (Workspace("parts", 4), Workspace("others", 8))).remap({"parts": Buffer("parts3")})
    assert [space.name for space in spaces.workspaces] == ["parts3", "others"]
