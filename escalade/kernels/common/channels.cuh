// Images whose channels have numbers of their own: which channel an element belongs to, and a pack's worth of numbers.
#pragma once

#include "common/elements.cuh"

// The channel of the element `at`, counted in memory's order.
__device__ __forceinline__ int channel_of(Index at, int channels, int plane) {
    return static_cast<int>(NHWC ? at % channels : at / plane % channels);
}

// VECTOR channels' worth of one of their numbers. Four at most move as one: nobody promises more than 16-byte alignment.
template <int VECTOR>
__device__ __forceinline__ void load_channels(const float* from, float (&values)[VECTOR]) {
    constexpr int TOGETHER = VECTOR < 4 ? VECTOR : 4;
#pragma unroll
    for (int e = 0; e < VECTOR; e += TOGETHER) {
        const Pack<float, TOGETHER> pack = load_pack<float, TOGETHER>(from + e);
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) values[e + i] = pack.at[i];
    }
}
