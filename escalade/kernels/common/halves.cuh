// fp32 as the sum of two fp16 numbers, after a power of two has brought the largest of a block of them to [2^14, 2^15):
// x * 2^e = upper + lower.
//
// The two have 22 bits between them for numbers down to 2^-18 of the block's largest; below, the error stays that of
// the lower half's last step, 2^-39 of the largest. Of the four products of halves the one of two lower halves, below
// the last bit of the others, is left out.
#pragma once

#include "common/ptx.cuh"

constexpr u32 INFINITY_BITS = 0x7F800000;
constexpr int NOT_FINITE = -1000;  // in place of an exponent

// For the largest magnitude, given by its bits; where 2^e or 2^-e would not be a normal number, the nearest that is.
__device__ __forceinline__ int scaling_exponent(u32 largest_bits) {
    return largest_bits == 0 ? 0 : min(14 + 127 - static_cast<int>(largest_bits >> 23), 126);
}

__device__ __forceinline__ float power_of_two(int exponent) { return __uint_as_float((127 + exponent) << 23); }

// Two numbers that multiply to 2^-exponent. For two exponents of scaling_exponent, the products of one's and the
// other's are normal numbers too, where 2^-(sum of both) need not be.
__device__ __forceinline__ float2 undoing_factors(int exponent) {
    return make_float2(power_of_two(-(exponent / 2)), power_of_two(exponent / 2 - exponent));
}

// Grows with a number's magnitude, and is least of all for what is not finite: the exponent 255 goes round to 0.
__device__ __forceinline__ u32 magnitude_key(float value) { return 2 * __float_as_uint(value) + 0x01000000; }

// The magnitude's bits; 0 for what is not finite.
__device__ __forceinline__ u32 magnitude_bits(u32 key) { return key < 0x01000000 ? 0 : (key - 0x01000000) / 2; }

struct Halves {
    u32 upper, lower;  // of two numbers each
};

__device__ __forceinline__ Halves split(float first, float second) {
    const u32 upper = pack_half2(first, second);
    const float2 rounded = unpack_half2(upper);
    return {upper, pack_half2(first - rounded.x, second - rounded.y)};
}
