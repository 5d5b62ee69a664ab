// fp32 as the sum of two fp16 numbers, scaled by a power of two that brings the max magnitude of a block into [2^14,
// 2^15): x * 2^e = upper + lower.
//
// Together they have 22 bits for numbers down to 2^-18 of the block's max; below, the error is that of the lower half's
// last step, 2^-39 of the max. Of the four products of halves, lower * lower, below the last bit of the others, is
// omitted.
#pragma once

#include "common/ptx.cuh"

constexpr u32 INFINITY_BITS = 0x7F800000;
constexpr int NOT_FINITE = -1000;  // in place of an exponent

// Exponent e for a max magnitude, given by its bits; clamped so that 2^e and 2^-e are normal numbers.
__device__ __forceinline__ int scaling_exponent(u32 largest_bits) {
    return largest_bits == 0 ? 0 : min(14 + 127 - static_cast<int>(largest_bits >> 23), 126);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((127 + exponent) << 23); }

// Two factors whose product is 2^-exponent. For two exponents from scaling_exponent, the pairwise products of factors
// are normal numbers, which 2^-(sum of both) need not be.
__device__ __forceinline__ float2 undoing_factors(int exponent) {
    return make_float2(power_of_two(-(exponent / 2)), power_of_two(exponent / 2 - exponent));
}

// Increases with magnitude; smallest for non-finite values, whose exponent 255 wraps around to 0.
__device__ __forceinline__ u32 magnitude_key(float value) { return 2 * __float_as_uint(value) + 0x01000000; }

// Bits of the magnitude; 0 if not finite.
__device__ __forceinline__ u32 magnitude_bits(u32 key) { return key < 0x01000000 ? 0 : (key - 0x01000000) / 2; }

struct Halves {
    u32 upper, lower;  // of two numbers each
};

__device__ __forceinline__ Halves split(float first, float second) {
    const u32 upper = pack_half2(first, second);
    const float2 rounded = unpack_half2(upper);
    return {upper, pack_half2(first - rounded.x, second - rounded.y)};
}
