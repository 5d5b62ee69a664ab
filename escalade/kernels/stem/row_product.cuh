// One k-step of a wgmma of COLUMNS pixels of a row by 64 filters, by element type.
#pragma once

#include "common/elements.cuh"
#include "common/hopper.cuh"

constexpr int COLUMN_BLOCKS = COLUMNS / 8;

using Flat = float[4 * COLUMN_BLOCKS];

#ifdef __CUDA_FP16_H__
__device__ __forceinline__ void multiply(__half, Flat& acc, const u32 (&weights)[4], u64 pixels, bool accumulate) {
    wgmma_from_registers(acc, weights, pixels, accumulate);
}
#endif
#ifdef __CUDA_BF16_H__
__device__ __forceinline__ void multiply(__nv_bfloat16, Flat& acc, const u32 (&weights)[4], u64 pixels,
                                         bool accumulate) {
    wgmma_bf16_from_registers(acc, weights, pixels, accumulate);
}
#endif

// Weights of the warp's block of 16 filters, one of `blocks`.
template <int STEPS>
__device__ __forceinline__ void load_weights(u32 (&weights)[STEPS][4], const u32* __restrict__ packed, int block,
                                             int blocks) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const Pack<u32, 4> four = load_pack<u32, 4>(packed + ((step * blocks + block) * 32 + lane) * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[step][i] = four.at[i];
    }
}
