// Per-channel values of images: the channel of an element, and packs of channel values.
#pragma once

#include "common/elements.cuh"

#ifndef ESCALADE_PARAMETERS  // the host defines these; the values here let an editor open the file
using Index = unsigned;      // index: counts elements; 64 bits only where needed, since 64-bit divisions are slow
constexpr bool NHWC = true;  // problem.layout == "nhwc" or problem.pixels == 1: one pixel is alike in both layouts
#endif

// Channel of element `at`, in memory order.
__device__ __forceinline__ int channel_of(Index at, int channels, int plane) {
    return static_cast<int>(NHWC ? at % channels : at / plane % channels);
}

// Per-channel values of VECTOR channels. At most four per load: only 16-byte alignment is guaranteed.
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
