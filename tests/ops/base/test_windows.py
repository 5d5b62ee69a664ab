"""Pixels covered by windows, and the minimum bytes that follow, against counting them one by one."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from escalade import ops
from escalade.ops.base.windows import touched


@pytest.mark.parametrize(("taps", "stride"), [*itertools.product((1, 2, 3, 5), (1, 2, 3, 4))])
def test_touched_pixels_are_those_of_all_windows(taps: int, stride: int) -> None:
    for size, padding, dilation in itertools.product(range(1, 12), range(3), (1, 2, 3)):
        reach = dilation * (taps - 1) + 1
        outputs = (size + 2 * padding - reach) // stride + 1
        if size + 2 * padding < reach:
            continue
        windows = [[o * stride - padding + t * dilation for t in range(taps)] for o in range(outputs)]
        expected = len({place for window in windows for place in window if 0 <= place < size})
        assert touched(size, outputs, taps, stride, padding, dilation) == expected


def needed(x: torch.Tensor, y: torch.Tensor) -> int:
    """Return the number of elements of x that the result depends on."""
    y.sum().backward()
    assert x.grad is not None
    return int((x.grad != 0).sum())


CONVOLUTIONS = [
    "8to16_9_k1s2_b2", "8to16_10_k1s2_b2_bias+relu", "4to4_11x7_k1s3_b3", "8to8_9_k3s1_b2", "8to8_10_k3s4p0_b1",
    "8to8_12_k2s3p0_b2_bias+res+relu", "8to8_13_k3s2d3_b1", "8to8_9_k3s1g8_b2",
]  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_convolution_and_its_weights_gradient_read_what_a_window_touches(name: str) -> None:
    conv2d, gradient = ops.operation("conv2d"), ops.operation("conv2d_weight_gradient")
    p = conv2d.parse(name)
    x = torch.ones(p.batch, p.channels, p.height, p.width, requires_grad=True)
    weight = torch.ones(p.filters, p.group_channels, p.filter_height, p.filter_width)
    read = needed(x, F.conv2d(x, weight, None, p.stride, p.padding, p.dilation, p.groups))
    residual = p.output_elements if p.residual else 0
    bias = p.filters if p.bias else 0
    assert p.bytes == 4 * (read + p.weight_elements + p.output_elements + residual + bias)
    backward = gradient.parse(name.partition("_bias")[0])
    assert backward.bytes == 4 * (read + p.output_elements + p.weight_elements)


@pytest.mark.parametrize("name", ["8_9_k1s2_b2", "8_11x8_k2s3_b1", "8_9_k3s2p1_b2", "8_10_k3s4_b2_ceil"])
def test_a_pool_reads_what_a_window_touches(name: str) -> None:
    p = ops.operation("max_pool2d").parse(name)
    windows = {
        (row * p.stride[0] - p.padding[0] + i, column * p.stride[1] - p.padding[1] + j)
        for row, column in itertools.product(range(p.output_height), range(p.output_width))
        for i, j in itertools.product(range(p.kernel[0]), range(p.kernel[1]))
    }
    read = sum(0 <= i < p.height and 0 <= j < p.width for i, j in windows) * p.batch * p.channels
    assert p.bytes == 4 * (read + p.output_elements)


@pytest.mark.parametrize(
    "name",
    ["1to4_13_k3_b2_relu_pool2", "2to4_14x11_k3p1_b1_pool4", "2to4_14x11_k3p1_b1_pool4c", "1to4_9_k2_b3"],
)
def test_a_pooled_convolution_reads_what_its_pools_depend_on(name: str) -> None:
    p = ops.operation("few_channels").parse(name)
    x = torch.ones(p.batch, p.channels, p.height, p.width, requires_grad=True)
    y = F.conv2d(x, torch.ones(p.filters, p.channels, p.filter_height, p.filter_width), None, 1, p.padding)
    pooled = F.avg_pool2d(y, p.pool, ceil_mode=p.ceil_mode)
    assert p.touched_elements == needed(x, pooled)


@pytest.mark.parametrize(
    "name",
    [
        "3to8_15_k3s2_fp32_nhwc_b2_relu_pool3s2p1",
        "3to8_17x12_k3s3p0_fp32_nhwc_b1",
        "3to8_15_k1s2_fp32_nhwc_b2",
    ],
)
def test_a_stem_reads_what_its_pools_depend_on(name: str) -> None:
    p = ops.operation("stem").parse(name)
    x = torch.ones(p.batch, p.channels, p.height, p.width, requires_grad=True)
    y = F.conv2d(
        x, torch.ones(p.filters, p.channels, p.filter_height, p.filter_width), None, p.stride, p.padding
    )
    pooled = F.avg_pool2d(y, *p.pool) if p.pool else y
    assert p.touched_elements == needed(x, pooled)
