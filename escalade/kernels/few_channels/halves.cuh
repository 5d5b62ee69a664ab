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

struct Halves {
    u32 upper, lower;  // of two numbers each
};

__device__ __forceinline__ Halves split(float first, float second) {
    const u32 upper = pack_half2(first, second);
    const float2 rounded = unpack_half2(upper);
    return {upper, pack_half2(first - rounded.x, second - rounded.y)};
}
