"""Correct kernels: the language, the memories, the collectives; every order gives the same result."""

from __future__ import annotations

import ctypes

import pytest
import torch

from escalade.device.twin import build
from tests.device.twin.support import ORDERS, launch

TILES = r"""
extern __shared__ float scale[];

template <int SIZE>
__device__ float sum_of_others(const float* values) {
    __shared__ float copy[SIZE];
    copy[threadIdx.x] = values[(threadIdx.x + 1) % SIZE];
    __syncthreads();
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) sum += copy[i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(64) tiles(const float* __restrict__ x, float* y, int offset) {
    __shared__ alignas(128) float tile[64];
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    tile[threadIdx.x] = __ldg(x + at);
    scale[threadIdx.x] = 2.f;
    __syncthreads();
    y[at] = sum_of_others<64>(tile) * scale[63 - threadIdx.x] + offset;
}
"""


@pytest.mark.parametrize("checks", [False, True])
def test_static_and_dynamic_shared_memory_in_every_order(checks: bool) -> None:
    kernel = build(TILES, "tiles", checks=checks)
    x = torch.randn(5, 64)
    for order in ORDERS:
        y = torch.full_like(x, float("nan"))
        launch(kernel, 5, 64, (x, y, 7), shared_bytes=256, order=order)
        torch.testing.assert_close(y, (2 * x.sum(1, keepdim=True) + 7).expand(5, 64), rtol=1e-5, atol=1e-5)


WARPS = r"""
extern "C" __global__ void warps(const int* x, int* y) {
    const int lane = threadIdx.x % 32, value = x[threadIdx.x];
    int* out = y + threadIdx.x * 10;
    out[0] = __shfl_sync(~0u, value, 5);
    out[1] = __shfl_up_sync(~0u, value, 3);
    out[2] = __shfl_down_sync(~0u, value, 3, 8);
    out[3] = __shfl_xor_sync(~0u, value, 6);
    out[4] = __ballot_sync(~0u, lane % 3 == 0);
    out[5] = __any_sync(~0u, lane == 9) + 2 * __all_sync(~0u, lane < 32);
    out[6] = __syncthreads_count(threadIdx.x % 2) + 1000 * __syncthreads_and(1) + 2000 * __syncthreads_or(0);
    out[7] = lane < 8 ? __shfl_sync(0xFFu, value, 2) : 0;
    out[8] = __popc(value) + __clz(value) + min(value, 3) + max(lane, 4);
    out[9] = __umulhi(0x80000000u + value, 6);
}
"""


def test_collectives() -> None:
    x = torch.arange(1, 65, dtype=torch.int32)
    kernel = build(WARPS, "warps", checks=True)
    lanes = torch.arange(64) % 32
    warp = torch.arange(64) // 32 * 32
    value = x.long()
    expected = torch.stack(
        [
            value[warp + 5],
            value[warp + torch.where(lanes >= 3, lanes - 3, lanes)],
            value[warp + torch.where(lanes % 8 + 3 < 8, lanes + 3, lanes)],
            value[warp + (lanes ^ 6)],
            torch.full((64,), sum(1 << i for i in range(0, 32, 3))),
            torch.full((64,), 3),
            torch.full((64,), 1032),
            torch.where(lanes < 8, value[warp + 2], 0),
            torch.tensor([bin(v).count("1") + 32 - v.bit_length() + min(v, 3) for v in value.tolist()])
            + lanes.clamp(min=4),
            (0x80000000 + value) * 6 >> 32,
        ],
        1,
    )
    for order in ORDERS:
        y = torch.zeros(64, 10, dtype=torch.int32)
        launch(kernel, 1, 64, (x, y), order=order)
        assert torch.equal(y.long(), expected)


SUMS = r"""
extern "C" __global__ void sums(const float* x, float* total, int* counters, unsigned long long* wide) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(total, x[at]);
    atomicAdd(&counters[0], 1);
    atomicMax(&counters[1], at);
    atomicMin(&counters[2], -at);
    atomicCAS(&counters[3], 0, 42);
    atomicAdd(wide, 1ull << 32);
}
"""


def test_atomics_of_blocks_on_several_cores() -> None:
    kernel = build(SUMS, "sums")
    x = torch.randint(-8, 9, (200 * 128,)).float()  # sums of small integers do not depend on the order
    for order in ORDERS[:2]:
        total = torch.zeros(1)
        counters = torch.zeros(4, dtype=torch.int32)
        wide = torch.zeros(1, dtype=torch.int64)
        launch(kernel, 200, 128, (x, total, counters, wide), order=order)
        assert total.item() == x.sum().item()
        assert counters.tolist() == [x.numel(), x.numel() - 1, 1 - x.numel(), 42]
        assert wide.item() == x.numel() << 32


