// Scaling exponent for halves (halves.cuh) before all numbers have been read: a first attempt uses an estimate from a
// sample and records the max magnitude; a second checks the estimate.
#pragma once

#include "common/elements.cuh"
#include "common/halves.cuh"
#include "common/warp.cuh"

struct Seen {  // zero before the first attempt and after the second
    u32 largest_bits, tickets;
};

// The exponent may bring the max magnitude to [2^5, 2^15), with 2^7 from [2^-2, 2^8): upper halves stay below 2^15, and
// the loss on a small number, 2^-25, is less than 2^-30 of the max.
__device__ __forceinline__ bool good_exponent(int exponent, u32 largest_bits) {
    const int brought_to = static_cast<int>(largest_bits >> 23) - 127 + exponent;
    return largest_bits == 0 || (brought_to >= 5 && brought_to < 15);
}

constexpr int FIRST_EXPONENT = 7;
constexpr int SAMPLES = 16;  // of four numbers, per lane
constexpr int MARGIN = 6;    // powers of two by which the max may exceed the sample's

// One exponent for all warps of all CTAs. Samples are an odd number of packs apart, so that they include all channels.
__device__ __forceinline__ int sampled_exponent(const float* x, long long packs) {
    const long long step = packs >= 32 * SAMPLES ? (packs / (32 * SAMPLES) - 1) | 1 : 1;
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < SAMPLES; ++i) {
        const long long at = (i * 32 + threadIdx.x % 32) * step;
        const Pack<float, 4> four = load_pack<float, 4>(x + 4 * (at < packs ? at : packs - 1));
#pragma unroll
        for (int e = 0; e < 4; ++e) largest = max(largest, magnitude_key(four.at[e]));
    }
    const u32 bits = magnitude_bits(warp_max(largest));
    return bits == 0 ? FIRST_EXPONENT : scaling_exponent(bits) - MARGIN;
}
