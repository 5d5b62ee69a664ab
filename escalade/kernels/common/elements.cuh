// Element types: conversion to and from fp32, the accumulator type, and packs of elements that move as one 4-, 8- or
// 16-byte access.
//
// The headers of half and bfloat16 take most of a second to compile, so the prelude includes only those whose types it
// names, and the code below adapts.
#pragma once

__device__ __forceinline__ float to_float(float value) { return value; }

template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) { return value; }

#ifdef __CUDA_FP16_H__
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
template <>
__device__ __forceinline__ __half from_float<__half>(float value) { return __float2half_rn(value); }
#endif

#ifdef __CUDA_BF16_H__
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }
#endif

template <class T, int COUNT>
struct alignas(sizeof(T) * COUNT) Pack {  // aligned as a whole, so that the compiler moves it as a unit
    T at[COUNT];
};

template <class T, int COUNT>
__device__ __forceinline__ Pack<T, COUNT> load_pack(const T* address) {
    return *reinterpret_cast<const Pack<T, COUNT>*>(address);
}

// Zeros without a load unless `inside`. By words: the compiler would merge 16-bit elements of two sources one by one.
template <class T, int COUNT>
__device__ __forceinline__ Pack<T, COUNT> load_pack_if(bool inside, const T* address) {
    constexpr int WORDS = sizeof(T) * COUNT / sizeof(unsigned);
    if constexpr (WORDS == 0) {
        return inside ? load_pack<T, COUNT>(address) : Pack<T, COUNT>{};
    } else {
        Pack<unsigned, WORDS> words = {};
        if (inside) words = load_pack<unsigned, WORDS>(reinterpret_cast<const unsigned*>(address));
        return reinterpret_cast<const Pack<T, COUNT>&>(words);
    }
}

template <class T, int COUNT>
__device__ __forceinline__ void store_pack(T* address, const Pack<T, COUNT>& pack) {
    *reinterpret_cast<Pack<T, COUNT>*>(address) = pack;
}

// The same for data that is not read again soon: its cache lines are evicted first.
template <class T, int COUNT>
__device__ __forceinline__ void store_pack_streaming(T* address, const Pack<T, COUNT>& pack) {
    if constexpr (sizeof(pack) == 16) {
        __stcs(reinterpret_cast<uint4*>(address), reinterpret_cast<const uint4&>(pack));
    } else if constexpr (sizeof(pack) == 8) {
        __stcs(reinterpret_cast<uint2*>(address), reinterpret_cast<const uint2&>(pack));
    } else {
        store_pack(address, pack);
    }
}

template <class T, int COUNT>
__device__ __forceinline__ void from_floats(Pack<T, COUNT>& pack, const float (&values)[COUNT]) {
#pragma unroll
    for (int e = 0; e < COUNT; ++e) pack.at[e] = from_float<T>(values[e]);
}
