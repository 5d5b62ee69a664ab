// Reductions over the threads of a CTA.
#pragma once

// Sum over COUNT threads (a power of two), in a fixed order; every thread receives it.
template <int COUNT>
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[COUNT];
    __syncthreads();  // the previous sum has been read by all
    sums[threadIdx.x] = value;
    for (int half = COUNT / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}
