// Sums over the threads of a row: part of a warp, or all warps of a CTA.
#pragma once

#include "common/warp.cuh"

// Every call of a kernel has its own ROUND: no call waits until the previous one's sums have been read.
template <int ROW_THREADS, int ROUND = 0>
__device__ __forceinline__ float sum_over_row_threads(float value) {
    constexpr int LANES = ROW_THREADS < 32 ? ROW_THREADS : 32, WARPS = ROW_THREADS / LANES;
    static_assert((ROW_THREADS & (ROW_THREADS - 1)) == 0, "sums halve the threads of a row");
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    if constexpr (WARPS > 1) {
        __shared__ float parts[WARPS];
        const int lane = threadIdx.x % 32;
        if (lane == 0) parts[threadIdx.x / 32] = value;
        __syncthreads();
        value = parts[lane % WARPS];
#pragma unroll
        for (int distance = WARPS / 2; distance > 0; distance /= 2)
            value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    return value;
}