HALVES = r"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void halves(const __half* a, const __half* b, __half* sum, __nv_bfloat16* product, __half2* fused,
                                  __half2* total) {
    const int i = threadIdx.x;
    sum[i] = __hadd(a[i], b[i]);
    product[i] = __float2bfloat16(__half2float(a[i]) * __half2float(b[i]));
    const __half2 pair = __halves2half2(a[i], b[i]);
    fused[i] = __hfma2(pair, pair, __float2half2_rn(1.f));
    atomicAdd(total, __floats2half2_rn(1.f, 2.f));
}
"""


def test_half_and_bfloat_arithmetic() -> None:
    a, b = torch.randn(2, 64).half()
    sums, fused = torch.empty(64, dtype=torch.half), torch.empty(64, 2, dtype=torch.half)
    product, total = torch.empty(64, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.half)
    launch(build(HALVES, "halves"), 1, 64, (a, b, sums, product, fused, total))
    assert torch.equal(sums, a + b)
    assert torch.equal(product, (a.float() * b.float()).bfloat16())
    assert torch.equal(fused, (torch.stack((a, b), 1).double() ** 2 + 1).half())
    assert total.tolist() == [64, 128]


UNFUSED = r"""
extern "C" __global__ void unfused(const double* a, const double* b, double* y) {
    const int i = threadIdx.x;
    y[3 * i] = __dmul_rn(a[i], a[i]) - b[i];
    y[3 * i + 1] = b[i] + __dmul_rn(a[i], a[i]);
    y[3 * i + 2] = __dsub_rn(__dadd_rn(a[i], b[i]), b[i]);
}
"""


def test_products_of_doubles_are_rounded_before_they_are_added() -> None:
    a, b = torch.randn(2, 64, dtype=torch.float64)
    b[::2] = (a * a)[::2]  # with FMA, the difference would be the rounding error
    y = torch.empty(64, 3, dtype=torch.float64)
    launch(build(UNFUSED, "unfused", counts=True), 1, 64, (a, b, y))  # g++ contracts to FMA where allowed
    square = a * a
    assert torch.equal(y, torch.stack((square - b, b + square, (a + b) - b), 1))


VECTORS = r"""
__constant__ float weights[2][4];
struct Scale { float by; int shift; };
extern "C" __global__ void vectors(const float4* x, float4* y, uint2* z, __grid_constant__ const Scale scale) {
    const int i = blockIdx.y * blockDim.x * blockDim.y + threadIdx.y * blockDim.x + threadIdx.x;
    float4 v = x[i];
    v.x *= weights[1][0], v.y *= weights[1][1], v.z *= weights[1][2], v.w = fmaxf(v.w, 0.f);
    float sine, cosine;
    sincospif(0.5f, &sine, &cosine);
    y[i] = make_float4(v.x * scale.by + cosine, v.y * sine, rsqrtf(v.z * v.z), __fmaf_rn(v.w, 1.f, 0.f));
    z[i] = make_uint2(i << scale.shift, gridDim.y);
}
"""


class _Scale(ctypes.Structure):
    _fields_ = [("by", ctypes.c_float), ("shift", ctypes.c_int)]


def test_vector_types_constants_structures_and_three_dimensions() -> None:
    kernel = build(VECTORS, "vectors", checks=True)
    address, size = kernel.constant("weights")
    weights = torch.randn(2, 4)
    assert size == 32
    ctypes.memmove(address, weights.data_ptr(), size)
    x, y, z = torch.randn(24, 4), torch.empty(24, 4), torch.empty(24, 2, dtype=torch.int32)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (x, y, z)]
    kernel.launch((1, 2, 1), (4, 3, 1), [*pointers, _Scale(3.0, 2)])
    scaled = x[:, :3] * weights[1, :3]
    expected = torch.stack((3 * scaled[:, 0], scaled[:, 1], 1 / scaled[:, 2].abs(), x[:, 3].relu()), 1)
    torch.testing.assert_close(y, expected)
    assert z.tolist() == [[4 * i, 2] for i in range(24)]


LAST_BLOCK = r"""
extern "C" __global__ void last_block(const float* x, float* partial, unsigned* ticket, float* total) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        float sum = 0.f;
        for (int i = 0; i < 32; ++i) sum += x[blockIdx.x * 32 + i];
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0.f;
        for (unsigned i = 0; i < gridDim.x; ++i) sum += partial[i];
        *total = sum;
    }
}
"""


def test_a_fence_and_an_atomic_order_blocks() -> None:
    kernel = build(LAST_BLOCK, "last_block", checks=True)
    x = torch.randn(6, 32)
    for order in ORDERS:
        partial, total = torch.zeros(6), torch.zeros(1)
        launch(kernel, 6, 32, (x, partial, torch.zeros(1, dtype=torch.int32), total), order=order)
        torch.testing.assert_close(total[0], x.sum(), rtol=1e-4, atol=1e-4)
