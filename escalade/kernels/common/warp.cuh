// Warp reductions.
#pragma once

constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// Largest number; NaNs are ignored.
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// One instruction on a GPU; the twin, which compiles for no architecture, uses shuffles.
__device__ __forceinline__ unsigned warp_max(unsigned value) {
#ifdef __CUDA_ARCH__
    return __reduce_max_sync(ALL_LANES, value);
#else
    for (int distance = 16; distance > 0; distance /= 2) {
        const unsigned other = __shfl_xor_sync(ALL_LANES, value, distance);
        value = other > value ? other : value;
    }
    return value;
#endif
}

// Sum i of COUNT (a power of two up to 32) over all lanes, in lanes i * 32 / COUNT up to the next multiple. A lane
// keeps half of its sums and passes on the other half, recursively: COUNT - 1 shuffles, where separate sums take five
// each.
template <int COUNT, int DISTANCE = 16>
__device__ __forceinline__ float warp_sums(const float (&values)[COUNT]) {
    if constexpr (COUNT > 1) {
        const bool upper = threadIdx.x & DISTANCE;
        float kept[COUNT / 2];
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) {
            const float given = upper ? values[i] : values[i + COUNT / 2];
            kept[i] = (upper ? values[i + COUNT / 2] : values[i]) + __shfl_xor_sync(ALL_LANES, given, DISTANCE);
        }
        return warp_sums<COUNT / 2, DISTANCE / 2>(kept);
    } else {
        float sum = values[0];
#pragma unroll
        for (int distance = DISTANCE; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
        return sum;
    }
}
