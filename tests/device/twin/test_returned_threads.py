"""Returned threads: the others need not wait for them at barriers and in collectives."""

from __future__ import annotations

import pytest
import torch

from escalade.device.twin import Order, TwinError, build
from tests.device.twin.support import ORDERS, launch, planted, report_of

LEAVING = r"""
#include "common/hopper.cuh"
extern "C" __global__ void leaving(const float* x, float* y, int stay, int lanes) {
    __shared__ float tile[128];
    const int i = threadIdx.x;
    tile[i] = x[i];
    if (i >= stay) return;
    __syncthreads();
    const int all = __syncthreads_and(1), count = __syncthreads_count(i % 2);
    float sum = tile[i] + tile[127 - i];
    if (i % 32 >= lanes) return;
    __syncwarp();
    sum += __shfl_sync(~0u, x[i], lanes - 1);
    y[i] = all ? sum + count : 0.f;
}
"""


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("stay", "lanes"), [(128, 32), (64, 32), (70, 5), (1, 1)])
def test_barriers_do_not_wait_for_threads_that_have_returned(order: Order, stay: int, lanes: int) -> None:
    x, y = torch.randn(128), torch.zeros(128)
    launch(build(LEAVING, "leaving", checks=True), 1, 128, (x, y, stay, lanes), order=order)
    at = torch.arange(128)
    source = x[(at // 32 * 32 + lanes - 1).clamp(max=127)]
    expected = x + x.flip(0) + source + stay // 2
    writes = (at < stay) & (at % 32 < lanes)
    torch.testing.assert_close(y, torch.where(writes, expected, 0))


WAITING = "if (i >= stay) return;\n    __syncthreads();"


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
def test_threads_that_wait_in_different_places_are_still_reported(order: Order) -> None:
    apart = planted(LEAVING, (WAITING, "if (i >= stay) __syncthreads(); else\n    __syncthreads();"))
    report = report_of(apart, "leaving", 1, 128, (torch.randn(128), torch.zeros(128), 64, 32), order=order)
    assert "wait in the one at kernel.cu:" in report
    warp = planted(
        LEAVING, (WAITING, "if (i >= stay) __syncwarp(); if (i >= stay || i < 32) __syncthreads();")
    )
    report = report_of(warp, "leaving", 1, 128, (torch.randn(128), torch.zeros(128), 64, 32), order=order)
    assert "wait in the one at kernel.cu:" in report


AROUND = r"""
extern "C" __global__ void around(const float* x, float* y, int come, int rounds) {
    const int i = threadIdx.x;
    for (int round = 0; round < rounds; ++round) {
        y[i] = x[i] + round;
        if (i >= come) RETURN;
        __syncthreads();
    }
    y[i] *= 2.f;
}
"""


@pytest.mark.parametrize("order", ORDERS[:2], ids=str)
def test_skipping_a_barrier_is_distinguished_from_returning_before_it(order: Order) -> None:
    """The first is an error on every card: threads that skip the barrier also run the code after it."""
    values = (torch.randn(96), torch.zeros(96), 40, 3)
    launch(build(planted(AROUND, ("RETURN", "return")), "around", checks=True), 1, 96, values, order=order)
    report = report_of(planted(AROUND, ("RETURN", "break")), "around", 1, 96, values, order=order)
    assert (
        "not all threads of the block arrive at that barrier" in report
        and "__syncthreads of kernel.cu:7" in report
    )


def test_a_barrier_with_a_number_of_threads_waits_for_them() -> None:
    counted = planted(LEAVING, (WAITING, "if (i >= stay) return;\n    named_barrier_sync(1, 128);"))
    with pytest.raises(TwinError, match=r"threads 0-63 wait at .*64 of 128 threads have arrived"):
        launch(build(counted, "leaving"), 1, 128, (torch.randn(128), torch.zeros(128), 64, 32))


def test_a_shuffle_from_a_lane_that_has_returned_is_reported() -> None:
    source = planted(LEAVING, ("lanes - 1)", "lanes)"))
    report = report_of(source, "leaving", 1, 128, (torch.randn(128), torch.zeros(128), 128, 5))
    assert "shuffles from lane 5, which is not among the lanes 0000001f" in report


def test_a_product_of_a_warp_that_has_lost_lanes_is_reported() -> None:
    source = planted(
        LEAVING,
        (
            "__syncwarp();",
            "float d[4] = {}; unsigned a[4] = {}, b[2] = {}; mma_m16n8k16_f16(d, a, b);",
        ),
    )
    report = report_of(source, "leaving", 1, 128, (torch.randn(128), torch.zeros(128), 128, 5))
    assert "the others have returned" in report
