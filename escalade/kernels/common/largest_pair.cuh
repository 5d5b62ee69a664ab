// Max of 16-bit values, two per 32-bit register, with or without their argmax in a window. NaN is larger than every
// number: it propagates, as in PyTorch.
#pragma once

#include "common/elements.cuh"
#include "common/placed_maximum.cuh"
#include "common/ptx.cuh"

// The last argument selects the type. Masks have all 16 bits of an element set, or none.
#ifdef __CUDA_FP16_H__
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b, __half) {
    const __half2 both = __hmax2_nan(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
    return reinterpret_cast<const u32&>(both);
}
__device__ __forceinline__ u32 greater_mask(u32 a, u32 b, __half) {
    return __hgt2_mask(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(b));
}
__device__ __forceinline__ u32 nan_mask(u32 a, __half) {
    return __hneu2_mask(reinterpret_cast<__half2&>(a), reinterpret_cast<__half2&>(a));
}
#endif
#ifdef __CUDA_BF16_H__
__device__ __forceinline__ u32 larger_pair(u32 a, u32 b, __nv_bfloat16) {
    const __nv_bfloat162 both =
        __hmax2_nan(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
    return reinterpret_cast<const u32&>(both);
}
__device__ __forceinline__ u32 greater_mask(u32 a, u32 b, __nv_bfloat16) {
    return __hgt2_mask(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(b));
}
__device__ __forceinline__ u32 nan_mask(u32 a, __nv_bfloat16) {
    return __hneu2_mask(reinterpret_cast<__nv_bfloat162&>(a), reinterpret_cast<__nv_bfloat162&>(a));
}
#endif

// COUNT adjacent maxima with their argmax, one by one, or in pairs if 16-bit.
template <class Stored, int COUNT, bool PAIRS = sizeof(Stored) == 2 && COUNT % 4 == 0>
struct PlacedMaxima {
    Largest at[COUNT];

    __device__ __forceinline__ void begin(const Pack<Stored, COUNT>& seen, int index) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) at[e] = {to_float(seen.at[e]), index};
    }
    __device__ __forceinline__ void update(const Pack<Stored, COUNT>& seen, int index) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) at[e].update(to_float(seen.at[e]), index);
    }
    __device__ __forceinline__ void store(Stored* y) const {
        Pack<Stored, COUNT> values;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) values.at[e] = from_float<Stored>(at[e].value);
        store_pack(y, values);
    }
    template <bool BEHIND_RELU_TOO>
    __device__ __forceinline__ void store_indices(unsigned char* indices) const {
        Pack<unsigned char, COUNT> from;
#pragma unroll
        for (int e = 0; e < COUNT; ++e) from.at[e] = stored_index<BEHIND_RELU_TOO>(at[e]);
        store_pack(indices, from);
    }
};

template <class Stored, int COUNT>
struct PlacedMaxima<Stored, COUNT, true> {
    Pack<u32, COUNT / 2> values, indices;  // an index in the lower byte of each half

    __device__ __forceinline__ void begin(const Pack<Stored, COUNT>& seen, int index) {
        values = reinterpret_cast<const Pack<u32, COUNT / 2>&>(seen);
#pragma unroll
        for (int e = 0; e < COUNT / 2; ++e) indices.at[e] = index * 0x00010001u;
    }
    __device__ __forceinline__ void update(const Pack<Stored, COUNT>& seen, int index) {
        const Pack<u32, COUNT / 2>& others = reinterpret_cast<const Pack<u32, COUNT / 2>&>(seen);
#pragma unroll
        for (int e = 0; e < COUNT / 2; ++e) {
            const u32 taken = greater_mask(others.at[e], values.at[e], Stored{}) | nan_mask(others.at[e], Stored{});
            indices.at[e] = (indices.at[e] & ~taken) | (index * 0x00010001u & taken);
            values.at[e] = larger_pair(values.at[e], others.at[e], Stored{});
        }
    }
    __device__ __forceinline__ void store(Stored* y) const { store_pack(reinterpret_cast<u32*>(y), values); }
    template <bool BEHIND_RELU_TOO>
    __device__ __forceinline__ void store_indices(unsigned char* to) const {
        Pack<u32, COUNT / 4> words;
#pragma unroll
        for (int w = 0; w < COUNT / 4; ++w) {
            u32 two[2];
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const u32 value = values.at[2 * w + e];
                const u32 kept = greater_mask(value, 0, Stored{}) | nan_mask(value, Stored{});
                two[e] = indices.at[2 * w + e] | (BEHIND_RELU_TOO ? ~kept & NOWHERE * 0x00010001u : 0);
            }
            words.at[w] = __byte_perm(two[0], two[1], 0x6420);
        }
        store_pack(reinterpret_cast<u32*>(to), words);
    }
};
