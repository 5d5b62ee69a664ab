// FP8 e4m3: sign, 4 exponent bits, 3 mantissa bits; up to 448, no infinities. Converted in pairs.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

struct e4m3 {  // declared in the prelude of a program that names it
    unsigned char code;
};

// Held as words: the compiler would use one register per byte.
template <int COUNT>
struct alignas(COUNT) Pack<e4m3, COUNT> {
    static_assert(COUNT % 4 == 0, "whole words");
    u32 words[COUNT / 4];
};

template <int COUNT>
__device__ __forceinline__ void from_floats(Pack<e4m3, COUNT>& pack, const float (&values)[COUNT]) {
#pragma unroll
    for (int e = 0; e < COUNT; e += 4)
        pack.words[e / 4] = to_e4m3x2(values[e], values[e + 1]) | u32(to_e4m3x2(values[e + 2], values[e + 3])) << 16;
}

template <int COUNT>
__device__ __forceinline__ void to_floats(float (&values)[COUNT], const Pack<e4m3, COUNT>& pack) {
#pragma unroll
    for (int e = 0; e < COUNT; e += 4) {
        u32 pairs[2];
        e4m3x4_to_half2(pairs, pack.words[e / 4]);
        const float2 low = unpack_half2(pairs[0]), high = unpack_half2(pairs[1]);
        values[e] = low.x, values[e + 1] = low.y, values[e + 2] = high.x, values[e + 3] = high.y;
    }
}

template <>
__device__ __forceinline__ e4m3 from_float<e4m3>(float value) {
    return {static_cast<unsigned char>(to_e4m3x2(value, 0.f))};
}

__device__ __forceinline__ float to_float(e4m3 value) {
    u32 pairs[2];
    e4m3x4_to_half2(pairs, value.code);
    return unpack_half2(pairs[0]).x;
}
