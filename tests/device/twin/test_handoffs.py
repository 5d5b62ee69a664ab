"""Handoffs between warps, asynchronous copies and CTAs of a cluster: each right in one way, and wrong in others.

The cases are those of Triton's ConSan for Hopper, in CUDA C++: before reading or writing a buffer, a thread must have
observed the barrier that signals its release.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from escalade.device.twin import Order, TwinError, build
from escalade.device.twin.tensor_map import MAP_BYTES, encode_tiled

HANDOFFS = r"""
#include "common/hopper.cuh"
enum Way { WAYS };
constexpr u32 BOX = 32 * 32 * 4;
extern "C" __global__ void handoff(__grid_constant__ const TensorMap map, const float* x, float* y, int way) {
    __shared__ __align__(1024) float buffer[2][32 * 32];
    __shared__ u64 barriers[6];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Two for the arrivals of one thread, two for a warp's, one for two warps'; the last is never initialized.
    const u32 copied = shared_address(barriers), also = copied + 8, one = copied + 16, two = copied + 24,
              both = copied + 32, nothing = copied + 40;
    const auto load = [&](int which, u32 bar) { tma_load_3d(shared_address(buffer[which]), map, bar, 0, 0, 0); };
    if (threadIdx.x == 0) {
        barrier_init(copied, 1), barrier_init(also, 1);
        barrier_init(one, 32), barrier_init(two, 32), barrier_init(both, 64);
        if (way == INITIALIZED_AGAIN) barrier_init(one, 32);
        fence_barrier_init();
    }
    if (warp < 2 && way < COPY) buffer[0][threadIdx.x] = x[threadIdx.x];
    fence_async_proxy();
    __syncthreads();
    float value = 0.f;
    switch (way) {
        // ---------------------------------------------------------------- between warps
        case STORE_WAIT_LOAD:
        case STORE_LOAD:
            if (warp == 0) buffer[0][lane] = 2.f, barrier_arrive(one);
            if (warp == 1 && way == STORE_WAIT_LOAD) barrier_wait(one, 0);
            if (warp == 1) value = buffer[0][lane];
            break;
        case LOAD_WAIT_STORE:
        case LOAD_STORE:
            if (warp == 0) value = buffer[0][lane], barrier_arrive(one);
            if (warp == 1 && way == LOAD_WAIT_STORE) barrier_wait(one, 0);
            if (warp == 1) buffer[0][lane] = 2.f;
            break;
        case TWO_BARRIERS:
        case WITHOUT_THE_FIRST:
        case WITHOUT_THE_SECOND:
            if (warp < 2) value = buffer[0][lane], barrier_arrive(warp ? two : one);
            if (warp == 2 && way != WITHOUT_THE_FIRST) barrier_wait(one, 0);
            if (warp == 2 && way != WITHOUT_THE_SECOND) barrier_wait(two, 0);
            if (warp == 2) buffer[0][lane] = 2.f;
            break;
        case ONE_BARRIER:
        case ARRIVES_TOO_SOON:
            if (warp == 1 && way == ARRIVES_TOO_SOON) barrier_arrive(both);
            if (warp < 2) value = buffer[0][lane];
            if (warp == 0 || (warp == 1 && way == ONE_BARRIER)) barrier_arrive(both);
            if (warp == 2) barrier_wait(both, 0), buffer[0][lane] = 2.f;
            break;
        case PRODUCERS_AND_CONSUMERS:  // each warp writes its half of a buffer, and reads the other's
        case ONE_CONSUMER_DOES_NOT_WAIT:
            if (warp == 2) break;
            buffer[1][threadIdx.x] = x[lane];
            barrier_arrive(warp ? two : one);
            if (warp || way == PRODUCERS_AND_CONSUMERS) barrier_wait(warp ? one : two, 0);
            value = buffer[1][threadIdx.x ^ 32];
            break;
        case FREED_FOR_A_WARP:  // by one of its lanes; all have read the same word
        case FREED_BEFORE_THE_OTHER_LANES_HAVE_READ:
            if (warp == 0) {
                value = buffer[0][0];  // the stage
                if (way == FREED_FOR_A_WARP) __syncwarp();
                if (lane == 0) barrier_arrive(also);
            }
            if (threadIdx.x == 32) {
                barrier_wait(also, 0);
                barrier_expect(copied, BOX), load(0, copied);
                barrier_wait(copied, 0);
            }
            break;
        // ---------------------------------------------------------------- barriers themselves
        case TWO_WAIT_FOR_EACH_OTHER:
            if (warp < 2) barrier_wait(warp ? one : two, 0), barrier_arrive(warp ? two : one);
            break;
        case TOO_FEW_ARRIVE:
            if (warp == 0 && lane) barrier_arrive(one);
            if (warp == 1) barrier_wait(one, 0);
            break;
        case TOO_MANY_ARRIVE:
            if (threadIdx.x == 0) barrier_expect(copied, 16), barrier_arrive(copied);
            break;
        case NEVER_INITIALIZED:
            if (warp == 0) barrier_arrive(nothing);
            break;
        case OVERWRITTEN:
            if (threadIdx.x == 0) barriers[2] = 7;
            __syncthreads();
            if (warp == 0) barrier_arrive(one);
            break;
        // ---------------------------------------------------------------- copies by TMA
        case COPY:
        case COPY_NOT_WAITED_FOR:
        case TOO_MANY_BYTES:
        case TOO_FEW_BYTES:
            if (threadIdx.x == 0) {
                barrier_expect(copied, way == TOO_MANY_BYTES ? BOX + 16 : way == TOO_FEW_BYTES ? BOX - 16 : BOX);
                load(0, copied);
            }
            if (way != COPY_NOT_WAITED_FOR) barrier_wait(copied, 0);
            value = buffer[0][threadIdx.x];
            barrier_wait(copied, 0);
            break;
        case TWO_COPIES:
        case THE_OTHERS_BARRIER:
            if (threadIdx.x == 0) {
                barrier_expect(copied, BOX), load(0, copied);
                barrier_expect(also, BOX), load(1, also);
            }
            barrier_wait(copied, 0);
            if (way == TWO_COPIES) barrier_wait(also, 0);
            value = buffer[1][threadIdx.x];
            barrier_wait(also, 0);
            break;
        case ONE_BARRIER_OF_TWO_COPIES:
        case OVERLAPPING_COPIES:
            if (threadIdx.x == 0) {
                barrier_expect(copied, 2 * BOX);
                load(0, copied), load(way == ONE_BARRIER_OF_TWO_COPIES, copied);
            }
            barrier_wait(copied, 0);
            value = buffer[0][threadIdx.x];
            break;
        case MULTICAST:
        case MULTICAST_NOT_WAITED_FOR:
            if (threadIdx.x == 0) barrier_expect(copied, BOX);
            cluster_sync();
            if (threadIdx.x == 0 && cluster_rank() == 0)
                tma_load_3d_multicast(shared_address(buffer[0]), map, copied, 0, 0, 0, 3);
            if (way == MULTICAST) barrier_wait(copied, 0);
            value = buffer[0][threadIdx.x];
            barrier_wait(copied, 0);
            break;
        // ---------------------------------------------------------------- cp.async
        case GROUPS:
        case TOO_FEW_GROUPS:
        case HANDED_ON:
        case HANDED_ON_TOO_SOON:
            for (int i = 0; i < 2; ++i) {
                copy_async_4(shared_address(&buffer[i][threadIdx.x]), x + threadIdx.x, true);
                copy_async_commit();
            }
            if (way == GROUPS || way == HANDED_ON) copy_async_wait<0>();
            if (way == TOO_FEW_GROUPS) copy_async_wait<1>();
            __syncthreads();
            value = buffer[1][way == GROUPS || way == TOO_FEW_GROUPS ? threadIdx.x : 95 - threadIdx.x];
            copy_async_wait<0>();
    }
    y[blockIdx.x * 96 + threadIdx.x] = value;
}
"""
PENDING = "in flight|nothing wrote"
WAYS = {
    "INITIALIZED_AGAIN": "where an mbarrier is in use",
    "STORE_WAIT_LOAD": "",
    "STORE_LOAD": "race",
    "LOAD_WAIT_STORE": "",
    "LOAD_STORE": "race",
    "TWO_BARRIERS": "",
    "WITHOUT_THE_FIRST": "race",
    "WITHOUT_THE_SECOND": "race",
    "ONE_BARRIER": "",
    "ARRIVES_TOO_SOON": "race",
    "PRODUCERS_AND_CONSUMERS": "",
    "ONE_CONSUMER_DOES_NOT_WAIT": "race|nothing wrote",
    "FREED_FOR_A_WARP": "",
    "FREED_BEFORE_THE_OTHER_LANES_HAVE_READ": (
        "race: writes shared buffer.0, which thread [0-9]+ of block .* read at kernel.cu:[0-9]+, and nothing orders"
        "|race: reads|in flight"
    ),
    "TWO_WAIT_FOR_EACH_OTHER": "deadlock",
    "TOO_FEW_ARRIVE": "deadlock",
    "TOO_MANY_ARRIVE": "more arrivals",
    "NEVER_INITIALIZED": "no mbarrier was initialized",
    "OVERWRITTEN": "overwritten",
    "COPY": "",
    "COPY_NOT_WAITED_FOR": PENDING,
    "TOO_MANY_BYTES": "deadlock",
    "TOO_FEW_BYTES": f"deadlock|{PENDING}",
    "TWO_COPIES": "",
    "THE_OTHERS_BARRIER": PENDING,
    "ONE_BARRIER_OF_TWO_COPIES": "",
    "OVERLAPPING_COPIES": PENDING,
    "MULTICAST": "",
    "MULTICAST_NOT_WAITED_FOR": PENDING,
    "GROUPS": "",
    "TOO_FEW_GROUPS": PENDING,
    "HANDED_ON": "",
    "HANDED_ON_TOO_SOON": PENDING,
}


class _Map(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * MAP_BYTES)]


def hand_off(way: str, order: Order) -> None:
    kernel = build(HANDOFFS.replace("WAYS", ", ".join(WAYS)), "handoff", checks=True)
    x, y = torch.randn(1, 32, 32), torch.zeros(2 * 96)
    blocks = 2 if "MULTICAST" in way else 1
    made = encode_tiled(x.data_ptr(), 4, (32, 32, 1), (128, 4096), (32, 32, 1), swizzle=0)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, y)]
    kernel.launch(
        (blocks, 1, 1),
        (96, 1, 1),
        [_Map.from_buffer_copy(made), *pointers, ctypes.c_int(list(WAYS).index(way))],
        cluster=(blocks, 1, 1),
        order=order,
        buffers=[(tensor.data_ptr(), tensor.nbytes) for tensor in (x, y)],
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_handoff_is_reported_in_every_order_or_in_none(way: str) -> None:
    for order in (Order(), Order(seed=7, late=True)):
        if WAYS[way]:
            with pytest.raises(TwinError, match=WAYS[way]):
                hand_off(way, order)
        else:
            hand_off(way, order)
