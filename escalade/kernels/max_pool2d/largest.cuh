// Max of two values, where NaN is larger than every number: it propagates, as in PyTorch.
#pragma once

#include "common/elements.cuh"
#include "common/largest_pair.cuh"
#include "common/ptx.cuh"

__device__ __forceinline__ float larger(float a, float b) { return max_nan(a, b); }

#ifdef __CUDA_FP16_H__
__device__ __forceinline__ __half larger(__half a, __half b) { return __hmax_nan(a, b); }
#endif
#ifdef __CUDA_BF16_H__
__device__ __forceinline__ __nv_bfloat16 larger(__nv_bfloat16 a, __nv_bfloat16 b) { return __hmax_nan(a, b); }
#endif

// COUNT consecutive elements, in pairs if 16-bit.
template <int COUNT, bool PAIRS = sizeof(Element) == 2 && COUNT % 2 == 0>
struct Values {
    Pack<Element, COUNT> pack;

    __device__ __forceinline__ static Values load(const Element* address) {
        return {load_pack<Element, COUNT>(address)};
    }
    __device__ __forceinline__ void store(Element* address) const { store_pack(address, pack); }
    __device__ __forceinline__ void raise(const Values& other) {
#pragma unroll
        for (int e = 0; e < COUNT; ++e) pack.at[e] = larger(pack.at[e], other.pack.at[e]);
    }
};

template <int COUNT>
struct Values<COUNT, true> {
    Pack<u32, COUNT / 2> pack;

    __device__ __forceinline__ static Values load(const Element* address) {
        return {load_pack<u32, COUNT / 2>(reinterpret_cast<const u32*>(address))};
    }
    __device__ __forceinline__ void store(Element* address) const {
        store_pack(reinterpret_cast<u32*>(address), pack);
    }
    __device__ __forceinline__ void raise(const Values& other) {
#pragma unroll
        for (int e = 0; e < COUNT / 2; ++e) pack.at[e] = larger_pair(pack.at[e], other.pack.at[e], Element{});
    }
};

// A position in the padding is replaced by the nearest inside the image, which every window that covers the former
// covers too: the max is unchanged, and no element needs a condition.
__device__ __forceinline__ int nearest_inside(int position, int size) { return min(max(position, 0), size - 1); }
