// What the threads of a block work out together.
#pragma once

// The same for every thread, and always summed in the same order; COUNT threads, a power of two.
template <int COUNT>
__device__ __forceinline__ float block_sum(float value) {
    __shared__ float sums[COUNT];
    __syncthreads();  // the last sum has been read by all
    sums[threadIdx.x] = value;
    for (int half = COUNT / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    __syncthreads();
    return sums[0];
}
