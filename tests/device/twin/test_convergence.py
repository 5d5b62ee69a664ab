"""Barriers and collectives that not all threads reach together: each mistake is reported in every order, and named."""

from __future__ import annotations

import re

import pytest
import torch

from escalade.device.twin import Order, build
from tests.device.twin.support import ORDERS, launch, line_of, report_of

KERNEL = r"""
#include "common/hopper.cuh"
enum Way { WAYS };
__device__ void meet() { __syncthreads(); }
__device__ __noinline__ float sum_of_pair(float value) { return value + __shfl_xor_sync(~0u, value, 1); }

template <int SIZE>
__device__ void body(const float* x, float* y, int way) {
    __shared__ float tile[SIZE];
    const int i = threadIdx.x, lane = i % 32, warp = i / 32;
    float v = x[i];
    tile[i] = v;
    switch (way) {
        // ---------------------------------------------------------------- trips
        case SAME_TRIPS:
        case MORE_TRIPS:
            for (int trip = 0; trip < 2 + (way == MORE_TRIPS && warp == 0); ++trip) {
                v += tile[i];
                __syncthreads();  // of the trips
            }
            break;
        case TRIPS_AND_NOTHING_BEHIND:
            for (int trip = 0; trip < 2 + (warp == 0); ++trip) {
                y[i] = tile[i] + trip;
                __syncthreads();  // and nothing behind it
            }
            return;
        case RETURN_ON_THE_WAY:
            for (int trip = 0; trip < 3; ++trip) {
                y[i] = tile[i] + trip;
                if (trip == 1 && warp) return;
                __syncthreads();  // and a return
            }
            return;
        case RETURN_BETWEEN_TWO_CALLS:  // of the same helper
            meet();
            y[i] = tile[SIZE - 1 - i];
            if (warp) return;
            meet();
            y[i] += tile[i];
            return;
        // ---------------------------------------------------------------- named barriers
        case NAMED:
            named_barrier_sync(1 + warp / 2, 64);
            v += tile[i ^ 32];
            break;
        case TOO_MANY_AT_A_NAMED_BARRIER:
            named_barrier_sync(1, SIZE - 32);  // too few
            break;
        case TWO_GROUPS_AT_A_NAMED_BARRIER:
            named_barrier_sync(1, SIZE / 2);  // for half of them
            break;
        case HALVES_OF_WARPS_AT_A_NAMED_BARRIER:
            if (lane < 16) named_barrier_sync(1, SIZE / 2);  // of whole warps
            break;
        case LANES_AT_TWO_CALLS:
            if (lane < 16) named_barrier_sync(1, SIZE);
            else named_barrier_sync(1, SIZE);  // the other lanes'
            break;
        // ---------------------------------------------------------------- collectives
        case MASKED:
            if (lane < 16) v += __shfl_xor_sync(0xFFFFu, v, 8);
            v += __shfl_xor_sync(~0u, v, 1) + __any_sync(~0u, v > 0.f);
            if (lane == 0) v += x[i];
            __syncwarp();
            v = sum_of_pair(v) + sum_of_pair(-v);
            break;
        case SHUFFLE_OF_HALF:
            if (lane < 16) v += __shfl_xor_sync(~0u, v, 8);  // of the whole warp
            break;
        case VOTE_OF_HALF:
            if (lane < 16) v += __any_sync(~0u, v > 0.f);  // a vote
            break;
        case WARP_BARRIER_OF_HALF:
            if (lane < 16) __syncwarp();  // for all
            break;
        case SHUFFLE_THEN_ANOTHER:
            if (lane < 16) v += __shfl_xor_sync(~0u, v, 8);
            v += __shfl_xor_sync(~0u, v, 1);  // the second
            break;
        case SHUFFLE_IN_BOTH_BRANCHES:
            if (lane < 16) v += __shfl_sync(~0u, v, 0);
            else v -= __shfl_sync(~0u, v, 0);  // the other branch
            break;
        case SHUFFLES_IN_ONE_LINE:
            v += lane < 16 ? __shfl_xor_sync(~0u, v, 8) : -__shfl_xor_sync(~0u, v, 4);  // one line
            break;
        case WARP_BARRIER_THEN_ANOTHER:
            if (lane < 16) __syncwarp();
            v += tile[i];
            __syncwarp();  // later
            break;
        case HELPER_OF_HALF:
            if (lane < 16) v = sum_of_pair(v);
            v = sum_of_pair(v);
            break;
        case SHUFFLES_BY_TRIPS:
            for (int trip = 0; trip < 1 + lane % 2; ++trip) v += __shfl_sync(~0u, v, lane);  // by trips
            break;
        case OTHER_MASKS:
            v += __shfl_sync(lane < 16 ? 0xFFFFu : ~0u, v, lane);  // two masks
            break;
        case PRODUCT_OF_HALF: {
            float d[4] = {};
            const u32 a[4] = {}, b[2] = {};
            if (lane < 16) mma_m16n8k16_f16(d, a, b);  // of half a warp
            v += d[0];
            break;
        }
        case MATRICES_OF_HALF: {
            u32 r[1] = {};
            __syncthreads();
            if (lane < 16) load_matrices(r, shared_address(tile));  // rows
            v += r[0];
        }
    }
    y[i] = v;
}
template <int SIZE>
__global__ void in_a_template(const float* x, float* y, int way) { body<SIZE>(x, y, way); }
extern "C" __global__ void kernel(const float* x, float* y, int way) { in_a_template<128>(x, y, way); }
"""
TRIPS = (
    r"arrives at this __syncthreads \d times, and thread \d+ of block \(0, 0, 0\), which has returned, .*: "
    "not all threads of the block make the same number of trips"
)
AROUND = "does after the .* what thread .* did without it: not all threads that it waits for arrive at it"
TOGETHER = "of the warp wait in .*: all lanes that a mask names arrive at one call"
CROWDED = "more than the {} threads that it counts arrive at it|more threads arrive at it than it counts"
WAYS = {
    "SAME_TRIPS": ("", ""),
    "MORE_TRIPS": (TRIPS, "// of the trips"),
    "TRIPS_AND_NOTHING_BEHIND": (TRIPS, "// and nothing behind it"),
    "RETURN_ON_THE_WAY": (TRIPS, "// and a return"),
    "RETURN_BETWEEN_TWO_CALLS": ("", ""),
    "NAMED": ("", ""),
    "TOO_MANY_AT_A_NAMED_BARRIER": (CROWDED.format(96), "// too few"),
    "TWO_GROUPS_AT_A_NAMED_BARRIER": (CROWDED.format(64), "// for half of them"),
    "HALVES_OF_WARPS_AT_A_NAMED_BARRIER": ("deadlock.* 64 of 64 threads have arrived", "// of whole warps"),
    "LANES_AT_TWO_CALLS": ("it counts whole warps, whose lanes arrive at it together", "// the other lanes'"),
    "MASKED": ("", ""),
    "SHUFFLE_OF_HALF": (AROUND, "// of the whole warp"),
    "VOTE_OF_HALF": (AROUND, "// a vote"),
    "WARP_BARRIER_OF_HALF": (AROUND, "// for all"),
    "SHUFFLE_THEN_ANOTHER": (TOGETHER, "// the second"),
    "SHUFFLE_IN_BOTH_BRANCHES": (TOGETHER, "// the other branch"),
    "SHUFFLES_IN_ONE_LINE": (TOGETHER, "// one line"),
    "WARP_BARRIER_THEN_ANOTHER": (TOGETHER, "// later"),
    "HELPER_OF_HALF": (TOGETHER, "sum_of_pair(float"),
    "SHUFFLES_BY_TRIPS": ("arrives at this __shfl_sync 2 times, and thread .* once", "// by trips"),
    "OTHER_MASKS": ("with mask ffffffff, where thread .* arrived with mask 0000ffff", "// two masks"),
    "PRODUCT_OF_HALF": ("mma by lanes 0000ffff: the others have returned", "// of half a warp"),
    "MATRICES_OF_HALF": ("by lanes 0000ffff: the others have returned", "// rows"),
}
SOURCE = KERNEL.replace("WAYS", ", ".join(WAYS))


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_threads_do_not_reach_together_is_reported_in_every_order(way: str) -> None:
    message, mark = WAYS[way]
    for order in (Order(), Order(seed=3), Order(seed=11, late=True)):
        values = (torch.randn(128), torch.zeros(128), list(WAYS).index(way))
        if not message:
            launch(build(SOURCE, "kernel", checks=True), 1, 128, values, order=order)
            continue
        report = report_of(SOURCE, "kernel", 1, 128, values, order=order)
        assert re.search(message, report, re.DOTALL) and f"kernel.cu:{line_of(SOURCE, mark)}" in report, (
            report
        )


