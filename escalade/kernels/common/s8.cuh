// Signed bytes and their conversions, in pairs and in packs of four. All arithmetic has full rate: adding 1.5 * 2^23 rounds
// a float to an integer (ties to even) in its low bits, where conversion instructions have a sixteenth of the rate.
#pragma once

#include "common/elements.cuh"
#include "common/ptx.cuh"

struct s8 {  // declared in the prelude of a program that names it
    signed char code;
};

// Type of the accumulators of products of an element type.
template <class Element>
struct SumOf {
    using Type = float;
};
template <>
struct SumOf<s8> {
    using Type = int;
};

template <class Element>
__device__ constexpr bool is_integer() { return false; }
template <>
__device__ constexpr bool is_integer<s8>() { return true; }

// Rounded to nearest, ties to even, and saturated at -128 and 127 (NaN too), in the low byte; the others are undefined.
__device__ __forceinline__ u32 s8_bits(float value) {
    return __float_as_uint(fminf(fmaxf(value, -128.f), 127.f) + 12582912.f);
}

// Two values in the low half; the high half is undefined.
__device__ __forceinline__ u32 to_s8x2(float low, float high) {
    return __byte_perm(s8_bits(low), s8_bits(high), 0x0040);
}

// Value of byte `BYTE`: as an unsigned one with its sign bit inverted, in the low bits of 2^23.
template <int BYTE>
__device__ __forceinline__ float s8_at(u32 inverted) {
    return __uint_as_float(__byte_perm(inverted, 0x4B000000, 0x7540 + BYTE)) - 8388736.f;
}

__device__ __forceinline__ float2 s8x2_to_floats(u32 two) {
    const u32 inverted = two ^ 0x8080;
    return {s8_at<0>(inverted), s8_at<1>(inverted)};
}

// Held as words: the compiler would use one register per byte.
template <int COUNT>
struct alignas(COUNT) Pack<s8, COUNT> {
    static_assert(COUNT % 4 == 0, "whole words");
    u32 words[COUNT / 4];
};

__device__ __forceinline__ u32 low_bytes(u32 a, u32 b, u32 c, u32 d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

template <int COUNT>
__device__ __forceinline__ void from_floats(Pack<s8, COUNT>& pack, const float (&values)[COUNT]) {
#pragma unroll
    for (int e = 0; e < COUNT; e += 4)
        pack.words[e / 4] =
            low_bytes(s8_bits(values[e]), s8_bits(values[e + 1]), s8_bits(values[e + 2]), s8_bits(values[e + 3]));
}

// The same of 128ths between 0 and 1, as instructions with saturation return them.
__device__ __forceinline__ u32 s8x4_of_parts(const float (&parts)[4]) {
    u32 bits[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) bits[e] = __float_as_uint(fmaf(fminf(parts[e], 127.f / 128.f), 128.f, 12582912.f));
    return low_bytes(bits[0], bits[1], bits[2], bits[3]);
}

template <int COUNT>
__device__ __forceinline__ void to_floats(float (&values)[COUNT], const Pack<s8, COUNT>& pack) {
#pragma unroll
    for (int e = 0; e < COUNT; e += 4) {
        const u32 inverted = pack.words[e / 4] ^ 0x80808080;
        values[e] = s8_at<0>(inverted), values[e + 1] = s8_at<1>(inverted);
        values[e + 2] = s8_at<2>(inverted), values[e + 3] = s8_at<3>(inverted);
    }
}

template <>
__device__ __forceinline__ s8 from_float<s8>(float value) {
    return {static_cast<signed char>(s8_bits(value))};
}

__device__ __forceinline__ float to_float(s8 value) { return value.code; }
