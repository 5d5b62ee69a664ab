// Reductions over the WARPS warps of a row; with several, the CTA has one row.
#pragma once

#include "common/softmax.cuh"
#include "common/warp.cuh"

template <class Reduce>
__device__ __forceinline__ float over_row(float value, float empty, Reduce reduce) {
    value = reduce(value);
    if constexpr (WARPS > 1) {
        __shared__ float parts[WARPS];
        const int lane = threadIdx.x % 32;
        __syncthreads();  // the previous round has been read
        if (lane == 0) parts[threadIdx.x / 32] = value;
        __syncthreads();
        value = reduce(lane < WARPS ? parts[lane] : empty);
    }
    return value;
}

__device__ __forceinline__ float largest_of_row(float value) {
    return over_row(value, minus_infinity(), [](float mine) { return warp_max(mine); });
}

__device__ __forceinline__ float sum_of_row(float value) {
    return over_row(value, 0.f, [](float mine) { return warp_sum(mine); });
}
