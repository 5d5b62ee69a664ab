// A k-step of 16 columns by 16 rows as an MMA operand, for 16-bit elements and fp32.
//
// fp32 accuracy takes three TF32 MMAs: a number is big + rest, both TF32; (A + a) (B + b) = A B + A b + a B, a b is
// negligible. A TF32 MMA has k = 8, so a step takes two.
#pragma once

#include "common/elements.cuh"
#include "common/mma_tile.cuh"
#include "common/pairs.cuh"

// Weights of a k-step by 16 outputs, two tiles of eight: this lane's share of a fragment.
template <class Element>
struct Fragment {
    static constexpr int PACKS = 32;  // 16-byte packs, over all lanes
    u32 tile[2][2];

    __device__ __forceinline__ explicit Fragment(const uint4* packed) {
        const uint4 four = *packed;
        tile[0][0] = four.x, tile[0][1] = four.y, tile[1][0] = four.z, tile[1][1] = four.w;
    }
};

template <class Element>
struct Step {
    u32 pairs[4];

    __device__ __forceinline__ void set(const float (&low)[4], const float (&high)[4]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            pairs[r] = pack_pair<Element>(low[2 * r], low[2 * r + 1]);
            pairs[2 + r] = pack_pair<Element>(high[2 * r], high[2 * r + 1]);
        }
    }

    // sums (16 outputs) += this * weights
    __device__ __forceinline__ void multiply(float (&low)[4], float (&high)[4],
                                             const Fragment<Element>& weights) const {
        multiply_add<Element>(low, pairs, weights.tile[0]);
        multiply_add<Element>(high, pairs, weights.tile[1]);
    }
};

// The tensor core truncates `rest` to TF32 by itself. An infinity makes it NaN.
__device__ __forceinline__ void split(float value, u32& big, u32& rest) {
    big = to_tf32(value);
    rest = __float_as_uint(value - __uint_as_float(big));
}

template <>
struct Fragment<float> {
    static constexpr int PACKS = 64;
    u32 big[2][2][2], rest[2][2][2];  // [half of the step][tile]

    __device__ __forceinline__ explicit Fragment(const uint4* packed) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 four = packed[half * 32];
            split(__uint_as_float(four.x), big[half][0][0], rest[half][0][0]);
            split(__uint_as_float(four.y), big[half][0][1], rest[half][0][1]);
            split(__uint_as_float(four.z), big[half][1][0], rest[half][1][0]);
            split(__uint_as_float(four.w), big[half][1][1], rest[half][1][1]);
        }
    }
};

template <>
struct Step<float> {
    u32 big[2][4], rest[2][4];

    __device__ __forceinline__ void set(const float (&low)[4], const float (&high)[4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                split(half ? high[i % 2 * 2 + i / 2] : low[i % 2 * 2 + i / 2], big[half][i], rest[half][i]);
    }

    __device__ __forceinline__ void multiply(float (&low)[4], float (&high)[4], const Fragment<float>& weights) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // small products first
            multiply_add<float>(low, rest[half], weights.big[half][0]);
            multiply_add<float>(high, rest[half], weights.big[half][1]);
            multiply_add<float>(low, big[half], weights.rest[half][0]);
            multiply_add<float>(high, big[half], weights.rest[half][1]);
            multiply_add<float>(low, big[half], weights.big[half][0]);
            multiply_add<float>(high, big[half], weights.big[half][1]);
        }
    }
};

// Two adjacent elements of a row, as stored: 16-bit ones stay packed in one register.
template <class Element>
struct ElementPair {
    u32 pair;

    __device__ __forceinline__ void set(float low, float high) { pair = pack_pair<Element>(low, high); }
    __device__ __forceinline__ float2 wide() const { return unpack_pair<Element>(pair); }
    __device__ __forceinline__ void set_one(int which, Element one) {
        const u32 bits = *reinterpret_cast<const u16*>(&one);
        pair = which ? (pair & 0xFFFF) | bits << 16 : (pair & 0xFFFF0000) | bits;
    }
    __device__ __forceinline__ Element one(int which) const {
        const u16 bits = static_cast<u16>(which ? pair >> 16 : pair);
        return *reinterpret_cast<const Element*>(&bits);
    }
};

template <>
struct ElementPair<float> {
    float low, high;

    __device__ __forceinline__ void set(float first, float second) { low = first, high = second; }
    __device__ __forceinline__ float2 wide() const { return {low, high}; }
    __device__ __forceinline__ void set_one(int which, float one) { (which ? high : low) = one; }
    __device__ __forceinline__ float one(int which) const { return which ? high : low; }
};