def test_lanes_at_two_copies_of_a_call_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """g++ may duplicate a call, whose copies share its line; then the launch is repeated."""
    values = (torch.randn(128), torch.zeros(128), list(WAYS).index("HELPER_OF_HALF"))
    kernel = build(SOURCE, "kernel", checks=True)
    ways: list[tuple[str, str]] = []

    def same_lines(self: object, one: str, other: str) -> bool:
        ways.append((one, other))
        return True

    monkeypatch.setattr(type(kernel), "_same_lines", same_lines)
    launch(kernel, 1, 128, values)
    assert len(ways) == 1 and all("0x" in way for way in ways[0]) and values[1].all()


FULL = r"""
#include "common/hopper.cuh"
extern "C" __global__ void full(const float* x, float* y) {
    __shared__ float tile[128];
    const int i = threadIdx.x;
    tile[i] = x[i];
    named_barrier_sync(1, (blockDim.x + 31) / 32 * 32);
    y[i] = tile[(i + 32) % 64];
}
"""


def test_a_warp_that_is_not_full_counts_whole_at_a_named_barrier() -> None:
    for order in ORDERS[:2]:
        x, y = torch.randn(84), torch.zeros(84)
        launch(build(FULL, "full", checks=True), 1, 84, (x, y), order=order)
        assert torch.equal(y, x[(torch.arange(84) + 32) % 64])
